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
import secrets
import socket
import struct
import threading
import time
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
    """A rank that has proved to belong to the run, with the link that it has opened, and its own address."""

    rank: int
    purpose: str
    address: str
    link: socket.socket


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
    """Listens at `address`, and lets in the other ranks of the run, each once for each purpose."""

    def __init__(self, own: Membership, address: str) -> None:
        self._own = own
        try:
            self._listener = socket.create_server(endpoint(address, own.reachable))
        except OSError as error:
            raise CommunicationError(f"cannot listen at {address}: {error.strerror}") from error
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._callers: dict[tuple[str, int], Caller] = {}
        self._admitted: set[tuple[str, int]] = set()  # those, and the one that is just being told so
        self._greeted: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._accept, name="workshop-listener", daemon=True)
        self._thread.start()

    def wait(self, purpose: str, ranks: range) -> dict[int, Caller]:
        """One caller for each of `ranks`. Raises PeerSilent, naming who has not called by the deadline."""

        def missing() -> list[int]:
            return [rank for rank in ranks if (purpose, rank) not in self._callers]

        with self._changed:
            seconds = max(0.0, self._own.deadline - time.monotonic())
            if not self._changed.wait_for(lambda: not missing(), timeout=seconds):
                names = ", ".join(map(str, missing()))
                raise PeerSilent(f"rank {self._own.rank} has waited in vain for rank {names} to join the run")
            return {rank: self._callers[purpose, rank] for rank in ranks}

    def close(self) -> None:
        """Let nobody in any more; callers that are still being greeted are shut out."""
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
                threading.Thread(
                    target=self._greet, args=(link,), name="workshop-listener", daemon=True
                ).start()

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
        own = self._own
        hello = receive(link, len(_MAGIC) + _NONCE, own.deadline)
        if not hello.startswith(_MAGIC):
            return None
        theirs, ours = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        link.sendall(ours + _proof(own.secret, b"called", theirs, ours))
        claim = receive(link, _CLAIM.size, own.deadline)
        proof = receive(link, _PROOF, own.deadline)
        if not hmac.compare_digest(proof, _proof(own.secret, b"caller", ours, theirs, claim)):
            return None
        rank, size, purpose, address = _CLAIM.unpack(claim)
        caller = Caller(rank, _text(purpose), _text(address), link)
        verdict = self._admit(caller, size)
        link.sendall(verdict)
        return None if _VERDICTS[verdict] else caller

    def _admit(self, caller: Caller, size: int) -> bytes:
        if size != self._own.size or caller.rank >= size:
            return b"\2"
        with self._changed:
            who = (caller.purpose, caller.rank)
            if who in self._admitted or caller.rank == self._own.rank:
                return b"\1"
            self._admitted.add(who)
        return b"\0"


def call(own: Membership, address: str, purpose: str, own_address: str = "") -> socket.socket:
    """A link to the rank that listens at `address`, which both sides have proved to belong to the run.

    Raises:
        FrameError: if what listens there does not know the secret, or refuses this rank.
        PeerSilent: if nothing listens there by the deadline, or it does not answer.
    """
    link = _dial(address, own)
    with contextlib.ExitStack() as unless_let_in:
        unless_let_in.callback(link.close)
        try:
            verdict = _introduce(link, own, purpose, own_address)
        except TimeoutError:
            raise PeerSilent(f"what listens at {address} did not answer rank {own.rank}") from None
        except OSError as error:
            raise FrameError(f"what listens at {address} refused rank {own.rank}: {error}") from error
        if verdict:
            raise FrameError(f"what listens at {address} refused rank {own.rank} of {own.size}: {verdict}")
        unless_let_in.pop_all()
    return link


def _introduce(link: socket.socket, own: Membership, purpose: str, own_address: str) -> str:
    """Why the called side does not let this rank in; empty if it does."""
    ours = secrets.token_bytes(_NONCE)
    link.sendall(_MAGIC + ours)
    answer = receive(link, _NONCE + _PROOF, own.deadline)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(own.secret, b"called", ours, theirs)):
        raise FrameError("what listens at {}:{} does not know this run's secret".format(*link.getpeername()))
    claim = _CLAIM.pack(own.rank, own.size, purpose.encode(), own_address.encode())
    link.sendall(claim + _proof(own.secret, b"caller", theirs, ours, claim))
    return _VERDICTS.get(receive(link, 1, own.deadline), "it gave no reason that is known here")


def meet(own: Membership, coordinator: str, purposes: tuple[str, ...]) -> dict[str, Sockets]:
    """The links of this rank to every other one, by purpose; blocking sockets without a time-out.

    Raises:
        ValueError: if `coordinator` is not `host:port` on loopback or in a network namespace of a run.
        FrameError, PeerSilent, PeerDied: if the ranks do not all come together.
    """
    endpoint(coordinator, own.reachable)
    links: dict[str, Sockets] = {purpose: {} for purpose in purposes}
    if own.size == 1:
        return links
    with contextlib.closing(
        Listener(own, f"{_own_host(endpoint(coordinator, own.reachable))}:0")
    ) as listener:
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
