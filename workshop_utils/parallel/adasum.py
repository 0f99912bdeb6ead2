"""Adasum: gradients combined so that what they share counts once.

From each of two gradients half of the other's projection on it is taken away. Parallel gradients then give their
mean, orthogonal ones their sum, and what lies between something in between; so no learning rate has to be scaled
with the number of workers. More than two are combined in pairs, and the results in pairs again.

Source: Maleki et al. (2020), "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924;
Horovod 0.28.1 does it so, horovod/common/ops/adasum/adasum.h.
"""

from __future__ import annotations

import numpy as np


def combine(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Adasum of two gradients of the same shape (elements,); one that is zero leaves the other as it is."""
    dot, squares = float(first @ second), (float(first @ first), float(second @ second))
    of_first, of_second = (1 - dot / (2 * square) if square else 1.0 for square in squares)
    return of_first * first + of_second * second
