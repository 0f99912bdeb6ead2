"""Bytes counted by the kernel, for whoever sends them: Gloo, Horovod, MPI, or a script's own sockets.

    with count_bytes(dist.barrier) as counted:
        dist.all_reduce(gradient)
    counted.sent        # bytes that the other ranks' kernels have acknowledged

Nothing here is computed from the size of a tensor. For each TCP connection Linux counts the bytes that its peer has
acknowledged, and those that have arrived (tcp(7), TCP_INFO: tcpi_bytes_acked and tcpi_bytes_received). This module adds
up the connections of this process, whoever uses them: a framework's headers, negotiation and heartbeats count as well.
So put into the block the collective that is to be counted, and nothing else: what flows while none is in flight belongs
to none. Shared memory, by which MPI joins ranks of one machine, is no TCP.
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

# Of struct tcp_info (linux/tcp.h): unacknowledged segments; bytes acknowledged, received; sent, of those again.
_UNACKED, _TOTALS, _SENT = (24, struct.Struct("<I")), (120, struct.Struct("<QQ")), (200, struct.Struct("<QQ"))
_NOT_SENT = (144, struct.Struct("<I"))
_LISTENING = 10
_QUIET_SECONDS = 1.0  # for acknowledgements to come in; a receiver delays them by 40 ms at most

Totals = dict[str, tuple[int, int]]  # (sent, received) by connection


class CountedBytes:
    """Bytes of payload that went over this process's TCP connections while a block ran, up to now or to its end.

    Where the system has no such counters, as macOS, they are NaN.

    Attributes:
        sent: acknowledged by the peers.
        received: arrived here. What a peer sent before this process had begun to count is missing.
        is_complete: whether every connection was there to the end; the bytes of one that was closed are missing.
    """

    def __init__(self) -> None:
        self._before = _totals(wait=True)
        self._after: Totals | None = None

    @property
    def sent(self) -> float:
        return self._difference(0)

    @property
    def received(self) -> float:
        return self._difference(1)

    @property
    def is_complete(self) -> bool:
        return self._before.keys() <= self._now().keys()

    def finish(self) -> None:
        """Count no further."""
        self._after = _totals(wait=True)

    def _now(self) -> Totals:
        return _totals(wait=False) if self._after is None else self._after

    def _difference(self, which: int) -> float:
        if sys.platform != "linux":
            return math.nan
        nothing = (0, 0)
        return sum(
            total[which] - self._before.get(name, nothing)[which] for name, total in self._now().items()
        )


@contextlib.contextmanager
def count_bytes(barrier: Callable[[], object] | None = None) -> Iterator[CountedBytes]:
    """Count the bytes on this process's TCP connections while the block runs.

    With `barrier`, such as `dist.barrier`, all ranks begin together and end together; its own bytes do not count.
    """
    if barrier is not None:
        barrier()
    counted = CountedBytes()
    try:
        yield counted
    finally:
        counted.finish()
    if barrier is not None:
        barrier()


def _totals(wait: bool) -> Totals:
    """What each connection of this process has carried; with `wait`, once all that was sent is acknowledged."""
    totals: Totals = {}
    if sys.platform != "linux":
        return totals
    deadline = time.monotonic() + _QUIET_SECONDS * wait
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            name = str(entry.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if connection.type == socket.SOCK_STREAM and connection.family in (
                        socket.AF_INET,
                        socket.AF_INET6,
                    ):
                        totals[name] = _total(connection, deadline)
    return totals


def _total(connection: socket.socket, deadline: float) -> tuple[int, int]:
    def field(place: tuple[int, struct.Struct]) -> tuple[int, ...]:
        return place[1].unpack_from(information, place[0])

    while True:
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
        if information[0] == _LISTENING:
            return 0, 0
        if time.monotonic() >= deadline or not (field(_UNACKED)[0] or field(_NOT_SENT)[0]):
            break
        time.sleep(0.001)
    acknowledged, received = field(_TOTALS)
    sent, again = field(_SENT)
    return min(acknowledged, sent - again), received  # opening a connection is acknowledged as a byte, too
