"""Direct all-reduce: every rank sends all it has to every other one, and each adds for itself.

One step, against a ring's 2 (N − 1), for N/2 times a ring's bytes: the way for arrays so small that a message takes as
long as its first byte. In memory that ranks share it is one write, one flag and N − 1 reads.
"""

from __future__ import annotations

from workshop_utils.comm.communicator import Array, Communicator, Operation, collective, flat


@collective
def direct_all_reduce(communicator: Communicator, array: Array, operation: Operation = "sum") -> None:
    """Replace `array`, in place on every rank, by the reduction over all ranks.

    All add in the order of ranks, so that they get the same result to the last bit.
    """
    whole = flat(array)
    first, *others = communicator.everyones(whole)
    whole[:] = first
    for other in others:
        communicator.combine(whole, other, operation)
    communicator.finish(whole, operation)


def direct_bytes_sent(size: int, nbytes: int) -> int:
    """Bytes that each of `size` ranks sends to all-reduce `nbytes`: (N − 1) K."""
    return (size - 1) * nbytes


def direct_seconds(
    size: int, nbytes: int, latency_seconds: float, bandwidth_bytes_per_second: float
) -> float:
    """(N − 1)(α + K/B) to all-reduce `nbytes`: N − 1 messages, one after the other over a rank's one link."""
    return (size - 1) * (latency_seconds + nbytes / bandwidth_bytes_per_second)
