"""The ring in virtual time as one recurrence over all ranks at once, for tens of thousands of them.

Every rank does the same at each step, so the simulated clock's arithmetic can be done for all of them in one NumPy
operation. What `simulated` computes message by message is, with t the clocks and `roll` their left neighbours':

    arrival = max(roll(t) + overhead + latency, last arrival) + incoming bytes / bandwidth
    t = max(t + overhead + outgoing bytes / bandwidth, arrival) + combining
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from workshop_utils.comm.cluster import Link
from workshop_utils.comm.communicator import chunk_nbytes
from workshop_utils.comm.simulated import latency_factors


def ring_finish_seconds(
    size: int,
    nbytes: int,
    link: Link,
    *,
    itemsize: int = 4,
    slowness: Sequence[float] | np.ndarray | None = None,
    combine_bytes_per_second: float = math.inf,
    jitter: float = 0.0,
    seed: int = 0,
) -> np.ndarray:
    """When each rank has finished `ring_all_reduce`; shape (size,), the largest is the time of the whole.

    Arguments are those of `simulated.simulate`, and so are the results, to rounding.
    """
    seconds_per_byte = 1 / link.bandwidth_bytes_per_second
    chunks = np.array([chunk_nbytes(nbytes, itemsize, index, size) for index in range(size)], dtype=float)
    slow = np.ones(size) if slowness is None else np.asarray(slowness, dtype=float)
    combining = slow / combine_bytes_per_second
    latencies = _latencies(size, link.latency_seconds, jitter, seed)
    if size == 1:
        return np.zeros(1)
    if (chunks == chunks[0]).all():
        step_seconds = link.overhead_seconds + chunks[0] * seconds_per_byte
        return _equal_chunks(size, latencies, step_seconds, combining * chunks[0])
    return _unequal_chunks(size, latencies, link.overhead_seconds, chunks, seconds_per_byte, combining)


def _latencies(size: int, latency_seconds: float, jitter: float, seed: int) -> Iterator[float | np.ndarray]:
    """What each rank's next message takes before its first byte comes, step by step."""
    random = np.random.default_rng(seed)
    while True:
        if jitter:
            yield latency_factors(random, size, jitter) * np.float64(latency_seconds)
        else:
            yield latency_seconds


def _equal_chunks(
    size: int, latencies: Iterator[float | np.ndarray], step_seconds: float, combine_seconds: np.ndarray
) -> np.ndarray:
    """Equal chunks: a rank's link is free whenever the rank is, so the last arrival need not be looked at."""
    padded = np.zeros(size + 1)  # the last rank again, then all ranks: two slices of it are roll(t) and t
    left, t = padded[:-1], padded[1:]
    came = np.empty(size)
    combines = bool(combine_seconds.any())
    for step in range(2 * (size - 1)):
        # The neighbours' latencies stand one place to the left, as their clocks do.
        latency = next(latencies)
        if isinstance(latency, np.ndarray):
            latency = np.roll(latency, 1)
        np.add(left, latency, out=came)
        np.maximum(t, came, out=t)
        t += step_seconds
        if combines and step < size - 1:
            t += combine_seconds
        padded[0] = padded[-1]
    return t.copy()


def _unequal_chunks(
    size: int,
    latencies: Iterator[float | np.ndarray],
    overhead_seconds: float,
    chunks: np.ndarray,
    seconds_per_byte: float,
    combining: np.ndarray,
) -> np.ndarray:
    """Chunks of the last element more or less, each of which goes once round the ring, twice."""
    t, arrival, heads = np.zeros(size), np.zeros(size), np.empty(size)
    twice = np.tile(chunks, 2)  # so that roll(chunks, k) is a slice of it
    for phase in (0, 1):  # reduce-scatter begins with a rank's own chunk, all-gather with the next one
        for step in range(size - 1):
            first = (phase - step) % size
            outgoing, incoming = twice[first : first + size], twice[(first - 1) % size :][:size]
            t += overhead_seconds
            leaving = t + next(latencies)
            heads[0], heads[1:] = leaving[-1], leaving[:-1]
            np.maximum(heads, arrival, out=arrival)
            arrival += incoming * seconds_per_byte
            t += outgoing * seconds_per_byte
            np.maximum(t, arrival, out=t)
            if phase == 0:
                t += incoming * combining
    return t
