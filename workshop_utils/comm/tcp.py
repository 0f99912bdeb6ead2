"""Message passing between processes: one TCP link for each pair of ranks.

    with tcp.connect(rank, size, "127.0.0.1:4000", secret) as communicator:
        ring_all_reduce(communicator, gradient, "mean")

A message is a header (`frames`) and the array's bytes, handed to the kernel straight out of the array's memory. The
kernel takes a small message at once. A thread sends what is left of a large one, so that a rank receives meanwhile: if
all ranks of a ring sent first, each would wait for its neighbour to receive.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from workshop_utils import place
from workshop_utils.comm import frames, rendezvous, stamped
from workshop_utils.comm.communicator import Array, Communicator
from workshop_utils.comm.control import ControlLinks
from workshop_utils.comm.rendezvous import Credentials, Links

# How often a rank that waits until all is sent listens to its control links.
HEED_SECONDS = 0.2


def connect(
    rank: int, size: int, coordinator: str, secret: bytes, timeout_seconds: float = 60.0
) -> Communicator:
    """This process's communicator in a run of `size` ranks; returns when all have come.

    Where the launcher emulates a network that the kernel cannot, it is behind a link (`stamped`).

    Args:
        rank: this process's number, 0 to size - 1.
        size: how many ranks there are.
        coordinator: `"host:port"`, where rank 0 listens; on loopback, or in the subnet of an emulated network.
        secret: known to the run's ranks alone; nobody without it is let in.
        timeout_seconds: how long the ranks may take to come together, and later a message to move on.

    Raises:
        ValueError: for a rank or coordinator that cannot be.
        CommunicationError: if the ranks do not come together (`rendezvous.meet`).
    """
    credentials = Credentials.until(timeout_seconds, rank, size, secret)
    links = rendezvous.meet(credentials, coordinator, ("control", "data"))
    communicator = TcpCommunicator(rank, size, links["control"], links["data"], timeout_seconds)
    return stamped.behind(communicator, place.link())


class TcpCommunicator(Communicator):
    """A rank with two links to every other one: `data` carries messages, `control` what went wrong."""

    def __init__(
        self, rank: int, size: int, control: Links, data: Links, timeout_seconds: float = 60.0
    ) -> None:
        super().__init__(rank, size, timeout_seconds)
        self._control, self._data = ControlLinks(self, control), data
        self._sent, self._received = [0] * size, [0] * size  # messages, by peer
        # The ranks whose messages `wait_any` has seen and not yet named, in the order in which it saw them.
        self._came: dict[int, None] = {}
        self._sender = ThreadPoolExecutor(max_workers=1)
        for link in data.values():
            link.setblocking(False)

    def wait_any(self, sources: Sequence[int]) -> int:
        """The rank among `sources` whose message was the first to be there; receive it next.

        Of those that came between two calls, the lowest goes first; but whoever has been seen goes before all that
        come later, so nobody starves behind a busy low rank.
        """
        self._control.raise_failure()
        while True:
            ready = sorted(self._wait(sources))
            self._came.update(dict.fromkeys(ready))
            for source in [source for source in self._came if source in sources]:
                del self._came[source]
                if source in ready:  # and not received meanwhile, without asking
                    return source

    def _exchange(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        self._control.raise_failure()
        rest = None if to is None else self._start_sending(to, outgoing)
        if source is not None:
            self._receive(source, incoming, is_idle=rest is None)
        if to is not None and rest is not None:
            self._finish_sending(to, rest)

    def _start_sending(self, to: int, array: Array) -> Future[None] | None:
        """Send what the kernel takes at once; a thread sends the rest."""
        header, payload = self._header(self._sent, to, array), array.view(np.uint8).data
        sent = 0
        try:
            sent = self._data[to].sendmsg((header, payload))
        except BlockingIOError:
            pass  # it takes nothing
        except OSError:
            self._control.lost(to)
        if sent == len(header) + len(payload):
            return None
        rest = header[sent:], payload[max(0, sent - len(header)) :]
        return self._sender.submit(self._send, self._data[to], rest)

    def _send(self, link: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
        writable = select.poll()
        writable.register(link, select.POLLOUT)
        for part in parts:
            while part:
                if not writable.poll(self.timeout_seconds * 1000):
                    raise TimeoutError
                part = part[link.send(part) :]

    def _finish_sending(self, to: int, rest: Future[None]) -> None:
        self._control.waiting_for = to
        while not wait([rest], HEED_SECONDS).done:
            self._control.heed()
        try:
            rest.result()
        except TimeoutError:
            self._control.silent([to])
        except OSError:
            self._control.lost(to)

    def _receive(self, source: int, array: Array, is_idle: bool) -> None:
        expected = self._header(self._received, source, array)
        header = bytearray(len(expected))
        self._fill(source, memoryview(header), is_idle)
        if header != expected:
            self._control.fail(frames.difference(header, source, expected, self.rank, array.dtype))
        self._fill(source, array.view(np.uint8).data)

    def _fill(self, source: int, buffer: memoryview, is_idle: bool = False) -> None:
        """Receive as many bytes as fit into `buffer`."""
        while buffer:
            received = 0
            try:
                received = self._data[source].recv_into(buffer)
            except BlockingIOError:
                self._wait([source], is_idle)
                continue
            except OSError:
                pass  # as if it had ended
            if not received:
                self._control.lost(source)
            buffer = buffer[received:]

    def _wait(self, sources: Sequence[int], is_idle: bool = True) -> list[int]:
        """Sleep until something comes; the ranks among `sources` from which there is something to receive."""
        self._control.waiting_for = sources[0]
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        for source in sources:
            poll.register(self._data[source], select.POLLIN)
        began = time.monotonic()
        ready = {number for number, _ in poll.poll(self.timeout_seconds * 1000)}
        if is_idle:
            self.waited_seconds += time.monotonic() - began
        if not ready:
            self._control.silent(sources)
        if self._control.fileno() in ready:
            self._control.heed()
        return [source for source in sources if self._data[source].fileno() in ready]

    def _header(self, counters: list[int], peer: int, array: Array) -> bytes:
        counters[peer] += 1
        return frames.message(self.collective, array.dtype, counters[peer], array.nbytes)

    def abort(self, error: BaseException) -> None:
        """Tell every other rank that this one has failed, and how; each raises the like in what it does next."""
        self._control.abort(error)

    def close(self) -> None:
        """Let go of links and memory. Safe to call twice."""
        self._control.close()
        for link in self._data.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # so that the sender ends
        self._sender.shutdown()
        for link in self._data.values():
            link.close()
        super().close()

    def __exit__(self, *raised: object) -> None:
        error = raised[1]
        if isinstance(error, BaseException) and self._control.failure is None:
            self.abort(error)
        self.close()
