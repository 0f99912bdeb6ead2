"""Checks of lesson 04, ring all-reduce; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import CommunicationError, Communicator
from workshop_utils.lessons.checks import NotYet, Wrong, exercise, question


@exercise
def ring_all_reduce(answer: Callable[[Communicator, np.ndarray], None]) -> str:
    """`answer(communicator, array)` replaces `array`, on every rank, by the mean over all ranks, as a ring does."""
    for size, elements in ((4, 4), (2, 2), (3, 3), (4, 10), (3, 7), (1, 5)):
        _RingTrial(answer, size, elements).judge()
    return "with 4 ranks each sent 6 messages of a quarter, 1.5 times the array: that is a ring all-reduce."


@dataclass(frozen=True)
class _Sent:
    to: int
    nbytes: int
    place: int | None  # of its first element in the sender's array; None for a copy


class _RingTrial:
    """One run of a learner's ring on threads. Rank r contributes N · 16^r, so a mean's digits tell who is in it."""

    def __init__(self, answer: Callable[[Communicator, np.ndarray], None], size: int, elements: int) -> None:
        self.size, self.elements = size, elements
        self.arrays = [np.full(elements, float(size * 16**rank)) for rank in range(size)]
        self.before = [array.copy() for array in self.arrays]
        self.sent: list[list[_Sent]] = [[] for _ in range(size)]
        self.sources: list[list[int]] = [[] for _ in range(size)]
        self.failure: CommunicationError | None = None
        try:
            threads.run(size, lambda communicator: self._watched(answer, communicator), timeout_seconds=5.0)
        except CommunicationError as failure:
            self.failure = failure

    def _watched(
        self, answer: Callable[[Communicator, np.ndarray], None], communicator: Communicator
    ) -> None:
        rank, transfer = communicator.rank, communicator._transfer
        array = self.arrays[rank]

        def watch(to: int | None, outgoing: Any, source: int | None, incoming: Any) -> None:
            if to is not None:
                offset = (outgoing.ctypes.data - array.ctypes.data) // array.itemsize
                inside = 0 <= offset < array.size and outgoing.size
                self.sent[rank].append(_Sent(to, outgoing.nbytes, offset if inside else None))
            if source is not None:
                self.sources[rank].append(source)
            transfer(to, outgoing, source, incoming)

        communicator._transfer = watch  # type: ignore[method-assign]
        answer(communicator, array)

    def judge(self) -> None:
        """Raise for the first thing that is wrong, what explains most first."""
        untouched = all(np.array_equal(a, b) for a, b in zip(self.arrays, self.before, strict=True))
        if self.size > 1 and untouched and not any(self.sent) and not any(self.sources):
            raise NotYet("no message was sent: write the function, then run this again.")
        if self.size > 1:
            self._judge_neighbours()
            self._judge_sizes()
            if self.elements == self.size:
                self._judge_chunks()
        if self.failure is not None:
            raise Wrong(f"{self._of}: {self.failure}.")
        if self.size > 1:
            self._judge_count()
            if untouched:
                raise Wrong(
                    f"{self._of}, the array that was handed over is as it was on every rank: change it in place; "
                    "`array = ...` names another one."
                )
        for rank, array in enumerate(self.arrays):
            self._judge_result(rank, array)

    @property
    def _of(self) -> str:
        return f"with {self.size} ranks and {self.elements} elements"

    def _judge_neighbours(self) -> None:
        for rank in range(self.size):
            right, left = (rank + 1) % self.size, (rank - 1) % self.size
            for step, sent in enumerate(self.sent[rank], 1):
                if sent.to != right:
                    raise Wrong(
                        f"wrong neighbour: {self._of}, rank {rank} sends message {step} to rank {sent.to}; "
                        f"in the ring it sends to its right neighbour only, rank {right}."
                    )
            for step, source in enumerate(self.sources[rank], 1):
                if source != left:
                    raise Wrong(
                        f"wrong neighbour: {self._of}, rank {rank} receives message {step} from rank {source}; "
                        f"in the ring it receives from its left neighbour only, rank {left}."
                    )

    def _judge_sizes(self) -> None:
        for rank, messages in enumerate(self.sent):
            for step, sent in enumerate(messages, 1):
                if sent.nbytes >= self.arrays[rank].nbytes:
                    raise Wrong(
                        f"whole tensors sent: {self._of}, message {step} of rank {rank} holds all {self.elements} "
                        f"elements; cut the array into {self.size} chunks and send one a step."
                    )

    def _judge_chunks(self) -> None:
        """With an element a chunk, its place is the chunk's number; any rank may start with any, if all do alike."""
        first = self.sent[0][0].place if self.sent[0] else None
        if first is None:
            return
        for step in range(2 * (self.size - 1)):
            adding = step < self.size - 1
            for rank, messages in enumerate(self.sent):
                if step >= len(messages):
                    continue
                place = messages[step].place
                expected = (first + rank - step) % self.size
                if place is not None and place != expected:
                    why = "what it added to" if 0 < step < self.size else "what it received"
                    because = f"{why} in the step before" if step else "one further than the rank to its left"
                    phase = "reduce-scatter" if adding else "all-gather"
                    number = step + 1 if adding else step - self.size + 2
                    raise Wrong(
                        f"the wrong chunk: {self._of}, in {phase} step {number} rank {rank} sends chunk {place}; "
                        f"it must send chunk {expected}, {because}."
                    )

    def _judge_count(self) -> None:
        steps = 2 * (self.size - 1)
        for rank, messages in enumerate(self.sent):
            if len(messages) != steps:
                raise Wrong(
                    f"{self._of}, rank {rank} sends {len(messages)} messages; it must send {steps}: "
                    f"{self.size - 1} to add up and {self.size - 1} to pass on."
                )

    def _judge_result(self, rank: int, array: np.ndarray) -> None:
        expected = float(sum(16**other for other in range(self.size)))
        for place, value in enumerate(array):
            if math.isclose(value, expected, rel_tol=1e-9):
                continue
            where = f"{self._of}, element {place} of rank {rank}"
            if math.isclose(value, expected * self.size, rel_tol=1e-9):
                raise Wrong(
                    f"never divided: {where} is the sum; the mean is asked for, so divide by {self.size}, "
                    "and in place: `array /= ...`."
                )
            if math.isclose(value, expected / self.size, rel_tol=1e-9):
                raise Wrong(f"divided twice: {where} is the sum / {self.size}²; divide each chunk once.")
            raise Wrong(f"{where} is wrong: {self._who_is_in(value)}")

    def _who_is_in(self, value: float) -> str:
        for divided in (1, self.size):  # by then, or not yet
            units = round(value / (self.size if divided > 1 else 1))
            counts = [units // 16**rank % 16 for rank in range(self.size)]
            if units == sum(count * 16**rank for rank, count in enumerate(counts)):
                missing = [str(rank) for rank, count in enumerate(counts) if count == 0]
                twice = [str(rank) for rank, count in enumerate(counts) if count > 1]
                told = [
                    f"{words} rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
                    for words, ranks in (
                        ("it lacks the contribution of", missing),
                        ("it counts more than once that of", twice),
                    )
                    if ranks
                ]
                if told:
                    return "; ".join(told) + "."
        return f"it is {value:g}."


ring_megabytes = question("ring.ring_megabytes")
ring_messages = question("ring.ring_messages")
central_over_ring = question("ring.central_over_ring")
