"""Ports that no other launch on this machine will take.

The usual way, to bind port 0, read the number, close, and hand it to a framework, is a race: between the close
and the framework's own bind, anybody may get the same number. Here a reservation holds the *UDP* port of the
same number for as long as the run lasts. UDP and TCP ports are separate, so the framework can bind the TCP port
as it likes; another launch fails to bind the UDP port and moves on; and the kernel lets go of the reservation when
the process that holds it ends, however it ends. Numbers come from below the ephemeral range, from which the
kernel serves everybody's port 0.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import socket
from pathlib import Path
from typing import Self

from workshop_utils.jobs import JobError

LOWEST = 10_000
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except OSError:  # not Linux; IANA's range, which macOS and Windows use
        return 49_152


class PortReservation:
    """`count` TCP ports on loopback, kept free of other launches until `release`, or while this object exists.

    Raises:
        OSError: if there are not `count` free ports.
        JobError: if there is no address for them.
    """

    def __init__(self, count: int) -> None:
        self.ports: list[int] = []
        self._held: list[socket.socket] = []
        ports = range(LOWEST, max(LOWEST, _first_ephemeral_port()))
        # Launches begin to look at different places, so that they seldom meet.
        start = random.SystemRandom().randrange(len(ports) + 1)
        candidates = itertools.chain(ports[start:], ports[:start])
        while len(self.ports) < count:
            candidate = next(candidates, None)
            if candidate is None:
                self.release()
                raise OSError(
                    f"there are not {count} free ports from {LOWEST} on; is something leaking them?"
                )
            self._try(candidate)

    def _try(self, port: int) -> None:
        holder = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            holder.bind(("127.0.0.1", port))
            # Something that does not know of reservations may be listening there, on any address. Not with
            # SO_REUSEADDR, with which macOS lets one port have listeners on different addresses.
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind(("0.0.0.0", port))
        except OSError as error:
            holder.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise JobError(
                    "this machine has no address 127.0.0.1, at which the processes of a run meet, whatever it has of "
                    "IPv6: add it to the loopback, as by `ip address add 127.0.0.1/8 dev lo`"
                ) from None
            if error.errno == errno.EMFILE:
                raise  # it is not the port that is missing
            return
        self.ports.append(port)
        self._held.append(holder)

    def release(self) -> None:
        """Let go of the ports."""
        while self._held:
            with contextlib.suppress(OSError):
                self._held.pop().close()

    __del__ = release

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
