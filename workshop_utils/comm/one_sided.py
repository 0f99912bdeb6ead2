"""All-reduce by one-sided reads: each rank reduces its chunk out of everybody's memory, then reads everybody's chunk.

A rank moves as many bytes as in a ring, but nobody has to send them, and no chunk has to pass through N − 1 ranks:
they wait for each other three times, not 2 (N − 1) times. It needs memory that all ranks can read.

| phase | who reads what | bytes a rank reads |
| --- | --- | --- |
| reduce-scatter | rank r chunk r of each other rank | (N − 1)/N · K |
| all-gather | each other rank's chunk, now complete | (N − 1)/N · K |

Source: the single-copy collectives of MPI libraries within a machine, as in Katevenis, Ploumidis and Marazakis (2022),
"A framework for hierarchical single-copy MPI collectives on multicore nodes", IEEE CLUSTER.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workshop_utils.comm.communicator import Array, Communicator, Operation, collective, flat
from workshop_utils.comm.ring import ring_all_reduce

# Bytes reduced at once: they are still in the processor's cache when the next rank's are added.
BLOCK = 512 * 1024
# Bytes copied at once to where others can read them, if a rank's array is not from `allocate`.
SEGMENT = 4 * 1024 * 1024


@collective
def one_sided_all_reduce(
    communicator: Communicator, array: Array, operation: Operation = "sum", segment_bytes: int = SEGMENT
) -> None:
    """Replace `array`, in place on every rank, by the reduction over all ranks.

    Each element is reduced by one rank alone, so that all get the same result to the last bit. Each rank sends, that
    is, is read, `ring_bytes_sent`. Where ranks cannot read each other's memory, the ring does it.
    """
    whole = flat(array)
    if not communicator.has_windows:
        ring_all_reduce(communicator, whole, operation)
        return
    length = whole.size
    if whole.nbytes > segment_bytes and not _all_share(communicator, whole):
        length = max(1, segment_bytes // whole.itemsize)
    for start in range(0, max(1, whole.size), max(1, length)):  # once, if there is nothing: others may differ
        _reduce_in_window(communicator, whole[start : start + length], operation)


def _all_share(communicator: Communicator, array: Array) -> bool:
    """Whether every rank's array can be read where it lies: one message of a byte to each other rank."""
    answers = communicator.everyones(np.array([communicator.shares(array)]))
    return all(answer[0] for answer in answers)


def _reduce_in_window(communicator: Communicator, segment: Array, operation: Operation) -> None:
    rank, size = communicator.rank, communicator.size
    others = [(rank + distance) % size for distance in range(1, size)]  # not all at the same one
    with communicator.window(segment) as window:
        mine = window.mine
        for block in _blocks(segment, rank, size):
            for other in others:
                communicator.combine(mine[block], window.read(other, block), operation)
            communicator.finish(mine[block], operation)
        window.fence()
        for other in others:
            for block in _blocks(segment, other, size):
                mine[block] = window.read(other, block)


def _blocks(array: Array, index: int, count: int) -> Iterator[slice]:
    """Chunk `index` of `count` (see `communicator.chunk`), `BLOCK` bytes at a time."""
    length = BLOCK // array.itemsize
    end = (index + 1) * array.size // count
    for start in range(index * array.size // count, end, length):
        yield slice(start, min(start + length, end))
