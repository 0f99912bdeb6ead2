import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workshop_utils.jobs.quantities import bytes_of, bytes_per_second_of, seconds_of


def test_units_are_read_powers_of_1000_of_1024_with_an_i_and_rates_in_bits():
    sizes = {1024: 1024, "512MiB": 512 * 2**20, "3Ti": 3 * 2**40, "1.5GB": 1.5e9, "1K": 1000, " 1 M ": 1e6}
    times = {"50us": 5e-5, "50µs": 5e-5, "1.5": 1.5, 2: 2, "10min": 600, "2h": 7200, "1d": 86400}
    rates = {"100Mbit": 12.5e6, "8kbit": 1000, "1Gbit/s": 125e6, "9600bps": 1200}
    for parse, values in ((bytes_of, sizes), (seconds_of, times), (bytes_per_second_of, rates)):
        assert {text: parse(text) for text in values} == pytest.approx(values)


@given(st.text() | st.from_regex(r"\d{1,5}(\.\d{1,3})?(e[+-]?\d{1,4})?[A-Za-zµ]{0,4}", fullmatch=True))
def test_any_text_is_either_a_finite_quantity_or_a_value_error(text):
    for parse in (bytes_of, seconds_of, bytes_per_second_of):
        try:
            value = parse(text)
        except ValueError:
            continue
        assert math.isfinite(value)
        assert value >= 0


def test_a_truth_value_is_no_quantity():
    for parse in (bytes_of, seconds_of):
        with pytest.raises(ValueError, match="it must be a"):
            parse(True)
