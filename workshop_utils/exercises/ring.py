"""Checks of lesson 04, ring all-reduce; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import CommunicationError, Communicator
from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.exercises import (
    NotYet,
    Wrong,
    exercise,
    number,
)


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
            threads.run(size, lambda communicator: self._watched(answer, communicator), timeout_seconds=1.0)
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


ring_megabytes = number(
    ring_bytes_sent(8, 400_000_000) / 1e6,
    "MB",
    "2 · 7/8 times 400 MB: each of 14 messages holds an eighth",
    {
        350: "that is the reduce-scatter alone; the all-gather sends as much again",
        800: "that is the bound, 2 K; with 8 workers a rank sends 2 · 7/8 K",
        400: "that is the array once; a rank sends 7 eighths of it to add up, and 7 to pass on",
        5600: "that is what all 8 workers send together",
        50: "that is one message, an eighth of the array; how many does a rank send?",
        100: "those are two messages; a rank sends 7 in each of two phases",
        1400: "a message has an eighth of the array, and each rank sends 14, not 28",
        2800: "that is a parameter server's link, 7 gradients of 400 MB; in a ring each message is an eighth",
    },
)
ring_messages = number(
    2 * (1000 - 1),
    "messages",
    "999 to add up and 999 to pass on, each of 0.4 MB: the bytes are bounded, the messages are not",
    {
        999: "that is one of the two phases: the sums have to be passed on, too",
        2000: "a rank sends N − 1 in each phase, not N: it need not send to itself",
        2: "one for each phase it would be if chunks did not travel on, rank by rank",
        20: "those are a tree's steps, 2 log₂ N; a ring has 2 (N − 1)",
        14: "that is with 8 workers",
    },
)
central_over_ring = number(
    8,
    "times",
    "2(N − 1) K/B through the root's link, against 2(N − 1)/N · K/B through every link at once",
    {
        7: "compare like with like: 2(N − 1) K/B with a central rank, 2(N − 1)/N · K/B in the ring",
        4: "a central rank first takes in all gradients and then answers all: both ways count, as both phases do",
        14: "those are the times that K passes the central link, 2(N − 1); divide by those of the ring, 2(N − 1)/N",
        16: "the central rank sends nothing to itself: 2(N − 1), not 2 N",
        1.75: "that is the ring's part, 2 · 7/8; the central rank's is 2 · 7",
        0.125: "that is the other way round",
    },
)
