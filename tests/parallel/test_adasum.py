"""Adasum of two gradients, and of more."""

import numpy as np
import pytest

from workshop_utils.parallel import adasum

pytestmark = pytest.mark.processes

EAST, NORTH = np.array([1.0, 0.0]), np.array([0.0, 1.0])


def test_orthogonal_gradients_are_added_and_parallel_ones_averaged():
    assert adasum.combine(EAST, NORTH) == pytest.approx([1, 1])
    assert adasum.combine(EAST, 3 * EAST) == pytest.approx([2, 0])
    assert adasum.combine(EAST, -EAST) == pytest.approx([0, 0])


def test_a_gradient_of_zeros_changes_nothing():
    assert adasum.combine(EAST, 0 * EAST) == pytest.approx(EAST)
    assert adasum.combine(0 * EAST, 0 * EAST) == pytest.approx([0, 0])
