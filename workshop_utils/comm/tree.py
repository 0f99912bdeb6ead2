"""Trees: few steps for small arrays, where a ring would pay N latencies.

| algorithm | steps on the longest path | bytes a rank sends at most | source |
| --- | --- | --- | --- |
| binomial tree, broadcast or reduce | log₂ N | log₂ N · K, or K | Thakur, Rabenseifner, Gropp (2005), section 4 |
| binomial tree all-reduce | 2 log₂ N | log₂ N · K | the same |
| double binary tree all-reduce | see `double_tree` | 2 K | Sanders, Speck, Träff (2009) |

In a binomial tree the parent of rank r is r with its lowest one-bit cleared. For N = 8:

    0 ── 4 ── 6 ── 7
    │    └─── 5
    ├─── 2 ── 3
    └─── 1
"""

from __future__ import annotations

from workshop_utils.comm.communicator import Array, Communicator, Operation, buffer, collective, finish


@collective
def tree_all_reduce(communicator: Communicator, array: Array, operation: Operation = "sum") -> None:
    """Replace `array`, in place on every rank, by the reduction over all ranks: up the tree, and down again."""
    tree_reduce(communicator, array, operation)
    tree_broadcast(communicator, array)


@collective
def tree_broadcast(communicator: Communicator, array: Array, root: int = 0) -> None:
    """Replace `array` on every rank by that of `root`: in each step twice as many ranks have it."""
    rank, size = communicator.rank, communicator.size
    place = (rank - root) % size  # in the tree, whose root has place 0
    distance = 1
    while distance < size and not place & distance:
        distance *= 2
    if place:
        communicator.recv((rank - distance) % size, array)
    while distance := distance // 2:
        if place + distance < size:
            communicator.send((rank + distance) % size, array)


@collective
def tree_reduce(communicator: Communicator, array: Array, operation: Operation = "sum") -> None:
    """Replace `array` on rank 0 by the reduction over all ranks; on the others it is left partly reduced."""
    rank, size = communicator.rank, communicator.size
    distance = 1
    while distance < size and not rank & distance:
        if rank + distance < size:
            incoming = buffer(communicator, array)
            communicator.recv(rank + distance, incoming)
            communicator.combine(array, incoming, operation)
        distance *= 2
    if rank:
        communicator.send(rank - distance, array)
    else:
        finish(array, operation, size)


def tree_all_reduce_seconds(
    size: int, nbytes: int, latency_seconds: float, bandwidth_bytes_per_second: float
) -> float:
    """2 ⌈log₂ N⌉ (α + K/B): exact for a power of two, an upper bound otherwise."""
    levels = (size - 1).bit_length()
    return 2 * levels * (latency_seconds + nbytes / bandwidth_bytes_per_second)
