"""How the ranks of one run find each other, and how they know that it is they.

Rank 0 listens at the coordinator's address. Every other rank calls there, leaves the address of its own listener,
and is given the table of all addresses once the last has called. Then each pair makes its links: the higher rank
calls the lower one.

Whoever calls and whoever is called prove to each other that they know the run's secret, without sending it
(challenge and response with HMAC-SHA256, RFC 2104), before anything else that the other says is looked at:

    caller  → called   magic, nonce c
    called  → caller   nonce d, HMAC(secret, "called", c, d)
    caller  → called   claim (rank, size, purpose, address), HMAC(secret, "caller", d, c, claim)
    called  → caller   verdict

Everything has a fixed length. Each caller is greeted on a thread of its own, so that one that sends garbage, or
nothing, keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Literal, NamedTuple, Self

from workshop_utils import place
from workshop_utils.comm.communicator import CommunicationError, FrameError, PeerDied, PeerSilent

Family = Literal["tcp", "unix"]
Links = dict[int, socket.socket]

# Loopback, and the subnet of `workshop_utils.network`, which exists in the namespaces of a run alone.
REACHABLE = [ipaddress.ip_network(block) for block in ("127.0.0.0/8", "::1/128", "10.77.0.0/24")]

_MAGIC = b"workshop comm 1\n"
_NONCE = 32
_PROOF = 32  # bytes of an HMAC-SHA256
_ADDRESS = 108  # more than any address takes
_CLAIM = struct.Struct(f"<II16s{_ADDRESS}s")
_VERDICTS = {
    b"\0": "",
    b"\1": "another process has joined as this rank",
    b"\2": "the ranks do not agree on how many they are",
}
_MOST_CALLERS = 1024  # being greeted at once
_NOT_YET = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOENT, errno.EAGAIN}


class Caller(NamedTuple):
    """A rank that has proved to belong to the run, with the link that it has opened, and its own address."""

    rank: int
    purpose: str
    address: str
    link: socket.socket


class Run(NamedTuple):
    """What a rank knows of its run before it meets the others."""

    rank: int
    size: int
    secret: bytes
    deadline: float  # of time.monotonic()

    @classmethod
    def starting(cls, rank: int, size: int, secret: bytes, timeout_seconds: float) -> Self:
        """The run that starts now. Raises ValueError for a rank that there cannot be, or without a secret."""
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; with size {size} it must be from 0 to {size - 1}")
        if not secret:
            raise ValueError("secret is empty; it must be bytes that the run's ranks alone know")
        return cls(rank, size, secret, time.monotonic() + timeout_seconds)


class Door:
    """A listener at `address` that lets in the other ranks of the run, each once for each purpose."""

    def __init__(self, run: Run, family: Family, address: str) -> None:
        self._run = run
        self._listener, self.address = _listen(family, address)
        self._callers: dict[tuple[str, int], Caller] = {}
        self._admitted: set[tuple[str, int]] = set()  # those, and who is just being told so
        self._greeted: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._open, name="workshop-door", daemon=True)
        self._thread.start()

    def wait(self, purpose: str, ranks: range) -> dict[int, Caller]:
        """One caller for each of `ranks`. Raises PeerSilent, naming who has not called by the deadline."""

        def missing() -> list[int]:
            return [rank for rank in ranks if (purpose, rank) not in self._callers]

        with self._changed:
            seconds = max(0.0, self._run.deadline - time.monotonic())
            if not self._changed.wait_for(lambda: not missing(), timeout=seconds):
                names = ", ".join(map(str, missing()))
                raise PeerSilent(f"rank {self._run.rank} has waited in vain for rank {names} to join the run")
            return {rank: self._callers[purpose, rank] for rank in ranks}

    def close(self) -> None:
        """Let nobody in any more; who is still being greeted is shut out."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        if self.address.startswith(os.sep):
            Path(self.address).unlink(missing_ok=True)
        with self._changed:
            for link in self._greeted:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._changed:
                full = len(self._greeted) >= _MOST_CALLERS
                if not full:
                    self._greeted.add(link)
            if full:
                link.close()
            else:
                threading.Thread(target=self._greet, args=(link,), name="workshop-door", daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        try:
            caller = self._recognise(link)
        except (OSError, CommunicationError):
            caller = None  # a stranger: no business of the run's
        with self._changed:
            self._greeted.discard(link)
            if caller is not None:
                self._callers[caller.purpose, caller.rank] = caller
                self._changed.notify_all()
        if caller is None:
            link.close()

    def _recognise(self, link: socket.socket) -> Caller | None:
        run = self._run
        hello = receive(link, len(_MAGIC) + _NONCE, run.deadline)
        if not hello.startswith(_MAGIC):
            return None
        theirs, ours = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        link.sendall(ours + _proof(run.secret, b"called", theirs, ours))
        claim = receive(link, _CLAIM.size, run.deadline)
        proof = receive(link, _PROOF, run.deadline)
        if not hmac.compare_digest(proof, _proof(run.secret, b"caller", ours, theirs, claim)):
            return None
        rank, size, purpose, address = _CLAIM.unpack(claim)
        caller = Caller(rank, _text(purpose), _text(address), link)
        verdict = self._admit(caller, size)
        link.sendall(verdict)
        return None if _VERDICTS[verdict] else caller

    def _admit(self, caller: Caller, size: int) -> bytes:
        if size != self._run.size or caller.rank >= size:
            return b"\2"
        with self._changed:
            who = (caller.purpose, caller.rank)
            if who in self._admitted or caller.rank == self._run.rank:
                return b"\1"
            self._admitted.add(who)
        return b"\0"


def call(run: Run, family: Family, address: str, purpose: str, own_address: str = "") -> socket.socket:
    """A link to the rank that listens at `address`, which both sides have proved to belong to the run.

    Raises:
        FrameError: if what listens there does not know the secret, or refuses this rank.
        PeerSilent: if nothing listens there by the deadline, or it does not answer.
    """
    link = _dial(family, address, run.deadline)
    try:
        ours = secrets.token_bytes(_NONCE)
        link.sendall(_MAGIC + ours)
        answer = receive(link, _NONCE + _PROOF, run.deadline)
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(run.secret, b"called", ours, theirs)):
            raise FrameError(f"what listens at {address} does not know this run's secret")
        claim = _CLAIM.pack(run.rank, run.size, purpose.encode(), own_address.encode())
        link.sendall(claim + _proof(run.secret, b"caller", theirs, ours, claim))
        verdict = _VERDICTS.get(receive(link, 1, run.deadline), "it gave no reason that is known here")
    except TimeoutError:
        link.close()
        raise PeerSilent(f"what listens at {address} did not answer rank {run.rank}") from None
    except OSError as error:
        link.close()
        raise FrameError(f"what listens at {address} refused rank {run.rank}: {error}") from error
    except FrameError:
        link.close()
        raise
    if verdict:
        link.close()
        raise FrameError(f"what listens at {address} refused rank {run.rank} of {run.size}: {verdict}")
    return link


def meet(run: Run, coordinator: str, family: Family, purposes: tuple[str, ...]) -> dict[str, Links]:
    """The links of this rank to every other one, by purpose; blocking sockets without a time-out.

    Raises:
        ValueError: if `coordinator` is not `host:port` on loopback or in a network namespace of a run, or if
            Unix sockets are to pass by an emulated network.
        FrameError, PeerSilent, PeerDied: if the ranks do not all come together.
    """
    host, _ = endpoint(coordinator)
    if family == "unix" and (place.link() is not None or not ipaddress.ip_address(host).is_loopback):
        raise ValueError(
            "family is 'unix' in an emulated network; Unix sockets, and the memory that is shared through them, would "
            "pass by its links, so it must be 'tcp' (comm.tcp.connect)"
        )
    links: dict[str, Links] = {purpose: {} for purpose in purposes}
    if run.size == 1:
        return links
    with Door(run, family, _own_address(family, coordinator)) as door:
        addresses = (_join if run.rank else _gather)(run, coordinator, door.address)
        for purpose, ours in links.items():
            ours.update({rank: call(run, family, addresses[rank], purpose) for rank in range(run.rank)})
        for purpose, ours in links.items():
            higher = door.wait(purpose, range(run.rank + 1, run.size))
            ours.update({rank: caller.link for rank, caller in higher.items()})
    for link in (link for of_purpose in links.values() for link in of_purpose.values()):
        link.settimeout(None)
        if link.family != socket.AF_UNIX:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return links


def _join(run: Run, coordinator: str, own_address: str) -> list[str]:
    """The addresses of all ranks, once all have joined."""
    with call(run, "tcp", coordinator, "join", own_address) as link:
        try:
            table = receive(link, run.size * _ADDRESS, run.deadline)
        except TimeoutError:
            raise PeerSilent(f"rank {run.rank} has joined, but not all {run.size} ranks have") from None
        except OSError:
            raise PeerDied(0, "the rendezvous") from None
    return [_text(table[at : at + _ADDRESS]) for at in range(0, len(table), _ADDRESS)]


def _gather(run: Run, coordinator: str, own_address: str) -> list[str]:
    """The same for rank 0, which tells them to the others."""
    with Door(run, "tcp", coordinator) as door:
        callers = door.wait("join", range(1, run.size))
        addresses = [own_address, *(caller.address for caller in callers.values())]
        table = b"".join(address.encode().ljust(_ADDRESS, b"\0") for address in addresses)
        for caller in callers.values():
            with caller.link, contextlib.suppress(OSError):  # one that has died is missed later
                caller.link.sendall(table)
    return addresses


def endpoint(coordinator: str) -> tuple[str, int]:
    """Host and port of `"host:port"`.

    Raises:
        ValueError: if it has another form, or is an address that others than this run could reach.
    """
    host, _, port = coordinator.rpartition(":")
    host = {"localhost": "127.0.0.1"}.get(host, host.strip("[]"))
    try:
        address, number = ipaddress.ip_address(host), int(port)
    except ValueError:
        raise ValueError(
            f"coordinator is {coordinator!r}; it must be an address and a port, '127.0.0.1:4000'"
        ) from None
    if not any(address in block for block in (*REACHABLE, *_subnet_of_the_run())):
        raise ValueError(
            f"coordinator is {coordinator!r}; it must be on loopback or in the subnet of an emulated network, "
            "so that nobody outside the run can reach it; between machines, WORKSHOP_SUBNET names their private subnet"
        )
    return host, number


def _subnet_of_the_run() -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    text = place.subnet()
    if text is None:
        return []
    try:
        block = ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"WORKSHOP_SUBNET is {text!r}; it must be a subnet, such as 10.0.0.0/16") from None
    if not block.is_private:
        raise ValueError(f"WORKSHOP_SUBNET is {text!r}; it must be private, or all the world could knock")
    return [block]


def receive(link: socket.socket, nbytes: int, deadline: float | None = None) -> bytes:
    """Exactly `nbytes` bytes. Raises TimeoutError at the deadline, ConnectionError if the link ends before."""
    received = bytearray()
    while len(received) < nbytes:
        if deadline is not None:
            link.settimeout(max(0.001, deadline - time.monotonic()))
        part = link.recv(nbytes - len(received))
        if not part:
            raise ConnectionError("the link was closed")
        received += part
    return bytes(received)


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"|".join(parts), "sha256")


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("utf-8", "replace")


def _own_address(family: Family, coordinator: str) -> str:
    """Where this rank can listen for the others."""
    if family == "tcp":
        kind, where = _socket_address("tcp", coordinator)
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing, but finds out which of this machine's addresses leads there
            host = probe.getsockname()[0]
        return f"[{host}]:0" if ":" in host else f"{host}:0"
    name = f"workshop-{secrets.token_hex(16)}"
    # Linux's abstract names leave no file behind, whatever happens; elsewhere there is one for a moment.
    return f"@{name}" if sys.platform == "linux" else str(Path(tempfile.gettempdir()) / name)


def _socket_address(family: Family, address: str) -> tuple[int, str | tuple[str, int]]:
    if family == "unix":
        return socket.AF_UNIX, address.replace("@", "\0", 1) if address.startswith("@") else address
    host, port = endpoint(address)
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port)


def _listen(family: Family, address: str) -> tuple[socket.socket, str]:
    kind, where = _socket_address(family, address)
    listener = socket.socket(kind, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_MOST_CALLERS)
    except OSError as error:
        listener.close()
        raise CommunicationError(f"cannot listen at {address}: {error.strerror}") from error
    if family == "unix":
        return listener, address
    host, port = listener.getsockname()[:2]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _dial(family: Family, address: str, deadline: float) -> socket.socket:
    kind, where = _socket_address(family, address)
    while True:
        link = socket.socket(kind, socket.SOCK_STREAM)
        link.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            link.connect(where)
            # With nobody listening, TCP may connect a socket to itself.
            if family == "unix" or link.getsockname() != link.getpeername():
                return link
        except OSError as error:
            if error.errno not in _NOT_YET and not isinstance(error, TimeoutError):
                link.close()
                raise CommunicationError(f"cannot connect to {address}: {error.strerror}") from error
        link.close()
        if time.monotonic() > deadline:
            raise PeerSilent(f"nobody listens at {address}; has rank 0 been started?")
        time.sleep(0.02)
