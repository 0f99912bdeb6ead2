"""Recursive halving and doubling: about a ring's bytes in 2 log₂ P steps, P the largest power of two up to N.

Rabenseifner's algorithm (2004), in Thakur, Rabenseifner and Gropp (2005), "Optimization of collective communication
operations in MPICH", section 4.5, with **binary blocks** where N is not a power of two: one for each 1 in N's binary
form, so 7 ranks are blocks of 4, 2 and 1. With m blocks smaller than the largest, which has P ranks:

| phase | who sends what | bytes a rank of a block of p sends |
| --- | --- | --- |
| halving | each block by itself: half of what a rank answers for, to the rank p/2, p/4 … 1 away | (p − 1)/p · K |
| hand over | a rank of a smaller block its piece, to those P/p ranks of the largest that answer for its parts | K/p |
| hand back | a rank of the largest the result of its piece, to one rank of each smaller block | m · K/P |
| doubling | each block by itself: all that a rank has complete, to the rank 1, 2 … p/2 away | (p − 1)/p · K |

Nobody sends or receives more than 2K + (m − 2) K/P. Pieces that come before the halving ends wait in the kernel's
buffers, or if these are full, with their sender.

Gloo (`allreduce_halving_doubling.h`) hands over from each block to the next larger one; here all blocks hand over to
the largest, which saves the chain. Its halving, and MPICH's, begins with the nearest partner, to which the largest
messages then go; this one with the farthest, so that rank r of a block ends with piece r.
"""

from __future__ import annotations

from workshop_utils.comm.communicator import Array, Communicator, Operation, buffer, chunk, collective, finish
from workshop_utils.comm.subset import Subset


@collective
def halving_doubling_all_reduce(
    communicator: Communicator, array: Array, operation: Operation = "sum"
) -> None:
    """Replace `array`, in place on every rank, by the reduction over all ranks."""
    rank, blocks = communicator.rank, binary_blocks(communicator.size)
    largest, *smaller = blocks
    block = Subset(communicator, next(ranks for ranks in blocks if rank in ranks))
    _halve(block, array, operation)
    if rank in largest:
        mine = chunk(array, rank, len(largest))
        incoming = buffer(communicator, mine)
        holders = [ranks[rank * len(ranks) // len(largest)] for ranks in smaller]
        for holder in holders:
            communicator.recv(holder, incoming)
            communicator.combine(mine, incoming, operation)
        finish(mine, operation, communicator.size)
        for holder in holders:
            communicator.send(holder, mine)
    else:
        parts = len(largest) // block.size
        owners = range(block.rank * parts, (block.rank + 1) * parts)
        for owner in owners:
            communicator.send(owner, chunk(array, owner, len(largest)))
        for owner in owners:
            communicator.recv(owner, chunk(array, owner, len(largest)))
    doubling_all_gather(block, array)


def binary_blocks(size: int) -> list[range]:
    """The ranks in blocks of powers of two, the largest first: 7 ranks are those from 0 to 3, 4 and 5, and 6."""
    blocks, first = [], 0
    for power in (1 << bit for bit in reversed(range(size.bit_length()))):
        if size & power:
            blocks.append(range(first, first + power))
            first += power
    return blocks


def _halve(block: Communicator, array: Array, operation: Operation) -> None:
    """Reduce-scatter: rank r of the block is left with piece r complete."""
    distance = block.size // 2
    while distance:
        partner, parts = block.rank ^ distance, block.size // distance
        mine = chunk(array, block.rank // distance, parts)
        incoming = buffer(block, mine)
        block.send_recv(partner, chunk(array, partner // distance, parts), partner, incoming)
        block.combine(mine, incoming, operation)
        distance //= 2


@collective
def doubling_all_gather(communicator: Communicator, array: Array) -> None:
    """Give every rank all chunks, in place, where rank r of N, a power of two, starts with chunk r: the second half."""
    rank, size, distance = communicator.rank, communicator.size, 1
    while distance < size:
        partner, parts = rank ^ distance, size // distance
        complete = chunk(array, rank // distance, parts)
        communicator.send_recv(partner, complete, partner, chunk(array, partner // distance, parts))
        distance *= 2


def halving_doubling_seconds(
    size: int, nbytes: int, latency_seconds: float, bandwidth_bytes_per_second: float
) -> float:
    """2 log₂ P · α + 2 (1 + (m − 1)/P) · K/B, with m blocks smaller than the largest, of P ranks.

    On the simulated clock, up to 100 ranks: exact where P divides the number of elements and α ≤ K/8PB; with more
    latency up to 7.2 % too high (most for 11 ranks, with α about 2 K/PB), since smaller blocks may hand over while
    the largest waits for a latency.
    """
    steps, smaller = size.bit_length() - 1, size.bit_count() - 1
    array_seconds = nbytes / bandwidth_bytes_per_second
    return 2 * steps * latency_seconds + 2 * (1 + (smaller - 1) / 2**steps) * array_seconds
