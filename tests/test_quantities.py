import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workshop_utils.quantities import bytes_of, bytes_per_second_of, seconds_of


def test_a_size_is_read_with_powers_of_1000_and_with_i_powers_of_1024() -> None:
    texts = (1024, "512Mi", "512MiB", "1.5GB", "1K", "1kB", " 1 M ", "3Ti", "1e3", "7B")
    nbytes = [1024, 512 * 2**20, 512 * 2**20, 1.5e9, 1000, 1000, 1e6, 3 * 2**40, 1000, 7]
    assert [bytes_of(text) for text in texts] == nbytes


def test_a_duration_is_read_in_seconds() -> None:
    texts = ("50us", "50µs", "1ms", "1.5", 2, "10min", "2h", "1d")
    seconds = [5e-5, 5e-5, 1e-3, 1.5, 2, 600, 7200, 86400]
    assert [seconds_of(text) for text in texts] == pytest.approx(seconds)


def test_a_rate_counts_bits_and_is_read_in_bytes_per_second() -> None:
    texts = ("100Mbit", "1Gbit", "8kbit", "1Gbit/s", "9600bps")
    assert [bytes_per_second_of(text) for text in texts] == pytest.approx([12.5e6, 125e6, 1000, 125e6, 1200])


@pytest.mark.parametrize(
    ("parse", "texts", "example"),
    [
        (bytes_of, ("lots", "-1Gi", "1 2", "1gi", "Gi", True, "1e999"), "a size such as '512Mi'"),
        (seconds_of, ("soon", "10 minutes", "-5s", "1:30", False, "1e999s"), "a duration such as '50us'"),
        (bytes_per_second_of, ("1GBit/s", "100", "100MB", "-1Mbit"), "a rate in bits, such as '100Mbit'"),
        (bytes_per_second_of, ("0Mbit",), "more than zero"),
    ],
)
def test_what_cannot_be_read_is_answered_with_an_example(
    parse: Callable[[str], float], texts: tuple[str, ...], example: str
) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=f"it must be {example}"):
            parse(text)


@given(st.text() | st.from_regex(r"\d{1,5}(\.\d{1,3})?(e[+-]?\d{1,4})?[A-Za-zµ]{0,4}", fullmatch=True))
def test_any_text_is_either_a_finite_quantity_or_a_value_error(text: str) -> None:
    for parse in (bytes_of, seconds_of, bytes_per_second_of):
        try:
            value = parse(text)
        except ValueError:
            continue
        assert math.isfinite(value)
        assert value >= 0
