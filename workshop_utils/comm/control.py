"""How all ranks learn that one has failed.

Beside the link that carries messages, each pair of ranks has a *control* link. A rank that finds another one dead,
silent or in another collective reports it there to all others, and every rank raises the same error, even if it never
talks to the failed one. A rank listens to its control links while it waits; otherwise they cost nothing.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from typing import NoReturn

from workshop_utils.comm import communicator as errors
from workshop_utils.comm.communicator import CommunicationError, Communicator, PeerDied, PeerLeft, PeerSilent
from workshop_utils.comm.rendezvous import Sockets

_ERRORS: list[type[CommunicationError]] = [PeerDied, errors.Mismatch, PeerSilent, errors.FrameError, PeerLeft]
_FRAME = struct.Struct("<4sIBH")  # kind, number, code, bytes of text that follow
_ASK, _WAITS, _ABORT, _LEAVE = b"ask?", b"wait", b"fail", b"done"


class ControlLinks:
    """The control links of one rank, by peer, and what they have told it.

    Attributes:
        failure: the error that has ended the run for this rank; None while all is well.
        waiting_for: the rank that this one waited for last; other ranks may ask.
    """

    def __init__(self, communicator: Communicator, links: Sockets) -> None:
        self._communicator, self._links = communicator, links
        self._rank = communicator.rank
        self.failure: CommunicationError | None = None
        self.waiting_for = self._rank
        self._answers: dict[int, int] = {}  # rank → the rank that it says it waits for
        self._ended: set[int] = set()  # ranks whose link has ended
        self._left: set[int] = set()  # those of them that were done
        self._watch = selectors.DefaultSelector()
        for peer, link in links.items():
            self._watch.register(link, selectors.EVENT_READ, peer)

    def fileno(self) -> int:
        """Readable when `heed` has something to do."""
        return self._watch.fileno()

    def close(self) -> None:
        """Close the links. Safe to call twice."""
        self.failure = self.failure or CommunicationError(f"rank {self._rank} has closed its communicator")
        for link in self._links.values():
            link.close()
        self._watch.close()

    def abort(self, error: BaseException) -> None:
        """Tell every other rank that this one has failed, and why."""
        kind = next((kind for kind in _ERRORS if type(error) is kind), PeerDied)
        dead = error.rank if isinstance(error, PeerDied) else self._rank
        text = (error.where if isinstance(error, PeerLeft) else str(error)).encode()[:1000]
        for peer in self._links:
            self._tell(peer, _ABORT, dead, _ERRORS.index(kind), text)

    def leave(self) -> None:
        """Tell every other rank that this one is done."""
        for peer in self._links:
            self._tell(peer, _LEAVE)

    def has_left(self, peer: int) -> bool:
        """Whether `peer`, whose link has ended, was done. Raises the error that it has reported before."""
        self.raise_failure()
        link = self._links[peer]
        while peer not in self._ended and select.select([link], [], [], 1.0)[0]:
            self._read(peer)
        self.heed()
        return peer in self._left

    def fail(self, error: CommunicationError) -> NoReturn:
        """Raise `error` here and on every other rank; this communicator cannot be used any more."""
        if self.failure is None:
            self.failure = error
            self.abort(error)
        raise self.failure

    def raise_failure(self) -> None:
        """Raise the failure, if there has been one."""
        if self.failure is not None:
            raise self.failure

    def heed(self) -> None:
        """Read what has arrived. Raises the error that another rank has reported."""
        self.raise_failure()
        for key, _ in self._watch.select(0):
            self._read(key.data)

    def lost(self, peer: int, is_alone: bool) -> NoReturn:
        """The link to `peer` has ended: it has died, or it has failed and reported why before.

        `is_alone`: this rank exchanges nothing with another one at the same time.
        """
        has_left, where = self.has_left(peer), self._communicator._collective
        if is_alone and not has_left and peer in self._communicator.may_die:
            raise PeerDied(peer, where)
        self.fail((PeerLeft if has_left else PeerDied)(peer, where))

    def silent(self, peers: Sequence[int]) -> NoReturn:
        """`peers` have sent nothing in time: find out which rank holds everyone up, and raise PeerSilent."""
        seconds, where = self._communicator.timeout_seconds, self._communicator._collective or "send or recv"
        named = f"rank {peers[0]}" if len(peers) == 1 else f"any of the ranks {list(peers)}"
        text = f"rank {self._rank} waited {seconds:g} s for {named} in {where}"
        chain = [self._rank, peers[0]]
        while len(peers) == 1 and chain[-1] not in chain[:-1]:
            waits_for = self._ask(chain[-1], min(1.0, seconds))
            if waits_for in (None, chain[-1]):  # it does not answer, or has just moved on
                break
            text += f", which waits for rank {waits_for}"
            chain.append(waits_for)
        if len(chain) > 2:
            circle = chain[-1] in chain[:-1]
            text += "; they wait for each other" if circle else f"; rank {chain[-1]} is silent"
        self.fail(PeerSilent(text))

    def _ask(self, peer: int, seconds: float) -> int | None:
        """The rank that `peer` waits for; None if it does not answer, because it is not waiting."""
        self._answers.pop(peer, None)
        self._tell(peer, _ASK)
        deadline = time.monotonic() + seconds
        while peer not in self._answers and time.monotonic() < deadline:
            select.select([self._watch], [], [], 0.05)
            self.heed()
        return self._answers.get(peer)

    def _read(self, peer: int) -> None:
        """Read a frame from `peer`, and do what it says."""
        frame = self._receive(peer, _FRAME.size)
        if not frame:
            return
        kind, number, code, nbytes = _FRAME.unpack(frame)
        if kind == _ASK:
            self._tell(peer, _WAITS, self.waiting_for)
        elif kind == _WAITS:
            self._answers[peer] = number
        elif kind == _ABORT and code < len(_ERRORS):
            text = self._receive(peer, nbytes).decode("utf-8", "replace")
            # Passed on, so that a rank that sees this one leave already knows why.
            where, kind_of_error = self._communicator._collective, _ERRORS[code]
            if issubclass(kind_of_error, PeerDied):
                self.fail(kind_of_error(number, text if kind_of_error is PeerLeft else where))
            self.fail(kind_of_error(text))
        elif kind == _LEAVE:
            self._left.add(peer)
        else:
            self.fail(errors.FrameError(f"rank {self._rank} received no control message from rank {peer}"))

    def _tell(self, peer: int, kind: bytes, number: int = 0, code: int = 0, text: bytes = b"") -> None:
        with contextlib.suppress(OSError):  # a rank that has left needs no news
            self._links[peer].sendall(_FRAME.pack(kind, number, code, len(text)) + text)

    def _receive(self, peer: int, nbytes: int) -> bytes:
        """`nbytes` bytes, or none if the link has ended."""
        try:
            received = self._links[peer].recv(nbytes, socket.MSG_WAITALL)
        except ConnectionError:
            received = b""
        if len(received) == nbytes:
            return received
        if peer not in self._ended:
            self._ended.add(peer)
            self._watch.unregister(self._links[peer])
        return b""
