"""Links with latency and bandwidth, emulated by the receiver: they need no privilege, and no help of the kernel.

    communicator = StampedCommunicator(tcp.connect(...), bandwidths=(12.5e6,) * size, latency_seconds=1e-3)

Data moves at full speed, and each message carries a stamp: when its first byte would have left. The receiver sleeps
until its last byte would have come.

This is what `topology` says of virtual time, in real time; a downlink is served in the order in which messages are
received. Good at or below 200 Mbit/s and at or above 1 ms, where the computer's own time for a message does not count.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from workshop_utils.comm.communicator import Array, Communicator, Mismatch, inside
from workshop_utils.comm.topology import Queue

# Before the payload: the stamp, in seconds of the clock that all processes of a machine share, and the dtype, since
# the message below carries bytes.
_STAMP = struct.Struct("<d8s")


class StampedCommunicator(Communicator):
    """A rank of `inner`, behind a link. Counters count payload, as without it; `inner`'s count stamps as well.

    Args:
        inner: what carries the messages.
        bandwidths: of the links of all ranks, in bytes per second.
        latency_seconds: from any rank to any other.

    Raises:
        ValueError: if there is not one bandwidth for each rank.
    """

    def __init__(self, inner: Communicator, bandwidths: Sequence[float], latency_seconds: float = 0) -> None:
        if len(bandwidths) != inner.size:
            raise ValueError(f"bandwidths has {len(bandwidths)} entries; {inner.size} ranks need one each")
        self._inner, self._bandwidths, self._latency_seconds = inner, bandwidths, latency_seconds
        self._uplink, self._downlink = (Queue(bandwidths[inner.rank]) for _ in range(2))
        super().__init__(inner.rank, inner.size, inner.timeout_seconds)
        self.ranks, self.shares_links = inner.ranks, inner.shares_links

    def close(self) -> None:
        self._inner.close()
        super().close()

    def __exit__(self, *raised: object) -> None:
        self._inner.__exit__(*raised)  # which tells the other ranks about a failure
        super().close()

    @property
    def waits_for(self) -> int | None:
        return self._inner.waits_for

    def now(self) -> float:
        return self._inner.now()

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)

    def _first_of(self, sources: Sequence[int]) -> int:
        """The rank whose message came first below, where all come at full speed."""
        with self._below():
            return self._inner._first_of(sources)

    def _exchange(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        letter = None if to is None else self._stamped(outgoing)
        received = None if source is None else np.empty(_STAMP.size + incoming.nbytes, np.uint8)
        # Stamp and payload in one message: in two, sending the second would have to wait for receiving the first.
        with self._below():
            self._inner.send_recv(to, letter, source, received)
        until = 0.0 if to is None else self._uplink.free
        if source is not None:
            until = max(until, self._arrival(received, source, incoming))
        self.sleep(max(0.0, until - self.now()))

    @contextmanager
    def _below(self) -> Iterator[None]:
        """Messages below belong to the collective above; waiting below counts above, unlike the sleep for a link."""
        self._inner.timeout_seconds, self._inner.may_die = self.timeout_seconds, self.may_die
        before = self._inner.traffic.waited_seconds
        with inside(self._inner, self._collective):
            yield
        self.traffic.waited_seconds += self._inner.traffic.waited_seconds - before

    def _stamped(self, outgoing: Array) -> Array:
        """`outgoing` with the time at which its first byte leaves, and the uplink taken until its last one has."""
        head = max(self.now(), self._uplink.free)
        self._uplink.carry(head, outgoing.nbytes)
        letter = np.empty(_STAMP.size + outgoing.nbytes, np.uint8)
        _STAMP.pack_into(letter.data, 0, head, outgoing.dtype.str.encode())
        letter[_STAMP.size :] = outgoing.view(np.uint8)
        return letter

    def _arrival(self, letter: Array, source: int, incoming: Array) -> float:
        """Take the payload; when its last byte comes, which is when the downlink is free again."""
        head, dtype = _STAMP.unpack_from(letter.data)
        if dtype.rstrip(b"\0") != incoming.dtype.str.encode():
            sent = np.dtype(dtype.rstrip(b"\0").decode())
            raise Mismatch(f"rank {source} sent {sent} where rank {self.rank} expects {incoming.dtype}")
        incoming[...] = letter[_STAMP.size :].view(incoming.dtype)
        first = head + self._latency_seconds
        through = self._downlink.carry(first, incoming.nbytes)
        theirs = first + incoming.nbytes / self._bandwidths[source]
        self._downlink.free = max(through, theirs)  # the slower link decides
        return self._downlink.free
