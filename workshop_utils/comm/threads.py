"""Ranks as threads of one process: for tracing, for exercises, and for tests that need no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from workshop_utils.comm.communicator import Array, Communicator, PeerDied, PeerSilent, check_message

Result = TypeVar("Result")


class _Message(NamedTuple):
    source: int
    collective: str
    array: Any  # None: the sender gives up, because rank `dead` has died
    dead: int = -1


@dataclass
class _Room:
    """What ranks share; `changed` is notified of each change.

    Attributes:
        mailboxes: by rank, what was sent to it and not yet received, in the order of arrival.
        running: the ranks whose program goes on.
        waits: by rank that waits, what tells whether it may go on.
        threads: of the process, unless ranks have started some of their own.
    """

    mailboxes: list[list[_Message]]
    running: set[int]
    threads: set[threading.Thread] = field(default_factory=set)
    waits: dict[int, Callable[[], object]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def is_stuck(self) -> bool:
        """Whether all wait, and none can go on."""
        all_wait = self.running <= self.waits.keys() and self.threads.issuperset(threading.enumerate())
        return all_wait and not any(may_go_on() for may_go_on in self.waits.values())


class ThreadCommunicator(Communicator):
    """One rank among threads. `run` makes them; messages are copies, so no rank sees another's later changes."""

    def __init__(self, rank: int, room: _Room, is_buffered: bool, timeout_seconds: float) -> None:
        super().__init__(rank, len(room.mailboxes), timeout_seconds)
        self._room, self._is_buffered = room, is_buffered

    def _first_of(self, sources: Sequence[int]) -> int:
        return self._first(sources, take=False).source

    def _exchange(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        if to is not None:
            sent = _Message(self.rank, self._collective, np.array(outgoing))
            self._put(to, sent)
        if source is not None:
            message = self._first([source], take=True)
            if message.array is None:
                raise PeerDied(message.dead, self._collective or "recv")
            check_message(self, source, message.collective, message.array, incoming)
            incoming[:] = message.array
        if to is not None and not self._is_buffered:
            self._await_receipt(to, sent)

    def _await_receipt(self, to: int, sent: _Message) -> None:
        """Return once rank `to` has received the message `sent`, or has given up."""

        def is_received() -> bool:
            mailbox, theirs = self._room.mailboxes[self.rank], self._room.mailboxes[to]
            gone = any(message.source == to and message.array is None for message in mailbox)
            return gone or not any(message is sent for message in theirs)

        with self._room.changed:
            self._await(is_received, f"rank {to} to receive what it sent")

    def _put(self, to: int, message: _Message) -> None:
        with self._room.changed:
            self._room.mailboxes[to].append(message)
            self._room.changed.notify_all()

    def _first(self, sources: Sequence[int], take: bool) -> _Message:
        mailbox = self._room.mailboxes[self.rank]

        def first() -> _Message | None:
            return next((message for message in mailbox if message.source in sources), None)

        with self._room.changed:
            of = f"rank {sources[0]}" if len(sources) == 1 else f"any of the ranks {list(sources)}"
            message = self._await(first, f"{of} in {self._collective or 'recv'}")
            if take:
                mailbox[:] = [other for other in mailbox if other is not message]
                self._room.changed.notify_all()  # for a sender that waits until it is received
            return message

    def _await(self, may_go_on: Callable[[], Result | None], what: str) -> Result:
        """Return what `may_go_on` gives once that is true; raise PeerSilent once nobody goes on, or after a time."""
        room = self._room
        room.waits[self.rank] = may_go_on
        room.changed.wait_for(lambda: may_go_on() or room.is_stuck(), self.timeout_seconds)
        is_stuck = room.is_stuck()
        room.waits.pop(self.rank, None)  # none if another thread of this rank waited, too
        if result := may_go_on():
            return result
        waits = "waits for ever" if is_stuck else f"waited {self.timeout_seconds:g} s"
        raise PeerSilent(f"rank {self.rank} {waits} for {what}")


def run(
    size: int,
    program: Callable[[Communicator], Result],
    timeout_seconds: float = 30.0,
    is_buffered: bool = True,
) -> list[Result]:
    """Run `program(communicator)` on `size` threads at once and return what each rank returned.

    Unless `is_buffered`, a send returns only once its message is received. Between processes it may, too, where the
    message is larger than the buffers on its way.

    Raises:
        Exception: the first failure of any rank, as raised there, once all ranks have ended.
    """
    ranks = range(size)
    room = _Room([[] for _ in ranks], {*ranks})
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        communicator = ThreadCommunicator(rank, room, is_buffered, timeout_seconds)
        try:
            results[rank] = program(communicator)
        except BaseException as failure:
            failures.append(failure)
            dead = failure.rank if isinstance(failure, PeerDied) else rank
            for other in {*ranks} - {rank}:
                communicator._put(other, _Message(rank, communicator._collective, None, dead))
        with room.changed:
            room.running.discard(rank)
            room.changed.notify_all()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in ranks]
    room.threads.update(threading.enumerate(), threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
