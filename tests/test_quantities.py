import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workshop_utils.quantities import bytes_of, bytes_per_second_of, seconds_of


def test_units_are_read_powers_of_1000_of_1024_with_an_i_and_rates_in_bits():
    sizes = {1024: 1024, "512MiB": 512 * 2**20, "3Ti": 3 * 2**40, "1.5GB": 1.5e9, "1K": 1000, " 1 M ": 1e6}
    times = {"50us": 5e-5, "50µs": 5e-5, "1.5": 1.5, 2: 2, "10min": 600, "2h": 7200, "1d": 86400}
    rates = {"100Mbit": 12.5e6, "8kbit": 1000, "1Gbit/s": 125e6, "9600bps": 1200}
    for parse, values in ((bytes_of, sizes), (seconds_of, times), (bytes_per_second_of, rates)):
        assert {text: parse(text) for text in values} == pytest.approx(values)


@pytest.mark.parametrize(
    ("parse", "texts", "example"),
    [
        (bytes_of, ("lots", "-1Gi", "1 2", "1gi", "Gi", True, "1e999"), "a size such as '512Mi'"),
        (seconds_of, ("soon", "10 minutes", "-5s", "1:30", False, "1e999s"), "a duration such as '50us'"),
        (bytes_per_second_of, ("1GBit/s", "100", "100MB", "-1Mbit"), "a rate in bits, such as '100Mbit'"),
        (bytes_per_second_of, ("0Mbit",), "more than zero"),
    ],
)
def test_what_cannot_be_read_is_answered_with_an_example(parse, texts, example):
    for text in texts:
        with pytest.raises(ValueError, match=f"it must be {example}"):
            parse(text)


@given(st.text() | st.from_regex(r"\d{1,5}(\.\d{1,3})?(e[+-]?\d{1,4})?[A-Za-zµ]{0,4}", fullmatch=True))
def test_any_text_is_either_a_finite_quantity_or_a_value_error(text):
    for parse in (bytes_of, seconds_of, bytes_per_second_of):
        try:
            value = parse(text)
        except ValueError:
            continue
        assert math.isfinite(value)
        assert value >= 0
