"""From what size on one all-reduce is faster than another: by formula, and by the simulated clock.

A tree has few steps and sends whole arrays; a ring has many steps and sends each byte twice at most. So a tree is
faster while latency matters, and a ring from some size on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workshop_utils.comm.cluster import Cluster, Link
from workshop_utils.comm.communicator import Array, Communicator
from workshop_utils.comm.shape import Shape
from workshop_utils.comm.simulated import simulate

AllReduce = Callable[[Communicator, Array], None]


def tree_ring_crossover_nbytes(size: int, latency_seconds: float, bandwidth_bytes_per_second: float) -> float:
    """Bytes at which `tree_all_reduce` and `ring_all_reduce` take the same time; a ring is faster above.

    With L = ⌈log₂ N⌉ it solves L (α + K/B) = (N − 1)(α + K/NB): K = α B (N − 1 − L) / (L − (N − 1)/N).
    It is zero up to N = 3, where a ring has no more steps than a tree.

    Raises:
        ValueError: for one rank, which sends nothing in either.
    """
    if size < 2:
        raise ValueError(f"size is {size}; it must be at least 2, since one rank sends nothing")
    levels = (size - 1).bit_length()
    more_steps, more_arrays = size - 1 - levels, levels - (size - 1) / size
    return latency_seconds * bandwidth_bytes_per_second * more_steps / more_arrays


def crossover_nbytes(
    small: AllReduce,
    large: AllReduce,
    size: int,
    link: Link | Cluster,
    most_nbytes: int = 1 << 34,
    tolerance: float = 0.01,
) -> float:
    """Bytes from which `large` is faster than `small` by the simulated clock, found by halving the interval.

    Args:
        small: what is faster for small arrays.
        large: what is faster for large ones.
        size: how many ranks.
        link: what connects them.
        most_nbytes: where to stop looking.
        tolerance: relative, of the result.

    Raises:
        ValueError: if `large` is not the faster one even at `most_nbytes`.
    """

    def is_faster(nbytes: int) -> bool:
        def seconds(all_reduce: AllReduce) -> float:
            return simulate(
                size, lambda communicator: all_reduce(communicator, Shape(nbytes, np.uint8)), link
            ).seconds

        return seconds(large) < seconds(small)

    low, high = 0, most_nbytes
    if not is_faster(high):
        raise ValueError(
            f"most_nbytes is {most_nbytes}; even there the second all-reduce is not faster than the first"
        )
    while high - low > max(1.0, tolerance * high):
        middle = (low + high) // 2 if low else high // 8
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return (low + high) / 2
