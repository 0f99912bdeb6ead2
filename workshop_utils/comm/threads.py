"""Ranks as threads of one process: for tracing, for exercises, and for tests that need no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from workshop_utils.comm.communicator import Array, Communicator, PeerDied, PeerSilent, check_message

Result = TypeVar("Result")


class _Message(NamedTuple):
    source: int
    collective: str
    array: Any  # None: the sender gives up, because rank `dead` has died
    dead: int = -1


class ThreadCommunicator(Communicator):
    """One rank among threads. `run` makes them; messages are copies, so no rank sees another's later changes.

    `mailboxes` hold by rank what was sent to it and not yet received, in the order of arrival.
    """

    def __init__(
        self,
        rank: int,
        mailboxes: Sequence[list[_Message]],
        arrived: threading.Condition,
        is_buffered: bool,
        timeout_seconds: float,
    ) -> None:
        super().__init__(rank, len(mailboxes), timeout_seconds)
        self._mailboxes, self._arrived, self._is_buffered = mailboxes, arrived, is_buffered

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
            mailbox, theirs = self._mailboxes[self.rank], self._mailboxes[to]
            gone = any(message.source == to and message.array is None for message in mailbox)
            return gone or not any(message is sent for message in theirs)

        with self._arrived:
            if not self._arrived.wait_for(is_received, timeout=self.timeout_seconds):
                waited = f"rank {self.rank} waited {self.timeout_seconds:g} s"
                raise PeerSilent(f"{waited} for rank {to} to receive what it sent")

    def _put(self, to: int, message: _Message) -> None:
        with self._arrived:
            self._mailboxes[to].append(message)
            self._arrived.notify_all()

    def _first(self, sources: Sequence[int], take: bool) -> _Message:
        mailbox = self._mailboxes[self.rank]

        def first() -> _Message | None:
            return next((message for message in mailbox if message.source in sources), None)

        with self._arrived:
            message = self._arrived.wait_for(first, timeout=self.timeout_seconds)
            if message is None:
                silent = f"rank {sources[0]}" if len(sources) == 1 else f"any of the ranks {list(sources)}"
                waited = f"rank {self.rank} waited {self.timeout_seconds:g} s"
                raise PeerSilent(f"{waited} for {silent} in {self._collective or 'recv'}")
            if take:
                mailbox[:] = [other for other in mailbox if other is not message]
                self._arrived.notify_all()  # for a sender that waits until it is received
            return message


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
    mailboxes: list[list[_Message]] = [[] for _ in range(size)]
    arrived = threading.Condition()
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        communicator = ThreadCommunicator(rank, mailboxes, arrived, is_buffered, timeout_seconds)
        try:
            results[rank] = program(communicator)
        except BaseException as failure:
            failures.append(failure)
            dead = failure.rank if isinstance(failure, PeerDied) else rank
            for other in {*range(size)} - {rank}:
                communicator._put(other, _Message(rank, communicator._collective, None, dead))

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
