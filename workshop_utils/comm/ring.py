"""Ring all-reduce: each rank talks to its two neighbours only, and sends at most twice the array.

Patarasuk and Yuan (2009), "Bandwidth optimal all-reduce algorithms for clusters of workstations"; brought to deep
learning by Gibiansky (2017, Baidu) and Horovod (Sergeev and Del Balso 2018). With N ranks and an array of K bytes:

| step | who sends what | bytes a rank sends |
| --- | --- | --- |
| reduce-scatter | N − 1 times: one chunk of K/N to the right, one from the left is added | (N − 1)/N · K |
| all-gather | N − 1 times: the chunk that is complete goes once round the ring | (N − 1)/N · K |
"""

from __future__ import annotations

from workshop_utils.comm.communicator import Array, Communicator, Operation, buffer, chunk, collective, finish


@collective
def ring_all_reduce(communicator: Communicator, array: Array, operation: Operation = "sum") -> None:
    """Replace `array`, in place on every rank, by the reduction over all ranks."""
    ring_reduce_scatter(communicator, array, operation)
    ring_all_gather(communicator, array)


@collective
def ring_reduce_scatter(communicator: Communicator, array: Array, operation: Operation = "sum") -> Array:
    """Reduce so that rank r is left with chunk r + 1 complete; returns that chunk, a view of `array`."""
    rank, size = communicator.rank, communicator.size
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        mine = chunk(array, rank - step - 1, size)
        incoming = buffer(communicator, mine)
        communicator.send_recv(right, chunk(array, rank - step, size), left, incoming)
        communicator.combine(mine, incoming, operation)
    complete = chunk(array, rank + 1, size)
    finish(complete, operation, size)
    return complete


@collective
def ring_all_gather(communicator: Communicator, array: Array) -> None:
    """Give every rank all chunks, where rank r starts with chunk r + 1 (as `ring_reduce_scatter` leaves it)."""
    rank, size = communicator.rank, communicator.size
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        complete, replaced = chunk(array, rank + 1 - step, size), chunk(array, rank - step, size)
        communicator.send_recv(right, complete, left, replaced)


def ring_bytes_sent(size: int, nbytes: int) -> float:
    """Bytes that each of `size` ranks sends to all-reduce `nbytes`: 2 (N − 1)/N · K, never above 2 K.

    Exact where N divides the number of elements; otherwise chunks differ by one element.
    Source: Patarasuk and Yuan (2009), section 3.
    """
    return 2 * (size - 1) / size * nbytes


def ring_seconds(size: int, nbytes: int, latency_seconds: float, bandwidth_bytes_per_second: float) -> float:
    """2 (N − 1)(α + K/NB) to all-reduce `nbytes`: 2 (N − 1) steps, each of one chunk.

    Exact where N divides the number of elements.
    """
    return 2 * (size - 1) * (latency_seconds + nbytes / size / bandwidth_bytes_per_second)
