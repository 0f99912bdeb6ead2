"""Amdahl's and Gustafson's laws, and the fit of a serial fraction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workshop_utils.scaling.laws import amdahl_speedup, fit_serial_fraction, gustafson_speedup

fractions = st.floats(0, 1)


def test_amdahl_gives_the_textbook_numbers():
    assert amdahl_speedup(0.5, [1, 3]).tolist() == [1, 1.5]
    assert amdahl_speedup(0.05, 1000) == pytest.approx(19.627, abs=1e-3)
    assert amdahl_speedup(0.5, 2) == pytest.approx(4 / 3)


def test_gustafson_gives_the_number_of_his_paper():
    # 1,024 processors and a serial fraction of 0.8 %: the wave-mechanics figure, a scaled speed-up of 1,016.
    assert gustafson_speedup(0.008, 1024) == pytest.approx(1015.8, abs=0.1)


@given(st.floats(0, 0.99), st.integers(2, 1000))
def test_the_laws_are_one_law_seen_from_two_sides(serial, workers):
    """With s as its part of the parallel time, Gustafson's speed-up is Amdahl's for the same work."""
    of_serial_run = serial / gustafson_speedup(serial, workers)
    assert amdahl_speedup(of_serial_run, workers) == pytest.approx(gustafson_speedup(serial, workers))


@pytest.mark.parametrize("law", [amdahl_speedup, gustafson_speedup])
def test_impossible_arguments_are_named(law):
    with pytest.raises(ValueError, match=r"serial_fraction is 1\.5; it must lie between 0 and 1"):
        law(1.5, 4)
    with pytest.raises(ValueError, match="workers is 0; there must be at least 1"):
        law(0.1, 0)


@given(fractions, st.lists(st.integers(2, 500), min_size=1, max_size=5))
def test_the_fit_finds_the_fraction_that_made_the_speedups(serial, workers):
    found = fit_serial_fraction(workers, [amdahl_speedup(serial, size) for size in workers])
    assert found == pytest.approx(serial, abs=1e-9)


def test_one_measurement_gives_the_metric_of_karp_and_flatt():
    assert fit_serial_fraction([4], [3]) == pytest.approx((1 / 3 - 1 / 4) / (1 - 1 / 4))


def test_a_fit_stays_between_nothing_and_everything():
    assert fit_serial_fraction([2], [2.5]) == 0
    assert fit_serial_fraction([2], [0.5]) == 1


@pytest.mark.parametrize(
    ("workers", "speedups", "message"),
    [
        ([2, 4], [1.5], "2 numbers of workers have 1 speed-ups"),
        ([1], [1.0], "a second size is needed"),
        ([2], [0.0], "each has to be above zero"),
    ],
)
def test_a_fit_of_nothing_says_what_is_missing(workers, speedups, message):
    with pytest.raises(ValueError, match=message):
        fit_serial_fraction(workers, speedups)
