"""The ring in virtual time as one recurrence over all ranks at once, for tens of thousands of them.

All ranks do the same at each step, so one NumPy operation computes the queues of `topology` for all of them.
"""

from __future__ import annotations

import numpy as np

from workshop_utils.comm.communicator import chunk
from workshop_utils.comm.shape import Shape
from workshop_utils.comm.topology import Link, Queue


def ring_finish_seconds(size: int, nbytes: int, link: Link, *, itemsize: int = 4) -> np.ndarray:
    """When each rank has finished `ring_all_reduce`; shape (size,), the largest is the time of the whole.

    It equals what `simulated.simulate` computes message by message, up to rounding.
    """
    whole = Shape(nbytes // itemsize, f"V{itemsize}")
    # Twice, so that rolling is slicing.
    chunks = np.array([chunk(whole, index, size).nbytes for index in range(size)] * 2, float)
    uplinks, downlinks = (Queue(link.bandwidth_bytes_per_second, size) for _ in range(2))
    seconds = np.zeros(size)  # the ranks' clocks
    for phase in (0, 1):  # reduce-scatter begins with a rank's own chunk, all-gather with the next one
        for step in range(size - 1):
            first = (phase - step) % size
            outgoing, incoming = chunks[first:][:size], chunks[(first - 1) % size :][:size]
            heads = np.concatenate((seconds[-1:], seconds[:-1])) + link.latency_seconds
            arrival = downlinks.carry(heads, incoming)
            seconds = np.maximum(uplinks.carry(seconds, outgoing), arrival)
    return seconds
