"""Recursive halving and doubling: a ring's bytes in 2 log₂ N steps, between ranks ever nearer or farther.

After Rabenseifner's algorithm (2004), in Thakur, Rabenseifner and Gropp (2005), "Optimization of collective
communication operations in MPICH", section 4.5. His halving, and MPICH's, begins with the nearest partner, to which the
largest messages then go; this one with the farthest, so that rank r ends with block r. With P the largest power of two
up to N:

| phase | who sends what | bytes a rank sends |
| --- | --- | --- |
| fold, if P < N | the first N − P even ranks send all they have to their right neighbour, and wait | K |
| halving | log₂ P times: half of what a rank still answers for, to the rank P/2, P/4 … 1 places away | (P − 1)/P · K |
| doubling | log₂ P times: all that a rank has complete, to the rank 1, 2 … P/2 places away | (P − 1)/P · K |
| unfold, if P < N | those right neighbours send the result back | K |
"""

from __future__ import annotations

from workshop_utils.comm.communicator import Array, Communicator, Operation, buffer, collective, finish


@collective
def halving_doubling_all_reduce(
    communicator: Communicator, array: Array, operation: Operation = "sum"
) -> None:
    """Replace `array`, in place on every rank, by the reduction over all ranks."""
    rank = communicator.rank
    power = _largest_power_of_two(communicator.size)
    folded = communicator.size - power  # pairs of neighbours that act as one
    in_pair = rank < 2 * folded
    if in_pair and rank % 2 == 0:
        communicator.send(rank + 1, array)
        communicator.recv(rank + 1, array)
        return
    if in_pair:
        incoming = buffer(communicator, array)
        communicator.recv(rank - 1, incoming)
        communicator.combine(array, incoming, operation)
    _halve_and_double(communicator, array, operation, power, folded)
    if in_pair:
        communicator.send(rank - 1, array)


def _halve_and_double(
    communicator: Communicator, array: Array, operation: Operation, power: int, folded: int
) -> None:
    """Among the `power` ranks that are left: place p ends up with piece p complete, then everybody with all."""
    place = communicator.rank // 2 if communicator.rank < 2 * folded else communicator.rank - folded

    def pieces(first: int, count: int) -> Array:
        return array[first * array.size // power : (first + count) * array.size // power]

    def rank_of(other: int) -> int:
        return 2 * other + 1 if other < folded else other + folded

    distance = power // 2
    while distance:
        partner = rank_of(place ^ distance)
        first = place // distance * distance  # of the pieces that this rank keeps, not its partner
        mine = pieces(first, distance)
        incoming = buffer(communicator, mine)
        communicator.send_recv(partner, pieces(first ^ distance, distance), partner, incoming)
        communicator.combine(mine, incoming, operation)
        distance //= 2
    finish(pieces(place, 1), operation, communicator.size)
    distance = 1
    while distance < power:
        partner = rank_of(place ^ distance)
        first = place // distance * distance
        communicator.send_recv(partner, pieces(first, distance), partner, pieces(first ^ distance, distance))
        distance *= 2


def _largest_power_of_two(size: int) -> int:
    """The largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)


def halving_doubling_seconds(
    size: int, nbytes: int, latency_seconds: float, bandwidth_bytes_per_second: float
) -> float:
    """2 log₂ P · α + 2 (P − 1)/P · K/B, and 2 (α + K/B) more where N is not a power of two.

    Exact where P divides the number of elements. Source: Thakur, Rabenseifner, Gropp (2005), section 4.5.
    """
    power = _largest_power_of_two(size)
    array_seconds = nbytes / bandwidth_bytes_per_second
    folding = 2 * (latency_seconds + array_seconds) if power < size else 0.0
    return 2 * (power.bit_length() - 1) * latency_seconds + 2 * (power - 1) / power * array_seconds + folding
