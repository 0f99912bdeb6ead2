"""Message passing between processes: one TCP link for each pair of ranks.

    with tcp.connect(rank, size, "127.0.0.1:4000", secret) as communicator:
        ring_all_reduce(communicator, gradient, "mean")

A message is a header (`frames`) and the array's bytes, handed to the kernel straight out of the array's memory. The
kernel takes a small message at once, but only part of a large one, so a rank alternates between sending and receiving:
if all ranks of a ring sent first, each would wait for its neighbour to receive.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workshop_utils.comm import frames, rendezvous
from workshop_utils.comm.communicator import Array, Communicator
from workshop_utils.comm.control import ControlLinks
from workshop_utils.comm.rendezvous import Membership, Sockets
from workshop_utils.comm.stamped import StampedCommunicator

# Of the sender's queue within a machine (Linux doubles it). Left alone it grows to 4 MiB, more than a second-level
# cache keeps until they are received: all-reduces of 16 and 64 MiB took 1.2 to 1.9 times as long.
SEND_BUFFER_BYTES = 256 * 1024


def connect(
    rank: int,
    size: int,
    coordinator: str,
    secret: bytes,
    link: Mapping[str, Any] | None = None,
    subnet: str | None = None,
    join_seconds: float | None = None,
    timeout_seconds: float = 60.0,
) -> Communicator:
    """This process's communicator in a run of `size` ranks; returns when all have joined.

    A launched script passes what its launcher set: `tcp.connect(*place.rendezvous())`.

    Args:
        rank: this process's number, 0 to size - 1.
        size: how many ranks there are.
        coordinator: `"host:port"`, where rank 0 listens; on loopback, in an emulated network, or in `subnet`.
        secret: shared by the run's ranks; nobody else is let in.
        link: emulates a link where the kernel cannot: `bandwidths` and `latency_seconds` of `StampedCommunicator`.
        subnet: the private subnet that the run's machines share, such as "10.0.0.0/16". Its security group decides who
            may enter it, the secret who may join.
        join_seconds: how long the ranks may take to join; by default `timeout_seconds`.
        timeout_seconds: how long a message may take to make progress.

    Raises:
        ValueError: for an impossible rank, coordinator, subnet or link.
        CommunicationError: if not all ranks join (`rendezvous.meet`).
    """
    membership = Membership(
        timeout_seconds if join_seconds is None else join_seconds, rank, size, secret, subnet
    )
    links = rendezvous.meet(membership, coordinator, ("control", "data"))
    communicator = TcpCommunicator(rank, size, links["control"], links["data"], timeout_seconds)
    return communicator if link is None else StampedCommunicator(communicator, **link)


class TcpCommunicator(Communicator):
    """A rank with two links to every other one: `data` carries messages, `control` reports failures."""

    def __init__(self, rank: int, size: int, control: Sockets, data: Sockets, timeout_seconds: float) -> None:
        super().__init__(rank, size, timeout_seconds)
        self._control, self._data = ControlLinks(self, control), data
        self._sent, self._received = [0] * size, [0] * size  # messages, by peer
        # Ranks whose messages `_first_of` has seen but not yet returned, in the order of arrival.
        self._came: dict[int, None] = {}
        self._is_waiting = False
        for link in data.values():
            link.setblocking(False)
            if link.family == socket.AF_INET and link.getsockname()[0].startswith("127."):
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    @property
    def waits_for(self) -> int | None:
        return self._control.waiting_for if self._is_waiting else None

    def _first_of(self, sources: Sequence[int]) -> int:
        """The rank among `sources` whose message was the first to be there; receive it next.

        Of those that arrived between two calls, the lowest goes first; but a rank that has been seen goes before all
        that arrive later, so no rank starves behind a busy low one.
        """
        deadline, awaited = time.monotonic() + self.timeout_seconds, list(sources)
        while True:
            ready = sorted(self._wait(awaited, None, deadline, is_idle=True))
            self._came.update(dict.fromkeys(ready))
            for source in [source for source in self._came if source in awaited]:
                del self._came[source]
                if source not in ready:  # received meanwhile, without asking
                    continue
                if len(awaited) > 1 and self._has_ended(source) and self._control.has_left(source):
                    awaited.remove(source)  # it sends no more; the others may
                else:
                    return source

    def _has_ended(self, source: int) -> bool:
        """Whether the link of a rank from which `_wait` has heard holds its end, and no message."""
        try:
            return self._data[source].recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _exchange(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        self._control.raise_failure()
        unsent, awaited, header, expected = [], [], bytearray(), b""
        if to is not None:
            unsent = [memoryview(self._header(self._sent, to, outgoing)), _bytes(outgoing)]
        if source is not None:
            expected = self._header(self._received, source, incoming)
            header = bytearray(len(expected))
            awaited = [memoryview(header), _bytes(incoming)]
        is_alone = to is None or source in (None, to)
        moved_at = time.monotonic()  # when the rank that this one waits for last made progress
        while unsent or awaited:
            has_sent = to is not None and bool(unsent) and self._send(to, unsent, is_alone)
            has_received = source is not None and bool(awaited) and self._receive(source, awaited, is_alone)
            if source is not None and has_received and len(awaited) < 2 and header != expected:
                self._control.fail(frames.difference(header, source, expected, self.rank))
            if has_received or (has_sent and not awaited):
                moved_at = time.monotonic()
            if not has_sent and not has_received:
                sources = [source] if source is not None and awaited else []
                is_idle = not unsent and len(awaited) == 2
                self._wait(sources, to if unsent else None, moved_at + self.timeout_seconds, is_idle)

    def _send(self, to: int, parts: list[memoryview], is_alone: bool) -> bool:
        """Send what the kernel takes of `parts` at once, and keep the rest there; returns whether it took any."""
        try:
            _drop(parts, self._data[to].sendmsg(parts))
        except BlockingIOError:
            return False
        except OSError:
            self._control.lost(to, is_alone)
        return True

    def _receive(self, source: int, parts: list[memoryview], is_alone: bool) -> bool:
        """Fill the first of `parts` as far as bytes have arrived; returns whether there were any."""
        received = 0
        try:
            received = self._data[source].recv_into(parts[0])
        except BlockingIOError:
            return False
        except OSError:
            pass  # as if the link had ended
        if not received:
            self._control.lost(source, is_alone)
        _drop(parts, received)
        return True

    def _wait(self, sources: Sequence[int], to: int | None, deadline: float, is_idle: bool) -> list[int]:
        """Sleep until a message arrives, or `to` takes more; returns those of `sources` that have sent something."""
        self._control.raise_failure()
        peers = [*sources] if to is None else [*sources, to]
        self._control.waiting_for = peers[0]
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        for peer in peers:
            events = (select.POLLIN if peer in sources else 0) | (select.POLLOUT if peer == to else 0)
            poll.register(self._data[peer], events)
        began = time.monotonic()
        self._is_waiting = True
        ready = {number for number, _ in poll.poll(max(0.0, deadline - began) * 1000)}
        self._is_waiting = False
        if is_idle:
            self.traffic.waited_seconds += time.monotonic() - began
        self._control.raise_failure()  # closed meanwhile, by another thread
        if not ready:
            self._control.silent(peers[:1] if to is not None else sources)
        if self._control.fileno() in ready:
            self._control.heed()
        return [source for source in sources if self._data[source].fileno() in ready]

    def _header(self, counters: list[int], peer: int, array: Array) -> bytes:
        counters[peer] += 1
        return frames.message(self._collective, counters[peer], array)

    def close(self) -> None:
        """Close the links. Safe to call twice."""
        self._control.close()
        for link in self._data.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
            link.close()
        super().close()

    def _leave(self) -> None:
        """Say that this rank is done. A link that is closed with unread messages would drop those not yet delivered."""
        self._control.leave()
        for link in self._data.values():
            with contextlib.suppress(OSError):
                # Only what is there: a loop would take all that a peer goes on sending, and hide that nobody hears it.
                link.recv(link.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))

    def __exit__(self, *raised: object) -> None:
        error = raised[1]
        if isinstance(error, BaseException) and self._control.failure is None:
            self._control.abort(error)  # so that every other rank raises the like
        elif error is None:
            self._leave()
        self.close()


def _bytes(array: Array) -> memoryview:
    return array.view(np.uint8).data if array.nbytes else memoryview(b"")


def _drop(parts: list[memoryview], nbytes: int) -> None:
    """Take the first `nbytes` bytes off `parts`, and parts that are then empty."""
    while parts and nbytes >= len(parts[0]):
        nbytes -= len(parts.pop(0))
    if parts:
        parts[0] = parts[0][nbytes:]
