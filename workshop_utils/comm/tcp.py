"""Message passing over sockets: one link for each pair of ranks, TCP or (on one machine) Unix sockets.

    with tcp.connect(rank, size, "127.0.0.1:4000", secret) as communicator:
        ring_all_reduce(communicator, gradient, "mean")

A message is a header (`frames`) and the array's bytes, handed to the kernel together and straight out of the array's
memory. Two forms stand side by side: `PlainTcpCommunicator`, which says what happens in as few lines as possible, and
`TcpCommunicator`, which sends and receives at once in one thread, without waiting for either.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from workshop_utils import place
from workshop_utils.comm import frames, rendezvous, stamped
from workshop_utils.comm.communicator import Array, Communicator
from workshop_utils.comm.control import ControlledCommunicator
from workshop_utils.comm.rendezvous import Family, Links, Run, meet

_HEADER = frames.HEADER.size

# Bytes that the kernel may hold for one Unix socket in one direction. TCP's are left alone: a size set by hand would
# switch off the kernel's own tuning.
UNIX_BUFFER = 1024 * 1024

# How often a rank looks again, giving way to others in between, before it sleeps until something comes: a sleeper
# takes tens of microseconds to wake.
SPINS = 10

# A message that is to be reduced is received in blocks of this size, which are still in the cache when added.
BLOCK = 256 * 1024


def connect(
    rank: int,
    size: int,
    coordinator: str,
    secret: bytes,
    family: Family = "tcp",
    timeout_seconds: float = 60.0,
    plain: bool = False,
) -> Communicator:
    """This process's communicator in a run of `size` ranks; returns when all have come.

    Where the launcher emulates a network that the kernel cannot, it is behind a link (`stamped`).

    Args:
        rank: this process's number, 0 to size - 1.
        size: how many ranks there are.
        coordinator: `"host:port"`, where rank 0 listens; on loopback, or in the subnet of an emulated network.
        secret: known to the run's ranks alone; nobody without it is let in.
        family: "unix" sends messages through Unix sockets, for ranks on one machine.
        timeout_seconds: how long the ranks may take to come together, and later a message to move on.
        plain: the lesson's plain version.

    Raises:
        ValueError: for a rank, coordinator or family that cannot be.
        CommunicationError: if the ranks do not come together (`rendezvous.meet`).
    """
    run = Run.starting(rank, size, secret, timeout_seconds)
    links = meet(run, coordinator, family, ("control", "data"))
    kind = PlainTcpCommunicator if plain else TcpCommunicator
    return stamped.behind(kind(rank, size, links["control"], links["data"], timeout_seconds), place.link())


class PlainTcpCommunicator(ControlledCommunicator):
    """The plain version: sockets that block, and a second thread so that sending does not keep from receiving."""

    def __init__(self, rank: int, size: int, control: Links, data: Links, timeout_seconds: float) -> None:
        super().__init__(rank, size, control, timeout_seconds)
        self._data = data  # links, by peer
        self._sent, self._received = [0] * size, [0] * size  # messages, by peer
        self._came: dict[
            int, None
        ] = {}  # whose messages `wait_any` has seen, in that order, and not yet named
        self._sender = ThreadPoolExecutor(max_workers=1)
        self._poll = select.poll()
        self._poll.register(self._watch, select.POLLIN)
        for link in data.values():
            link.settimeout(timeout_seconds)

    def _exchange(
        self, to: int | None, outgoing: Array, source: int | None, incoming: Array, reduce: Any = None
    ) -> None:
        if self._failure is not None:
            raise self._failure
        sent = None
        if to is not None:
            sent = self._sender.submit(self._send, to, self._header(self._sent, to, outgoing), outgoing)
        if source is not None:
            self._recv(source, self._header(self._received, source, incoming), incoming)
        if sent is not None:
            sent.result()

    def _send(self, to: int, header: bytes, outgoing: Array) -> None:
        try:
            self._data[to].sendall(header)
            self._data[to].sendall(outgoing.view(np.uint8))
        except TimeoutError:
            self._silent([to])
        except OSError:
            self._lost(to)

    def _recv(self, source: int, expected: bytes, incoming: Array) -> None:
        link = self._data[source]
        try:
            header = rendezvous.receive(link, len(expected))
            if header != expected:
                self._fail(frames.difference(header, source, expected, self.rank, incoming.dtype))
            rest = incoming.view(np.uint8).data
            while rest:
                received = link.recv_into(rest)
                if not received:
                    raise ConnectionError
                rest = rest[received:]
        except TimeoutError:
            self._silent([source])
        except OSError:
            self._lost(source)

    # Adding while receiving is left to the tuned version.
    _transfer_combine = Communicator._transfer_combine

    def wait_any(self, sources: Sequence[int]) -> int:
        began = time.monotonic()
        try:
            return self._first_of(sources, began + self.timeout_seconds)
        finally:
            self.waited_seconds += time.monotonic() - began

    def _first_of(self, sources: Sequence[int], deadline: float) -> int:
        while True:
            # Who is ready comes in the order of ranks: without `_came`, high ranks would starve behind busy low ones.
            ready = set(self._wait(sources, None, deadline))
            self._came.update(dict.fromkeys(sorted(ready)))
            for source in [source for source in self._came if source in sources]:
                del self._came[source]
                if source not in ready:
                    continue  # received meanwhile, without asking
                try:
                    if not self._data[source].recv(1, socket.MSG_PEEK):
                        self._lost(source)
                except OSError:
                    self._lost(source)
                return source

    def _wait(self, sources: Sequence[int], to: int | None, deadline: float) -> list[int]:
        """Sleep until something comes; the ranks among `sources` and `to` whose link can be read, or written."""
        events = dict.fromkeys(sources, select.POLLIN)
        if to is not None:
            events[to] = events.get(to, 0) | select.POLLOUT
        ranks = {self._data[peer].fileno(): peer for peer in events}
        self._waiting_for = next(iter(events))
        self._heed()
        for peer, event in events.items():
            self._poll.register(self._data[peer], event)
        try:
            ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            for number in ranks:
                self._poll.unregister(number)
        if not ready:
            self._silent(list(sources) or list(events))
        self._heed()
        return [ranks[number] for number, _ in ready if number in ranks]

    def _header(self, counters: list[int], peer: int, array: Array) -> bytes:
        counters[peer] += 1
        return frames.message(self.collective, array.dtype, counters[peer], array.nbytes)

    def close(self) -> None:
        self._sender.shutdown(wait=False)
        for link in self._data.values():
            link.close()
        super().close()


class TcpCommunicator(PlainTcpCommunicator):
    """The tuned version: one thread that sends and receives by turns, as much as each link takes at the moment."""

    def __init__(self, rank: int, size: int, control: Links, data: Links, timeout_seconds: float) -> None:
        super().__init__(rank, size, control, data, timeout_seconds)
        self._sending, self._receiving = _Sending(), _Receiving()
        for link in data.values():
            link.setblocking(False)
            if link.family == socket.AF_UNIX:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER)

    def _exchange(
        self, to: int | None, outgoing: Array, source: int | None, incoming: Array, reduce: Any = None
    ) -> None:
        if self._failure is not None:
            raise self._failure
        sending, receiving = self._sending, self._receiving
        sending.left = receiving.left = 0
        if to is not None:
            sending.start(to, self._data[to], self._header(self._sent, to, outgoing), outgoing)
        if source is not None:
            header = self._header(self._received, source, incoming)
            receiving.start(source, self._data[source], header, incoming, reduce)
        spins, deadline, silent_since = 0, 0.0, 0.0
        while sending.left or receiving.left:
            moved = sending.left and self._move(sending)
            moved = (receiving.left and self._move(receiving)) or moved
            if moved:
                if silent_since:
                    self.waited_seconds += time.monotonic() - silent_since
                spins, deadline, silent_since = 0, 0.0, 0.0
                continue
            if not (silent_since or sending.left or receiving.begun):
                silent_since = time.monotonic()
            if spins < SPINS:
                spins += 1
                os.sched_yield()
            else:
                deadline = deadline or time.monotonic() + self.timeout_seconds
                sources = [receiving.peer] if receiving.left else []
                self._wait(sources, sending.peer if sending.left else None, deadline)

    def _move(self, message: _Sending | _Receiving) -> bool:
        """Send or receive what the link takes or holds now; False if that is nothing."""
        try:
            message.move()
        except BlockingIOError:
            return False
        except OSError:
            self._lost(message.peer)
        except _OtherHeaderError as found:
            due, dtype = found.expected, found.dtype
            self._fail(frames.difference(found.received, message.peer, due, self.rank, dtype))
        return True

    _transfer_combine = ControlledCommunicator._transfer_combine


class _Sending:
    """A message on its way out: how far it has come."""

    left = 0  # bytes, with the header

    def start(self, peer: int, link: socket.socket, header: bytes, array: Array) -> None:
        self.peer, self._link, self._header = peer, link, header
        self._payload = array.view(np.uint8).data
        self.left = _HEADER + array.nbytes

    def move(self) -> None:
        """Send what the link takes now. Raises BlockingIOError if it takes nothing."""
        done = _HEADER + len(self._payload) - self.left
        if done < _HEADER:
            self.left -= self._link.sendmsg((self._header[done:], self._payload))
        else:
            self.left -= self._link.send(self._payload[done - _HEADER :])
        if not self.left:
            self._payload = memoryview(b"")  # so that nothing here keeps the array's memory


class _Receiving:
    """A message on its way in: into an array or, with `reduce`, block by block combined with one."""

    left = 0

    def __init__(self) -> None:
        self._header = bytearray(_HEADER)
        self._block = np.empty(BLOCK, np.uint8)

    def start(self, peer: int, link: socket.socket, expected: bytes, array: Array, reduce: Any) -> None:
        self.peer, self._link, self._expected = peer, link, expected
        self._array, self._reduce = array, reduce
        self.left = _HEADER + array.nbytes
        self._header_room = memoryview(self._header)
        self._begun = 0  # elements in the blocks up to this one
        self._next_block()

    @property
    def begun(self) -> bool:
        """Whether any of it has come."""
        return len(self._header_room) < _HEADER

    def _next_block(self) -> None:
        """Make room for the next block; without a reduction, the block is the array itself."""
        if self._reduce is None:
            self._room = self._array.view(np.uint8).data
            return
        length = max(1, BLOCK // self._array.itemsize)
        self._accumulator = self._array[self._begun : self._begun + length]
        nbytes = self._accumulator.nbytes
        self._incoming = self._block[:nbytes].view(self._array.dtype)
        self._room = self._block[:nbytes].data
        self._begun += length

    def move(self) -> None:
        """Take what has come.

        Raises:
            BlockingIOError: if nothing has.
            ConnectionError: if the link has ended.
            _OtherHeaderError: if this is not the message that is due.
        """
        if self._header_room:
            got = self._link.recvmsg_into((self._header_room, self._room))[0]
        else:
            got = self._link.recv_into(self._room)
        if not got:
            raise ConnectionError
        self.left -= got
        if self._header_room:
            of_header = min(got, len(self._header_room))
            got -= of_header
            self._header_room = self._header_room[of_header:]
            if not self._header_room and self._header != self._expected:
                raise _OtherHeaderError(bytes(self._header), self._expected, self._array.dtype)
        self._room = self._room[got:]
        if got and not self._room and self._reduce is not None:
            self._reduce(self._accumulator, self._incoming, out=self._accumulator)
            self._next_block()
        if not self.left:
            self._array = self._accumulator = None
            self._room = memoryview(b"")


class _OtherHeaderError(Exception):
    """The header is not that of the message that is due."""

    def __init__(self, received: bytes, expected: bytes, dtype: np.dtype) -> None:
        super().__init__(received)
        self.received, self.expected, self.dtype = received, expected, dtype
