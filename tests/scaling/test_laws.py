"""Amdahl's and Gustafson's laws, and the fit of a serial fraction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workshop_utils.scaling.laws import amdahl_speedup, fit_serial_fraction, gustafson_speedup


def test_the_laws_give_the_published_numbers():
    assert amdahl_speedup(0.5, [1, 3]).tolist() == [1, 1.5]
    assert amdahl_speedup(0.05, 1000) == pytest.approx(19.627, abs=1e-3)
    # 1,024 processors and a serial fraction of 0.8 %: the wave-mechanics figure, a scaled speed-up of 1,016.
    assert gustafson_speedup(0.008, 1024) == pytest.approx(1015.8, abs=0.1)
    # Karp and Flatt's metric, from one measurement.
    assert fit_serial_fraction([4], [3]) == pytest.approx((1 / 3 - 1 / 4) / (1 - 1 / 4))


@given(st.floats(0, 0.99), st.lists(st.integers(2, 500), min_size=1, max_size=5))
def test_the_laws_are_one_law_seen_from_two_sides_and_the_fit_finds_its_fraction(serial, workers):
    """With s as its part of the parallel time, Gustafson's speed-up is Amdahl's for the same work."""
    of_serial_run = serial / gustafson_speedup(serial, workers[0])
    assert amdahl_speedup(of_serial_run, workers[0]) == pytest.approx(gustafson_speedup(serial, workers[0]))
    found = fit_serial_fraction(workers, amdahl_speedup(serial, workers))
    assert found == pytest.approx(serial, abs=1e-9)


def test_a_fit_stays_between_nothing_and_everything():
    assert fit_serial_fraction([2], [2.5]) == 0
    assert fit_serial_fraction([2], [0.5]) == 1
