import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workshop_utils.quantities import bytes_of, bytes_per_second_of, seconds_of


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1024", 1024),
        (1024, 1024),
        ("512Mi", 512 * 1024**2),
        ("512MiB", 512 * 1024**2),
        ("2Gi", 2 * 1024**3),
        ("1.5GB", 1_500_000_000),
        ("1K", 1000),
        ("1kB", 1000),
        (" 1 M ", 1_000_000),
        ("3Ti", 3 * 1024**4),
        ("1e3", 1000),
        ("7B", 7),
    ],
)
def test_a_size_is_read_with_powers_of_1000_and_with_i_powers_of_1024(text: str | int, nbytes: int) -> None:
    assert bytes_of(text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50us", 5e-5),
        ("50µs", 5e-5),
        ("1ms", 1e-3),
        ("1.5", 1.5),
        (2, 2),
        ("10min", 600),
        ("2h", 7200),
        ("1d", 86400),
    ],
)
def test_a_duration_is_read_in_seconds(text: str | float, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100Mbit", 12.5e6), ("1Gbit", 125e6), ("8kbit", 1000), ("1Gbit/s", 125e6), ("9600bps", 1200)],
)
def test_a_rate_counts_bits_and_is_read_in_bytes_per_second(text: str, rate: float) -> None:
    assert bytes_per_second_of(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    "text", ["lots", "", "-1Gi", "1 2", "1Xi", "1gi", "Gi", True, "nan", "1e999", "9" * 400]
)
def test_a_size_that_cannot_be_read_is_answered_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="it must be a size such as '512Mi'"):
        bytes_of(text)


@pytest.mark.parametrize("text", ["soon", "10 minutes", "-5s", "1:30", "10m", False, "inf", "1e999s"])
def test_a_duration_that_cannot_be_read_is_answered_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="it must be a duration such as '50us'"):
        seconds_of(text)


@pytest.mark.parametrize("text", ["1GBit/s", "1GB/s", "fast", "100", "100MB", "-1Mbit", "1e999Gbit"])
def test_a_rate_that_may_mean_bytes_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="it must be a rate in bits, such as '100Mbit'"):
        bytes_per_second_of(text)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="it must be more than zero"):
        bytes_per_second_of("0Mbit")


@given(st.text() | st.from_regex(r"\d{1,5}(\.\d{1,3})?(e[+-]?\d{1,4})?[A-Za-zµ]{0,4}", fullmatch=True))
def test_any_text_is_either_a_finite_quantity_or_a_value_error(text: str) -> None:
    for parse in (bytes_of, seconds_of, bytes_per_second_of):
        try:
            value = parse(text)
        except ValueError:
            continue
        assert math.isfinite(value)
        assert value >= 0
