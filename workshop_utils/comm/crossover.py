"""The array size at which a ring all-reduce becomes faster than a tree, by formula.

A tree has few steps and sends whole arrays; a ring has many steps and sends each byte twice at most. So a tree is
faster while latency matters, and a ring from some size on.
"""

from __future__ import annotations


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
