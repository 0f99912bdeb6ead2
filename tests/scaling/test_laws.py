"""Amdahl's and Gustafson's laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workshop_utils.scaling.laws import amdahl_speedup, gustafson_speedup


def test_the_laws_give_the_published_numbers():
    assert amdahl_speedup(0.5, [1, 3]).tolist() == [1, 1.5]
    assert amdahl_speedup(0.05, 1000) == pytest.approx(19.627, abs=1e-3)
    # 1,024 processors and a serial fraction of 0.8 %: the wave-mechanics figure, a scaled speed-up of 1,016.
    assert gustafson_speedup(0.008, 1024) == pytest.approx(1015.8, abs=0.1)


@given(st.floats(0, 0.99), st.integers(2, 500))
def test_the_laws_are_one_law_seen_from_two_sides(fraction, workers):
    """With s as its part of the parallel time, Gustafson's speed-up is Amdahl's for the same work."""
    of_serial_run = fraction / gustafson_speedup(fraction, workers)
    assert amdahl_speedup(of_serial_run, workers) == pytest.approx(gustafson_speedup(fraction, workers))
