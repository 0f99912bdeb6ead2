"""All-to-all: every rank has something different for every other one, such as tokens for the experts that it holds.

Each of N ranks has K bytes, and keeps an N-th of them; nothing is reduced, and nothing is sent twice. At step s, rank r
sends to rank r + s and receives from rank r − s: N − 1 messages, (N − 1)/N · K bytes. Parts may differ in size, as in
MPI_Alltoallv. MPICH calls it pairwise exchange (Thakur, Rabenseifner, Gropp 2005, "Optimization of collective
communication operations in MPICH", section 4.3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from workshop_utils.comm.communicator import Array, Communicator, as_array, inside


def direct_all_to_all(
    communicator: Communicator, outgoing: Iterable[Array], incoming: Iterable[Array]
) -> None:
    """Send `outgoing[r]` to each rank r, and fill `incoming[r]` with what rank r sends.

    Parts are arrays or tensors of PyTorch, of any shape and number of elements, also none; sender and receiver must
    agree on them. Those of `incoming` must be contiguous, and have memory of their own.

    Raises:
        ValueError: unless there is one such array for each rank, and this rank's own two parts are alike.
    """
    rank, size = communicator.rank, communicator.size
    sent, received = [as_array(each) for each in outgoing], [as_array(each) for each in incoming]
    if not len(sent) == len(received) == size:
        numbers = f"outgoing has {len(sent)} arrays and incoming {len(received)}"
        raise ValueError(f"{numbers}; both must have {size}, one for each rank")
    given, own = sent[rank], received[rank]
    if (given.size, given.dtype) != (own.size, own.dtype):
        right = f"it must have the {own.size} × {own.dtype} of incoming[{rank}], on rank {rank}"
        raise ValueError(f"outgoing[{rank}] has {given.size} × {given.dtype}; {right}")
    both = {"outgoing": sent, "incoming": received}
    arrays = {
        f"{name}[{number}]": part
        for name, parts in both.items()
        for number, part in enumerate(parts)
        if type(part) is np.ndarray  # in simulated time they have no memory
    }
    for source, own in enumerate(received):
        if not own.flags.c_contiguous:
            raise ValueError(
                f"incoming[{source}] is not contiguous; receive into np.empty(...), then copy from it"
            )
        for name, other in arrays.items() if type(own) is np.ndarray else ():
            if name != f"incoming[{source}]" and np.may_share_memory(other, own):
                raise ValueError(f"incoming[{source}] shares memory with {name}; give it its own")
    with inside(communicator, "all_to_all"):
        received[rank][...] = sent[rank].reshape(received[rank].shape)
        for step in range(1, size):
            to, source = (rank + step) % size, (rank - step) % size
            communicator.send_recv(to, sent[to], source, received[source])


def all_to_all_bytes_sent(size: int, nbytes: float) -> float:
    """Bytes that each of `size` ranks sends of its K: (N − 1)/N · K, half of what a ring all-reduce sends.

    Exact where all parts are equal.
    """
    return (size - 1) / size * nbytes


def all_to_all_seconds(
    size: int, nbytes: float, latency_seconds: float, bandwidth_bytes_per_second: float
) -> float:
    """(N − 1)(α + K/NB) where each rank's K bytes are equal parts.

    Source: Thakur, Rabenseifner, Gropp (2005), section 4.3, whose n is the (N − 1)/N · K that is sent.
    """
    return (size - 1) * (latency_seconds + nbytes / size / bandwidth_bytes_per_second)


def uneven_all_to_all_seconds(
    nbytes: Any, latency_seconds: float, bandwidth_bytes_per_second: float
) -> float:
    """Seconds of `direct_all_to_all` where rank r sends rank s `nbytes[r][s]` bytes; own parts cost nothing.

    Follows the steps by the rules of `topology`; a rank receives its parts in the order of its steps. Never less than α
    and the most bytes that one rank sends or receives, over B: as much where one rank receives far more than the
    others, about 1.3 times as much among 8 with parts of any size and little latency. On the simulated clock a later
    part may overtake an earlier one: equal for up to 3 ranks, beyond that its seconds are 0.5 to 2 times
    these, mostly 0.75 to 1.25.
    """
    seconds = np.asarray(nbytes) / bandwidth_bytes_per_second
    ranks = np.arange(len(seconds))
    now = downlink_free = np.zeros(len(ranks))
    for step in ranks[1:]:
        to, source = (ranks + step) % len(ranks), (ranks - step) % len(ranks)
        downlink_free = np.maximum(now[source] + latency_seconds, downlink_free) + seconds[source, ranks]
        now = np.maximum(now + seconds[ranks, to], downlink_free)
    return float(now.max())
