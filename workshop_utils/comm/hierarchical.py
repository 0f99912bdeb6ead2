"""Hierarchical all-reduce: most bytes stay inside a group (a machine, a rack), few cross between groups.

With groups of g ranks and an array of K bytes, in three phases (Jia et al. 2018, "Highly scalable deep learning
training system with mixed-precision", under "hierarchical all-reduce"; with reduce-scatter inside, as Horovod has it):

| phase | who talks to whom | bytes a rank sends |
| --- | --- | --- |
| ring reduce-scatter | the g ranks of a group: rank i is left with one chunk | (g − 1)/g · K |
| ring all-reduce | the ranks with the same place, one of each of m groups, on their chunk | 2 (m − 1)/m · K/g |
| ring all-gather | the g ranks of a group | (g − 1)/g · K |

Where g does not divide N, the ranks that are left over give their array to the ranks of the first group before, and
take the result from them afterwards: K bytes more, each way. `scaling.cost.hierarchical_seconds` says how long it takes
where every machine is full.
"""

from __future__ import annotations

from workshop_utils.comm.communicator import Array, Communicator, Operation, buffer, collective, finish
from workshop_utils.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from workshop_utils.comm.subset import Subset


@collective
def hierarchical_all_reduce(
    communicator: Communicator, array: Array, operation: Operation = "sum", group_size: int = 2
) -> None:
    """Replace `array`, in place on every rank, by the reduction over all ranks; a group has consecutive ranks.

    Fewer ranks than `group_size` are one group.

    Raises:
        ValueError: if `group_size` is not positive.
    """
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}; it must be at least 1")
    rank, group_size = communicator.rank, min(group_size, communicator.size)
    left_over = communicator.size % group_size
    complete = communicator.size - left_over
    if rank >= complete:
        communicator.send(rank - complete, array)
        communicator.recv(rank - complete, array)
        return
    if rank < left_over:
        incoming = buffer(communicator, array)
        communicator.recv(complete + rank, incoming)
        communicator.combine(array, incoming, operation)

    first, place = rank - rank % group_size, rank % group_size
    inside = Subset(communicator, range(first, first + group_size))
    across = Subset(communicator, range(place, complete, group_size))
    partial: Operation = "sum" if operation == "mean" else operation
    mine = ring_reduce_scatter(inside, array, partial)
    ring_all_reduce(across, mine, partial)
    finish(mine, operation, communicator.size)
    ring_all_gather(inside, array)

    if rank < left_over:
        communicator.send(complete + rank, array)
