"""How the ranks of one run find each other, and prove who they are.

Rank 0 listens at the coordinator's address. Every other rank calls there, leaves the address of its own listener,
and receives the table of all addresses once the last rank has called. Then each pair opens its links: the higher rank
calls the lower one.

Both sides of a call prove that they know the run's secret, without sending it (challenge and response with
HMAC-SHA256, RFC 2104), before either acts on anything else that the other sends:

    caller  → called   magic, nonce c
    called  → caller   nonce d, HMAC(secret, "called", c, d)
    caller  → called   claim (rank, size, purpose, address), HMAC(secret, "caller", d, c, claim)
    called  → caller   verdict

Everything has a fixed length. A thread greets each caller, so that one that sends garbage, or nothing, delays nobody.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Self

from workshop_utils.comm.communicator import CommunicationError, FrameError, PeerDied, PeerSilent

Sockets = dict[int, socket.socket]  # by rank

# Loopback, and the subnet of `workshop_utils.network`, which exists in the namespaces of a run alone.
REACHABLE = tuple(ipaddress.IPv4Network(block) for block in ("127.0.0.0/8", "10.77.0.0/24"))

_MAGIC = b"workshop comm 1\n"
_NONCE = 32
_PROOF = 32  # bytes of an HMAC-SHA256
_ADDRESS = 32  # more than any address and port take
_CLAIM = struct.Struct(f"<II16s{_ADDRESS}s")
_VERDICTS = {
    b"\0": "",
    b"\1": "another process has joined as this rank",
    b"\2": "the ranks do not agree on how many they are",
}
_NOT_YET = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EAGAIN}


class Caller(NamedTuple):
    """The link that a rank of the run has opened, and the address of its own listener."""

    link: socket.socket
    address: str


class Membership(NamedTuple):
    """What makes a process a rank of its run, where the others may be, and how long it waits for them."""

    rank: int
    size: int
    secret: bytes
    deadline: float  # of time.monotonic()
    reachable: tuple[ipaddress.IPv4Network, ...] = REACHABLE

    @classmethod
    def until(
        cls, timeout_seconds: float, rank: int, size: int, secret: bytes, subnet: str | None = None
    ) -> Self:
        """In a run that starts now. Raises ValueError for an impossible rank or subnet, or an empty secret."""
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; with size {size} it must be from 0 to {size - 1}")
        if not secret:
            raise ValueError("secret is empty; it must be bytes that only the run's ranks know")
        deadline = time.monotonic() + timeout_seconds
        return cls(
            rank, size, secret, deadline, REACHABLE if subnet is None else (*REACHABLE, private(subnet))
        )


class Listener:
    """Listens at `address`, and admits the other ranks of the run, each once for each purpose."""

    def __init__(self, own: Membership, address: str) -> None:
        self._own = own
        try:
            self._listener = socket.create_server(endpoint(address, own.reachable))
        except OSError as error:
            raise CommunicationError(f"cannot listen at {address}: {error.strerror}") from error
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._callers: dict[tuple[str, int], Caller] = {}  # by purpose and rank
        self._greeted: set[socket.socket] = set()  # not yet admitted
        self._changed = threading.Condition()
        self._thread = _started(self._accept)

    def wait(self, purpose: str, ranks: range) -> dict[int, Caller]:
        """One caller for each of `ranks`. Raises PeerSilent, which names the ranks missing at the deadline."""

        def missing() -> list[int]:
            return [rank for rank in ranks if (purpose, rank) not in self._callers]

        with self._changed:
            seconds = max(0.0, self._own.deadline - time.monotonic())
            if not self._changed.wait_for(lambda: not missing(), timeout=seconds):
                names = ", ".join(map(str, missing()))
                raise PeerSilent(f"rank {self._own.rank} has waited in vain for rank {names} to join the run")
            return {rank: self._callers[purpose, rank] for rank in ranks}

    def close(self) -> None:
        """Admit nobody any more, and hang up on callers who are still being greeted."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._changed:
            for link in self._greeted:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=1.0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                link, _ = self._listener.accept()
                with self._changed:
                    self._greeted.add(link)
                _started(self._greet, link)

    def _greet(self, link: socket.socket) -> None:
        try:
            is_admitted = self._is_admitted(link)
        except (OSError, CommunicationError):
            is_admitted = False  # a stranger: no business of the run's
        if not is_admitted:
            with self._changed:
                self._greeted.discard(link)
            link.close()

    def _is_admitted(self, link: socket.socket) -> bool:
        """Whether the caller proves to be a rank that is still missing; it is told the verdict."""
        own = self._own
        hello = receive(link, len(_MAGIC) + _NONCE, own.deadline)
        if not hello.startswith(_MAGIC):
            return False
        theirs, ours = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        link.sendall(ours + _proof(own.secret, b"called", theirs, ours))
        claim = receive(link, _CLAIM.size, own.deadline)
        proof = receive(link, _PROOF, own.deadline)
        if not hmac.compare_digest(proof, _proof(own.secret, b"caller", ours, theirs, claim)):
            return False
        rank, size, purpose, address = _CLAIM.unpack(claim)
        with self._changed:
            verdict = b"\0"
            if size != own.size or rank >= size:
                verdict = b"\2"
            elif (_text(purpose), rank) in self._callers or rank == own.rank:
                verdict = b"\1"
            link.sendall(verdict)
            if _VERDICTS[verdict]:
                return False
            self._greeted.discard(link)  # at once, so that `close` leaves it alone
            self._callers[_text(purpose), rank] = Caller(link, _text(address))
            self._changed.notify_all()
        return True


def _started(target: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="workshop-listener", daemon=True)
    thread.start()
    return thread


def call(own: Membership, address: str, purpose: str, own_address: str = "") -> socket.socket:
    """A link to the rank that listens at `address`, which both sides have proved to belong to the run.

    Raises:
        FrameError: if what listens there does not know the secret, or refuses this rank.
        PeerSilent: if nothing listens there by the deadline, or it does not answer.
    """
    link = _dial(address, own)
    try:
        verdict = _introduce(link, own, purpose, own_address)
        if verdict:
            raise FrameError(f"what listens at {address} refused rank {own.rank} of {own.size}: {verdict}")
    except BaseException as error:
        link.close()
        if isinstance(error, TimeoutError):
            raise PeerSilent(f"what listens at {address} did not answer rank {own.rank}") from None
        if isinstance(error, OSError):
            raise FrameError(f"what listens at {address} refused rank {own.rank}: {error}") from error
        raise
    return link


def _introduce(link: socket.socket, own: Membership, purpose: str, own_address: str) -> str:
    """Why the called side refuses this rank; empty if it does not."""
    ours = secrets.token_bytes(_NONCE)
    link.sendall(_MAGIC + ours)
    answer = receive(link, _NONCE + _PROOF, own.deadline)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(own.secret, b"called", ours, theirs)):
        raise FrameError("what listens at {}:{} does not know this run's secret".format(*link.getpeername()))
    claim = _CLAIM.pack(own.rank, own.size, purpose.encode(), own_address.encode())
    link.sendall(claim + _proof(own.secret, b"caller", theirs, ours, claim))
    return _VERDICTS.get(receive(link, 1, own.deadline), "for an unknown reason")


def meet(own: Membership, coordinator: str, purposes: tuple[str, ...]) -> dict[str, Sockets]:
    """The links of this rank to every other one, by purpose; blocking sockets without a time-out.

    Raises:
        ValueError: if `coordinator` is not `host:port` on loopback or in a network namespace of a run.
        FrameError, PeerSilent, PeerDied: if the ranks do not all come together.
    """
    host = _own_host(endpoint(coordinator, own.reachable))
    links: dict[str, Sockets] = {purpose: {} for purpose in purposes}
    if own.size == 1:
        return links
    with contextlib.closing(Listener(own, f"{host}:0")) as listener:
        addresses = (_join if own.rank else _gather)(own, coordinator, listener.address)
        for purpose, ours in links.items():
            ours.update({rank: call(own, addresses[rank], purpose) for rank in range(own.rank)})
        for purpose, ours in links.items():
            higher = listener.wait(purpose, range(own.rank + 1, own.size))
            ours.update({rank: caller.link for rank, caller in higher.items()})
    for link in (link for of_purpose in links.values() for link in of_purpose.values()):
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return links


def _join(own: Membership, coordinator: str, own_address: str) -> list[str]:
    """The addresses of all ranks, once all have joined."""
    with call(own, coordinator, "join", own_address) as link:
        try:
            table = receive(link, own.size * _ADDRESS, own.deadline)
        except TimeoutError:
            raise PeerSilent(f"rank {own.rank} has joined, but not all {own.size} ranks have") from None
        except OSError:
            raise PeerDied(0, "the rendezvous") from None
    return [_text(table[at : at + _ADDRESS]) for at in range(0, len(table), _ADDRESS)]


def _gather(own: Membership, coordinator: str, own_address: str) -> list[str]:
    """The same for rank 0, which tells them to the others."""
    with contextlib.closing(Listener(own, coordinator)) as listener:
        callers = listener.wait("join", range(1, own.size))
        addresses = [own_address, *(caller.address for caller in callers.values())]
        table = b"".join(address.encode().ljust(_ADDRESS, b"\0") for address in addresses)
        for caller in callers.values():
            with caller.link, contextlib.suppress(OSError):  # one that has died is missed later
                caller.link.sendall(table)
    return addresses


def endpoint(coordinator: str, reachable: tuple[ipaddress.IPv4Network, ...] = REACHABLE) -> tuple[str, int]:
    """Host and port of `"host:port"`.

    Raises:
        ValueError: if it has another form, or an address outside the networks that are `reachable`.
    """
    host, _, port = coordinator.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        address, number = ipaddress.IPv4Address(host), int(port)
    except ValueError:
        raise ValueError(
            f"coordinator is {coordinator!r}; it must be an address and a port, '127.0.0.1:4000'"
        ) from None
    if not any(address in block for block in reachable):
        raise ValueError(
            f"coordinator is {coordinator!r}; it must be on loopback or in the subnet of an emulated network, "
            "so that nobody outside the run can reach it; between machines, WORKSHOP_SUBNET names their private subnet"
        )
    return host, number


def private(subnet: str) -> ipaddress.IPv4Network:
    """The private network that is written as `subnet`. Raises ValueError if it is none."""
    try:
        network = ipaddress.IPv4Network(subnet)
    except ValueError:
        raise ValueError(f"subnet is {subnet!r}; it must be a subnet, such as 10.0.0.0/16") from None
    if not network.is_private:
        raise ValueError(f"subnet is {subnet!r}; it must be private, out of the internet's reach")
    return network


def receive(link: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Exactly `nbytes` bytes. Raises TimeoutError at the deadline, ConnectionError if the link ends before."""
    received = b""
    while len(received) < nbytes:
        link.settimeout(max(0.001, deadline - time.monotonic()))
        part = link.recv(nbytes - len(received))
        if not part:
            raise ConnectionError("the link was closed")
        received += part
    return received


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"|".join(parts), "sha256")


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("utf-8", "replace")


def _own_host(coordinator: tuple[str, int]) -> str:
    """This machine's address on the way to the coordinator, where the other ranks can call it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(coordinator)  # sends nothing
        host: str = probe.getsockname()[0]
    return host


def _dial(address: str, own: Membership) -> socket.socket:
    while True:
        link = socket.socket()
        link.settimeout(max(0.001, own.deadline - time.monotonic()))
        try:
            link.connect(endpoint(address, own.reachable))
            if link.getsockname() != link.getpeername():  # as TCP may connect a socket to itself
                return link
        except OSError as error:
            if error.errno not in _NOT_YET and not isinstance(error, TimeoutError):
                link.close()
                raise CommunicationError(f"cannot connect to {address}: {error.strerror}") from error
        link.close()
        if time.monotonic() > own.deadline:
            raise PeerSilent(f"nobody listens at {address}; has rank 0 been started?")
        time.sleep(0.02)
