"""Direct all-reduce: every rank sends its array to every other one, and each adds for itself.

One step, against a ring's 2 (N − 1), for N/2 times a ring's bytes: best for arrays so small that
latency is all that counts.
"""

from __future__ import annotations

from workshop_utils.comm.communicator import Array, Communicator, Operation, buffer, collective, finish


@collective
def direct_all_reduce(communicator: Communicator, array: Array, operation: Operation = "sum") -> None:
    """Replace `array`, in place on every rank, by the reduction over all ranks.

    All add in the order of ranks, so that they get the same result to the last bit.
    """
    rank, size = communicator.rank, communicator.size
    copies = [buffer(communicator, array, f"of rank {each}") for each in range(size)]
    copies[rank][:] = array
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        communicator.send_recv(to, array, source, copies[source])
    array[:] = copies[0]
    for copy in copies[1:]:
        communicator.combine(array, copy, operation)
    finish(array, operation, size)
