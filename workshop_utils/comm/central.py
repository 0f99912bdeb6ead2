"""Central all-reduce: every rank sends to one, which reduces and sends the result back.

The first idea that comes to mind, and what a synchronous parameter server does. The root's link carries the array once
for every other rank in each direction, so time grows with N where a ring's hardly does.
"""

from __future__ import annotations

from workshop_utils.comm.communicator import Array, Communicator, Operation, buffer, collective, finish


@collective
def central_all_reduce(communicator: Communicator, array: Array, operation: Operation = "sum") -> None:
    """Replace `array`, in place on every rank, by the reduction over all ranks, done on rank 0, the root.

    The root receives and sends (N − 1) · K bytes, every other rank K. Contributions are added in the order of
    ranks, so that the result is the same at every call.
    """
    if communicator.rank != 0:
        communicator.send(0, array)
        communicator.recv(0, array)
        return
    others = range(1, communicator.size)
    incoming = buffer(communicator, array)
    for rank in others:
        communicator.recv(rank, incoming)
        communicator.combine(array, incoming, operation)
    finish(array, operation, communicator.size)
    for rank in others:
        communicator.send(rank, array)
