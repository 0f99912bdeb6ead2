"""The ring in virtual time as one recurrence over all ranks at once, for tens of thousands of them.

All ranks do the same at each step, so one NumPy operation can do the arithmetic of `cluster` for all of them. With t
the ranks' clocks, and `roll` for what comes from the left neighbour:

    arrival = max(roll(t) + latency, last arrival) + incoming bytes / bandwidth
    t = max(t + outgoing bytes / bandwidth, arrival)
"""

from __future__ import annotations

import numpy as np

from workshop_utils.comm.cluster import Link
from workshop_utils.comm.communicator import chunk_nbytes


def ring_finish_seconds(size: int, nbytes: int, link: Link, *, itemsize: int = 4) -> np.ndarray:
    """When each rank has finished `ring_all_reduce`; shape (size,), the largest is the time of the whole.

    It is what `simulated.simulate` computes message by message, to rounding.
    """
    chunks = np.array([chunk_nbytes(nbytes, itemsize, index, size) for index in range(size)], dtype=float)
    seconds = np.tile(chunks / link.bandwidth_bytes_per_second, 2)  # so that a rolled array is a slice of it
    t, arrival, heads = np.zeros(size), np.zeros(size), np.empty(size)
    for phase in (0, 1):  # reduce-scatter begins with a rank's own chunk, all-gather with the next one
        for step in range(size - 1):
            first = (phase - step) % size
            outgoing = seconds[first : first + size]
            incoming = seconds[(first - 1) % size :][:size]
            heads[0], heads[1:] = t[-1], t[:-1]
            heads += link.latency_seconds
            np.maximum(heads, arrival, out=arrival)
            arrival += incoming
            t += outgoing
            np.maximum(t, arrival, out=t)
    return t
