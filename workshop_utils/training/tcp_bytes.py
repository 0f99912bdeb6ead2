"""Bytes counted by the kernel, for whoever sends them: Gloo, Horovod, MPI, or a script's own sockets.

    with count_bytes(dist.barrier) as counted:
        dist.all_reduce(gradient)
    counted.sent        # bytes that the other ranks' kernels have acknowledged

Nothing here is computed from the size of a tensor. For each TCP connection Linux counts the bytes that its peer has
acknowledged (tcp(7), TCP_INFO), each once, however often it was sent. This module adds up the connections of this
process, whoever uses them. A framework's headers count, and so does what its ranks tell each other between two
collectives: Horovod's send some hundred bytes in every cycle. So put into the block the collective that is to be
counted, and nothing else; a block that only sleeps as long shows what is not the collective's. What does not go over
TCP is not counted: ranks of MPI on one machine share memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Of struct tcp_info (linux/tcp.h, since Linux 4.19): state; segments in flight; bytes acknowledged, not yet sent; bytes
# sent, and sent again.
_INFO = struct.Struct("=B 23x I 92x Q 16x I 52x QQ")
_LISTEN = 10  # a state (net/tcp_states.h)
_UNKNOWN = math.nan, math.nan, (None, None)
_QUIET_SECONDS = 1.0  # for acknowledgements to come in; a receiver delays them by 40 ms at most

Link = tuple[tuple[str, int] | None, tuple[str, int] | None]  # this end and the peer's, where they are known
# By connection: acknowledged; sent for the first time; link. The two numbers are equal once all has arrived, but for a
# connection's opening and end, which are acknowledged as a byte each, and for what this machine itself has dropped,
# which the second has too often.
Totals = dict[str, tuple[float, float, Link]]


class CountedBytes:
    """Bytes of payload that left through this process's TCP connections while a block ran, up to now or to its end.

    They are NaN where they are not known: on a system without these counters, such as macOS, and once a connection is
    closed that was there at the start. One that comes and goes within the block is not seen.
    """

    def __init__(self) -> None:
        self._before = _totals(_QUIET_SECONDS)
        self._after: Totals | None = None

    @property
    def sent(self) -> float:
        """Acknowledged by the peers."""
        return sum(self.by_link.values())

    @property
    def by_link(self) -> dict[Link, float]:
        """`sent`, by this end's address and the peer's, such as `(("10.0.0.1", 4000), ("10.0.0.2", 29500))`."""
        after = _totals(0) if self._after is None else self._after
        links: dict[Link, float] = {}
        for name in self._before.keys() | after.keys():
            acknowledged, sent, link = after.get(name, _UNKNOWN)
            before = self._before.get(name, (0, 0))
            links[link] = links.get(link, 0) + min(acknowledged - before[0], sent - before[1])
        return links


@contextlib.contextmanager
def count_bytes(barrier: Callable[[], object] = lambda: None) -> Iterator[CountedBytes]:
    """Count the bytes on this process's TCP connections while the block runs.

    With `barrier`, such as `dist.barrier`, all ranks begin together and end together. What it sends itself does not
    count.
    """
    barrier()
    counted = CountedBytes()
    try:
        yield counted
    finally:
        counted._after = _totals(_QUIET_SECONDS)
    barrier()


def _totals(quiet_seconds: float) -> Totals:
    """What each connection of this process has carried, once all that was sent is acknowledged, if it is in time."""
    if sys.platform != "linux":
        return {"": _UNKNOWN}
    totals, deadline = {}, time.monotonic() + quiet_seconds
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or no TCP
            name = str(entry.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if total := _total(connection, deadline):
                        totals[name] = total
    return totals


def _total(connection: socket.socket, deadline: float) -> tuple[float, float, Link] | None:
    while True:
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        if len(information) < _INFO.size:
            return _UNKNOWN
        state, in_flight, acknowledged, unsent, sent, again = _INFO.unpack(information)
        if state == _LISTEN:
            return None
        if not (in_flight or unsent) or time.monotonic() >= deadline:
            return acknowledged, sent - again, _link(connection)
        time.sleep(0.001)


def _link(connection: socket.socket) -> Link:
    try:
        return connection.getsockname()[:2], connection.getpeername()[:2]
    except OSError:  # it has no peer, or no longer
        return None, None
