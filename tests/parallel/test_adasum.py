"""Adasum of two gradients, and of more."""

import numpy as np
import pytest

from workshop_utils.parallel import adasum

EAST, NORTH = np.array([1.0, 0.0]), np.array([0.0, 1.0])


def test_orthogonal_gradients_are_added_and_parallel_ones_averaged():
    assert adasum.combine(EAST, NORTH) == pytest.approx([1, 1])
    assert adasum.combine(EAST, 3 * EAST) == pytest.approx([2, 0])
    assert adasum.combine(EAST, -EAST) == pytest.approx([0, 0])


def test_a_gradient_of_zeros_changes_nothing():
    assert adasum.combine(EAST, 0 * EAST) == pytest.approx(EAST)
    assert adasum.combine(0 * EAST, 0 * EAST) == pytest.approx([0, 0])


def test_equal_gradients_of_any_number_of_ranks_stay_as_they_are():
    for count in (1, 2, 4, 8):
        assert adasum.reduce([EAST + 2 * NORTH] * count) == pytest.approx([1, 2])


@pytest.mark.parametrize("count", [0, 3, 6])
def test_other_numbers_than_powers_of_two_are_refused(count):
    with pytest.raises(ValueError, match=f"there are {count} gradients; Adasum takes 1, 2, 4, 8"):
        adasum.reduce([EAST] * count)
