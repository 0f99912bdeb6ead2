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

from workshop_utils.comm.communicator import CommunicationError, FrameError, PeerDied, PeerSilent
from workshop_utils.comm.frames import text

Sockets = dict[int, socket.socket]  # by rank

# Loopback, and the subnet of `workshop_utils.network`, which exists in the namespaces of a run alone.
REACHABLE = tuple(ipaddress.IPv4Network(block) for block in ("127.0.0.0/8", "10.77.0.0/24"))

_MAGIC = b"workshop comm 1\n"
_NONCE = 32
_PROOF = 32  # bytes of an HMAC-SHA256
_ADDRESS = 32  # more than any address and port take
_CLAIM = struct.Struct(f"<II16s{_ADDRESS}s")
_VERDICTS = {b"\0": "", b"\1": "another process has joined as this rank"}
_VERDICTS[b"\2"] = "the ranks do not agree on how many they are"
_NOT_YET = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EAGAIN}


class Membership:
    """What makes a process a rank of its run, where the others may be, and how long it waits for them, from now on.

    Attributes:
        deadline: of `time.monotonic()`.
        reachable: the networks in which the others may be.

    Raises:
        ValueError: for an impossible rank or subnet, or an empty secret.
    """

    def __init__(
        self, timeout_seconds: float, rank: int, size: int, secret: bytes, subnet: str | None
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; with size {size} it must be from 0 to {size - 1}")
        if not secret:
            raise ValueError("secret is empty; it must be bytes that only the run's ranks know")
        self.rank, self.size, self.secret = rank, size, secret
        self.deadline = time.monotonic() + timeout_seconds
        self.reachable = REACHABLE if subnet is None else (*REACHABLE, private(subnet))


class Listener:
    """Listens at `address`, and admits the other ranks of the run, each once for each purpose."""

    def __init__(self, member: Membership, address: str) -> None:
        self._member = member
        try:
            self._listener = socket.create_server(endpoint(address, member.reachable))
        except OSError as error:
            raise CommunicationError(f"cannot listen at {address}: {error.strerror}") from error
        self.address = "{}:{}".format(*self._listener.getsockname())
        # By purpose and rank: the link, and the address of the caller's own listener.
        self._callers: dict[tuple[str, int], tuple[socket.socket, str]] = {}
        self._greeted: set[socket.socket] = set()  # not yet admitted
        self._changed = threading.Condition()
        self._thread = _started(self._accept)

    def wait(self, purpose: str, ranks: range) -> list[tuple[socket.socket, str]]:
        """The link and address of each of `ranks`. Raises PeerSilent, which names those missing at the deadline."""
        with self._changed:
            while missing := [rank for rank in ranks if (purpose, rank) not in self._callers]:
                if not self._changed.wait(self._member.deadline - time.monotonic()):
                    names = ", ".join(map(str, missing))
                    raise PeerSilent(
                        f"rank {self._member.rank} waited in vain for rank {names} to join the run"
                    )
            return [self._callers[purpose, rank] for rank in ranks]

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
        with contextlib.suppress(OSError):  # a stranger: no business of the run's
            if self._admits(link):
                return
        with self._changed:
            self._greeted.discard(link)
        link.close()

    def _admits(self, link: socket.socket) -> bool:
        """Whether the caller proves to be a rank that is still missing; it receives the verdict."""
        member = self._member
        hello = receive(link, len(_MAGIC) + _NONCE, member.deadline)
        if not hello.startswith(_MAGIC):
            return False
        theirs, ours = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        link.sendall(ours + _proof(member.secret, b"called", theirs, ours))
        claim = receive(link, _CLAIM.size, member.deadline)
        proof = receive(link, _PROOF, member.deadline)
        if not hmac.compare_digest(proof, _proof(member.secret, b"caller", ours, theirs, claim)):
            return False
        rank, size, purpose, address = _CLAIM.unpack(claim)
        with self._changed:
            verdict = b"\0"
            if size != member.size or rank >= size:
                verdict = b"\2"
            elif (text(purpose), rank) in self._callers or rank == member.rank:
                verdict = b"\1"
            link.sendall(verdict)
            if _VERDICTS[verdict]:
                return False
            self._greeted.discard(link)  # at once, so that `close` leaves it alone
            self._callers[text(purpose), rank] = link, text(address)
            self._changed.notify_all()
        return True


def _started(target: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="workshop-listener", daemon=True)
    thread.start()
    return thread


def call(member: Membership, address: str, purpose: str, own_address: str = "") -> socket.socket:
    """A link to the rank that listens at `address`, which both sides have proved to belong to the run.

    Raises:
        ValueError: if `address` is outside the networks that are reachable.
        FrameError: if what listens there does not know the secret, or refuses this rank.
        PeerSilent: if nothing listens there by the deadline, or it does not answer.
        CommunicationError: if the system cannot connect to it.
    """
    with contextlib.ExitStack() as unless_admitted:
        link = unless_admitted.enter_context(_dial(address, member))
        ours = secrets.token_bytes(_NONCE)
        claim = _CLAIM.pack(member.rank, member.size, purpose.encode(), own_address.encode())
        try:
            link.sendall(_MAGIC + ours)
            answer = receive(link, _NONCE + _PROOF, member.deadline)
            theirs, proof = answer[:_NONCE], answer[_NONCE:]
            if not hmac.compare_digest(proof, _proof(member.secret, b"called", ours, theirs)):
                raise FrameError(f"what listens at {address} does not know this run's secret")
            link.sendall(claim + _proof(member.secret, b"caller", theirs, ours, claim))
            verdict = _VERDICTS.get(receive(link, 1, member.deadline), "for an unknown reason")
        except TimeoutError:
            raise PeerSilent(f"what listens at {address} did not answer rank {member.rank}") from None
        except OSError as error:
            verdict = str(error)
        if verdict:
            raise FrameError(
                f"what listens at {address} refused rank {member.rank} of {member.size}: {verdict}"
            )
        unless_admitted.pop_all()
    return link


def meet(member: Membership, coordinator: str, purposes: tuple[str, ...]) -> dict[str, Sockets]:
    """The links of this rank to every other one, by purpose; blocking sockets without a time-out.

    Raises:
        ValueError: if `coordinator` is not `host:port` on loopback, in an emulated network, or in the run's own subnet.
        CommunicationError: if rank 0 cannot listen there, or the ranks do not all come together.
    """
    target = endpoint(coordinator, member.reachable)
    links: dict[str, Sockets] = {purpose: {} for purpose in purposes}
    if member.size == 1:
        return links
    # This machine's address on the way to the coordinator is where the other ranks can call it.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        host = probe.getsockname()[0]
    with contextlib.closing(Listener(member, f"{host}:0" if member.rank else coordinator)) as listener:
        addresses = _join(member, coordinator, listener.address) if member.rank else _gather(member, listener)
        for purpose, ours in links.items():
            ours.update({rank: call(member, addresses[rank], purpose) for rank in range(member.rank)})
        for purpose, ours in links.items():
            higher = range(member.rank + 1, member.size)
            callers = listener.wait(purpose, higher)
            ours.update({rank: link for rank, (link, _) in zip(higher, callers, strict=True)})
            for link in ours.values():
                link.settimeout(None)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return links


def _join(member: Membership, coordinator: str, own_address: str) -> list[str]:
    """The addresses of all ranks, once all have joined."""
    with call(member, coordinator, "join", own_address) as link:
        try:
            table = receive(link, member.size * _ADDRESS, member.deadline)
        except TimeoutError:
            raise PeerSilent(f"rank {member.rank} has joined, but not all {member.size} ranks have") from None
        except OSError:
            raise PeerDied(0, "the rendezvous") from None
    return [text(table[at : at + _ADDRESS]) for at in range(0, len(table), _ADDRESS)]


def _gather(member: Membership, listener: Listener) -> list[str]:
    """The same for rank 0, which sends them to the others."""
    callers = listener.wait("join", range(1, member.size))
    addresses = [listener.address, *(address for _, address in callers)]
    table = b"".join(address.encode().ljust(_ADDRESS, b"\0") for address in addresses)
    for link, _ in callers:
        with link, contextlib.suppress(OSError):  # one that has died is missed later
            link.sendall(table)
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
        raise ValueError(f"coordinator is {coordinator!r}; it must be an address and a port") from None
    if not any(address in block for block in reachable):
        raise ValueError(
            f"coordinator is {coordinator!r}; it must be on loopback or in the subnet of an emulated network, "
            "so that nobody outside the run can reach it; between machines, WORKSHOP_SUBNET names their private subnet"
        )
    return host, number


def private(subnet: str) -> ipaddress.IPv4Network:
    """`subnet`, such as "10.0.0.0/16", as a network. Raises ValueError if it is not a private one."""
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


def _dial(address: str, member: Membership) -> socket.socket:
    target = endpoint(address, member.reachable)
    while True:
        try:
            link = socket.create_connection(target, max(0.001, member.deadline - time.monotonic()))
            if link.getsockname() != link.getpeername():  # as TCP may connect a socket to itself
                return link
            link.close()
        except OSError as error:
            if error.errno not in _NOT_YET and not isinstance(error, TimeoutError):
                raise CommunicationError(f"cannot connect to {address}: {error.strerror}") from error
        if time.monotonic() > member.deadline:
            raise PeerSilent(f"nobody listens at {address}; has rank 0 been started?")
        time.sleep(0.02)
