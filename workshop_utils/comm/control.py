"""What the transports between processes share: how a failure of one rank becomes known to all.

Beside the links that carry messages, each pair of ranks has a *control* link. Whoever finds that a rank has died, is
silent, or calls another collective, tells all others there, and every rank raises the same error, also ranks that
have nothing to do with the dead one. Control links are looked at when a rank has to wait, and cost nothing otherwise.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import time
from typing import Any, NoReturn

from workshop_utils.comm import frames
from workshop_utils.comm.communicator import (
    _COMBINE,
    Array,
    CommunicationError,
    Communicator,
    FrameError,
    Mismatch,
    Operation,
    PeerDied,
    PeerSilent,
)
from workshop_utils.comm.rendezvous import Links

_ERRORS: list[type[CommunicationError]] = [PeerDied, Mismatch, PeerSilent, FrameError]
_LONGEST_TEXT = 1000  # bytes of an error's message on a control link


class ControlledCommunicator(Communicator):
    """A rank with a control link to every other one."""

    def __init__(self, rank: int, size: int, control: Links, timeout_seconds: float) -> None:
        super().__init__(rank, size, timeout_seconds)
        self._control = control
        self._failure: CommunicationError | None = None
        self._waiting_for: int | None = None  # the last for whom it has waited, so it is true while it waits
        self._answers: dict[int, int] = {}  # rank → for whom it waits, as it has told
        self._ended: set[int] = set()  # ranks whose control link has ended
        self._watch = selectors.DefaultSelector()
        for peer, link in control.items():
            self._watch.register(link, selectors.EVENT_READ, peer)

    def close(self) -> None:
        """Let go of links and memory. Safe to call twice."""
        self._failure = self._failure or CommunicationError(f"rank {self.rank} has closed its communicator")
        for link in self._control.values():
            link.close()
        self._watch.close()
        super().close()

    def abort(self, error: BaseException) -> None:
        """Tell every other rank that this one has failed, and how; each raises the like in what it does next."""
        kind = next((kind for kind in _ERRORS if isinstance(error, kind)), PeerDied)
        dead = error.rank if isinstance(error, PeerDied) else self.rank
        text = str(error).encode()[:_LONGEST_TEXT]
        for peer in self._control:
            self._tell(peer, frames.control(frames.ABORT, dead, _ERRORS.index(kind), len(text)) + text)

    def __exit__(self, *raised: object) -> None:
        error = raised[1]
        if isinstance(error, BaseException) and self._failure is None:
            self.abort(error)
        self.close()

    # For the transports.

    def _fail(self, error: CommunicationError) -> NoReturn:
        """Raise `error` here and on every other rank; this communicator is of no more use."""
        if self._failure is None:
            self._failure = error
            self.abort(error)
        raise self._failure

    def _lost(self, peer: int) -> NoReturn:
        """The link to `peer` has ended: because it has died, or because it has failed and said so before."""
        link = self._control[peer]
        while peer not in self._ended and select.select([link], [], [], 1.0)[0]:
            self._read_control(peer)
        self._heed()
        self._fail(PeerDied(peer, self.collective))

    def _heed(self) -> None:
        """Read what has come on the control links. Raises the error of which one tells."""
        if self._failure is not None:
            raise self._failure
        for key, _ in self._watch.select(0):
            self._read_control(key.data)

    def _read_control(self, peer: int) -> None:
        frame = self._control_bytes(peer, frames.HEADER.size)
        if not frame:
            return
        kind, number, code, nbytes = frames.read_control(frame)
        if kind == frames.ABORT and nbytes <= _LONGEST_TEXT and code < len(_ERRORS):
            text = self._control_bytes(peer, nbytes).decode("utf-8", "replace")
            # Passed on, so that whoever sees this rank leave has read why before.
            self._fail(PeerDied(number, self.collective) if code == 0 else _ERRORS[code](text))
        self._act(peer, kind, number)

    def _act(self, peer: int, kind: int, number: int) -> None:
        """Do what a control frame asks for."""
        if kind == frames.ASK:
            waits_for = self.rank if self._waiting_for is None else self._waiting_for
            self._tell(peer, frames.control(frames.WAITS, waits_for))
        elif kind == frames.WAITS:
            self._answers[peer] = number
        else:
            self._fail(FrameError(f"what rank {self.rank} received from rank {peer} is no control message"))

    def _tell(self, peer: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # who has left need not know
            self._control[peer].sendall(frame)

    def _control_bytes(self, peer: int, nbytes: int) -> bytes:
        """`nbytes` bytes, or none if the link has ended."""
        try:
            data = self._control[peer].recv(nbytes, socket.MSG_WAITALL)
        except ConnectionError:
            data = b""
        return self._whole(peer, data, nbytes)

    def _whole(self, peer: int, data: bytes, nbytes: int) -> bytes:
        if len(data) < nbytes:
            if peer not in self._ended:
                self._ended.add(peer)
                self._watch.unregister(self._control[peer])
            return b""
        return data

    def _silent(self, peers: list[int]) -> NoReturn:
        """Nothing has come from `peers` in time: find out who keeps all waiting, and raise PeerSilent."""
        named = f"rank {peers[0]}" if len(peers) == 1 else f"any of the ranks {peers}"
        where = self.collective or "send or recv"
        text = f"rank {self.rank} waited {self.timeout_seconds:g} s for {named} in {where}"
        chain = [self.rank, peers[0]]
        self._waiting_for = peers[0]
        while len(peers) == 1 and chain[-1] not in chain[:-1]:
            waits_for = self._ask(chain[-1])
            if waits_for in (None, chain[-1]):  # it does not answer, or is just going on
                break
            text += f", which waits for rank {waits_for}"
            chain.append(waits_for)
        if len(chain) > 2:
            circle = chain[-1] in chain[:-1]
            text += "; they wait for each other" if circle else f"; rank {chain[-1]} is silent"
        self._fail(PeerSilent(text))

    def _ask(self, peer: int) -> int | None:
        """For whom `peer` waits; None if it does not answer, since it is not waiting for anybody."""
        self._answers.pop(peer, None)
        self._tell(peer, frames.control(frames.ASK))
        deadline = time.monotonic() + min(1.0, self.timeout_seconds)
        while peer not in self._answers and time.monotonic() < deadline:
            select.select([self._watch], [], [], 0.05)
            self._heed()
        return self._answers.get(peer)

    def _transfer_combine(
        self, to: int | None, outgoing: Array, source: int, accumulator: Array, operation: Operation
    ) -> None:
        if self.trace is not None:  # one after the other, so that the trace shows what is what
            super()._transfer_combine(to, outgoing, source, accumulator, operation)
            return
        self._check(to, source)
        self._exchange(to, outgoing, source, accumulator, _COMBINE[operation])
        self._count(to, outgoing, source, accumulator, 0.0)

    def _exchange(
        self, to: int | None, outgoing: Array, source: int | None, incoming: Array, reduce: Any = None
    ) -> None:
        """As in Communicator; with `reduce`, a ufunc, what comes is combined with `incoming`."""
        raise NotImplementedError
