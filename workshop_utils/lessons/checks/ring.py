"""Checks of lesson 04, ring all-reduce; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from workshop_utils.comm import ring as collectives
from workshop_utils.comm import threads
from workshop_utils.comm.communicator import CommunicationError, Communicator
from workshop_utils.comm.simulated import Link, simulate
from workshop_utils.lessons.checks import NotYet, Wrong, exercise
from workshop_utils.lessons.checks.open_question import question
from workshop_utils.lessons.checks.processes import compare_on_processes, refuse_collectives

BLOCKED = (
    ": if all ranks send first, all may wait for each other to receive. A send returns at once only as long as its "
    "message fits into the buffers on its way; `send_recv` sends and receives at once"
)

Answer = Callable[[Communicator, np.ndarray], None]

# Of a ring: numbers of ranks and of elements.
TRIALS = ((4, 4), (2, 2), (3, 3), (4, 10), (3, 7), (1, 5), (8, 8), (5, 3), (3, 0), (7, 9), (6, 6), (16, 16))


@exercise
def ring_all_reduce(answer: Answer) -> str:
    """`answer(communicator, array)` replaces `array` on every rank by the mean over all ranks, by a ring."""
    for size, elements in TRIALS:
        _RingTrial(answer, size, elements).judge()
    _RingTrial(answer, 5, 7, np.float32).judge()
    times = _times(answer, 2 * 7 / 8)
    if times > 3:
        raise Wrong(
            f"with 8 ranks in simulated time it takes {times:.0f} times as long as a ring's bytes need: either not all "
            "ranks send at once, as they do in `send_recv`, or the chunks differ in size."
        )
    compare_on_processes(answer, collectives.ring_all_reduce, size=4, elements=40_000)
    return (
        "with 4 ranks each sent 6 messages of a quarter, 1.5 times the array. On four processes behind links of "
        "100 Mbit/s, too, its values, messages and bytes were those of the workshop's own: that is a ring all-reduce."
    ) + _remark(times)


def _times(answer: Answer, share: float) -> float:
    """How many times as long as sending the `share` of an array takes 8 ranks in simulated time."""
    array, link = np.ones(800), Link(0.0, 800.0)
    run = simulate(8, lambda communicator: answer(communicator, array.copy()), link)
    return run.seconds / (share * array.nbytes / link.bandwidth_bytes_per_second)


def _remark(times: float) -> str:
    if times < 1.1:
        return ""
    return f" (In simulated time 8 ranks take {times:.1f} times as long as if each sent all the time.)"


@exercise
def doubling(answer: Answer) -> str:
    """`answer(communicator, array)` gives every rank all blocks in log₂ N steps, where rank r starts with block r."""
    for size, elements in ((2, 2), (4, 4), (8, 8), (8, 19), (1, 3), (16, 16), (4, 3), (2, 0)):
        _judge_doubling(answer, size, elements)
    _judge_doubling(answer, 4, 6, np.float32)
    compare_on_processes(answer, _doubling, size=4, elements=40_000)
    return (
        "with 8 ranks each sent 3 messages, 7/8 of the array in all. On four processes behind links of 100 Mbit/s, "
        "too, values, messages and bytes are right. Halving and doubling together are an all-reduce."
    ) + _remark(_times(answer, 7 / 8))


def _doubling(communicator: Communicator, array: np.ndarray, *_: object) -> None:
    rank, size, distance = communicator.rank, communicator.size, 1
    while distance < size:
        first = rank // distance * distance
        mine, theirs = (
            array[start * array.size // size : (start + distance) * array.size // size]
            for start in (first, first ^ distance)
        )
        communicator.send_recv(rank ^ distance, mine, rank ^ distance, theirs)
        distance *= 2


def _judge_doubling(answer: Answer, size: int, elements: int, dtype: type = np.float64) -> None:
    """Raise for the first mistake on threads. Block r holds r + 1 on rank r, and -1, which is not ready, elsewhere."""
    case, steps = _case(size, elements, dtype), (size - 1).bit_length()
    complete = np.repeat(np.arange(1.0, size + 1), np.diff(np.arange(size + 1) * elements // size))
    arrays: list[np.ndarray] = [
        np.where(complete == rank + 1, complete, -1.0).astype(dtype) for rank in range(size)
    ]
    before = [array.copy() for array in arrays]
    sent: list[list[int]] = [[] for _ in range(size)]

    def program(communicator: Communicator) -> None:
        def watch(to: int | None, outgoing: Any) -> None:
            refuse_collectives(communicator)
            if to is not None:
                sent[communicator.rank].append(outgoing.nbytes)

        communicator.watch = watch
        answer(communicator, arrays[communicator.rank])

    try:
        threads.run(size, program, 5.0, is_buffered=False)
    except CommunicationError as failure:
        blocked = "" if "to receive what it sent" not in str(failure) else BLOCKED
        raise Wrong(f"{case}: {failure}{blocked}.") from None
    if size > 1 and not any(sent):
        raise NotYet("no message was sent: write the function, then run this again.")
    for rank, sizes in enumerate(sent):
        if elements >= size and len(sizes) != steps:  # with fewer, messages without contents may be left out
            double = f"what a rank has doubles in each step, so {steps} are enough"
            raise Wrong(f"{case}, rank {rank} sends {len(sizes)} messages; {double}.")
    if all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True)) and min(size - 1, elements):
        raise Wrong(f"{case}, `array` has not changed on any rank: receive into it, not into a copy.")
    for rank, array in enumerate(arrays):
        for place in np.flatnonzero(array != complete):
            block = int(complete[place]) - 1
            value = array[place]
            held = "a value that was not complete where it came from" if value == -1 else f"{value:g}"
            if value in range(1, size + 1):
                held = f"what belongs in block {int(value) - 1}"
            raise Wrong(f"{case}, block {block} of rank {rank} does not hold the result, but {held}.")
    total, right = sum(map(sum, sent)), (size - 1) * arrays[0].nbytes
    if total != right:
        ready = "in step s a rank sends the 2^s blocks that it has, and no others"
        raise Wrong(
            f"{case}, all ranks together send {total:,} bytes; it must be (N - 1) K = {right:,}: {ready}."
        )


across_racks = question(__name__, "across_racks")


def _case(size: int, elements: int, dtype: type) -> str:
    kind = "" if dtype is np.float64 else f" of {dtype.__name__}"
    return f"with {size} ranks and {elements} elements{kind}"


class _Sent(NamedTuple):
    to: int
    nbytes: int
    place: int | None  # of its first element in the sender's array; None for a copy


class _RingTrial:
    """One run of a learner's ring on threads. Rank r contributes N · base^r, so a mean's digits name its parts."""

    def __init__(self, answer: Answer, size: int, elements: int, dtype: type = np.float64) -> None:
        self.size, self.elements, self.base = size, elements, 16 if size <= 8 else 2
        self.case = _case(size, elements, dtype)
        self.units = [self.base**rank for rank in range(size)]
        self.arrays: list[np.ndarray] = [np.full(elements, size * unit, dtype) for unit in self.units]
        self.before = [array.copy() for array in self.arrays]
        self.sent: list[list[_Sent]] = [[] for _ in range(size)]
        self.failure: CommunicationError | None = None
        try:
            threads.run(size, functools.partial(self._watched, answer), 5.0, is_buffered=False)
        except CommunicationError as failure:
            self.failure = failure

    def _watched(self, answer: Answer, communicator: Communicator) -> None:
        rank = communicator.rank
        array = self.arrays[rank]

        def watch(to: int | None, outgoing: Any) -> None:
            refuse_collectives(communicator)
            if to is not None:
                offset = (outgoing.ctypes.data - array.ctypes.data) // array.itemsize
                inside = 0 <= offset < array.size and outgoing.size
                self.sent[rank].append(_Sent(to, outgoing.nbytes, offset if inside else None))

        communicator.watch = watch
        answer(communicator, array)

    def judge(self) -> None:
        """Raise for the first mistake; those that explain most come first."""
        untouched = all(np.array_equal(a, b) for a, b in zip(self.arrays, self.before, strict=True))
        if self.size > 1:
            is_first = (self.size, self.elements) == TRIALS[0]
            if is_first and untouched and not any(self.sent) and self.failure is None:
                raise NotYet("no message was sent: write the function, then run this again.")
            self._judge_messages()
            if self.elements == self.size:
                self._judge_chunks()
        if self.failure is not None:
            blocked = "" if "to receive what it sent" not in str(self.failure) else BLOCKED
            raise Wrong(f"{self.case}: {self.failure}{blocked}.")
        if self.size > 1:
            if self.elements >= self.size:  # with fewer, messages without contents may be left out
                self._judge_count()
            if untouched and self.elements:
                because = "`array = ...` only rebinds the name; change the array in place"
                raise Wrong(f"{self.case}, `array` has not changed on any rank: {because}.")
            self._judge_bytes()
        for rank, array in enumerate(self.arrays):
            self._judge_result(rank, array)

    def _judge_messages(self) -> None:
        for rank, messages in enumerate(self.sent):
            right = (rank + 1) % self.size
            for number, sent in enumerate(messages, 1):
                of = f"{self.case}, message {number} of rank {rank}"
                if sent.to != right:
                    only = f"in a ring a rank sends to its right neighbour only, here rank {right}"
                    raise Wrong(f"wrong neighbour: {of} goes to rank {sent.to}; {only}.")
                if self.elements >= self.size and sent.nbytes >= self.arrays[rank].nbytes:
                    chunks = f"cut the array into {self.size} chunks and send one per step"
                    raise Wrong(f"whole tensors sent: {of} holds all {self.elements} elements; {chunks}.")

    def _judge_chunks(self) -> None:
        """With one element per chunk, its place is the chunk's number.

        Ranks may begin with any chunks, if no two begin with the same; then each passes on what has just come.
        """
        firsts = [messages[0].place if messages else None for messages in self.sent]
        if firsts[0] is None:
            return
        if set(firsts) != set(range(self.size)):
            firsts = [(firsts[0] + rank) % self.size for rank in range(self.size)]
        for step in range(2 * (self.size - 1)):
            for rank, messages in enumerate(self.sent):
                place = messages[step].place if step < len(messages) else None
                expected = firsts[(rank - step) % self.size]
                if place is not None and place != expected:
                    passing_on, number = divmod(step, self.size - 1)
                    phase = f"{'all-gather' if passing_on else 'reduce-scatter'} step {number + 1}"
                    right = f"chunk {expected}, "
                    right += "which arrived in the step before" if step else "one after its left neighbour's"
                    sends = f"in {phase} rank {rank} sends chunk {place}"
                    raise Wrong(f"the wrong chunk: {self.case}, {sends}; it must send {right}.")

    def _judge_count(self) -> None:
        steps = 2 * (self.size - 1)
        for rank, messages in enumerate(self.sent):
            if len(messages) != steps:
                phases = f"{self.size - 1} to add up and {self.size - 1} to pass on"
                of = f"{self.case}, rank {rank} sends {len(messages)} messages"
                raise Wrong(f"{of}; it must send {steps}: {phases}.")

    def _judge_bytes(self) -> None:
        """Over all ranks, a step sends each chunk once, whatever the chunks' sizes: 2 (N - 1) K in all."""
        sent = sum(message.nbytes for messages in self.sent for message in messages)
        expected = 2 * (self.size - 1) * self.arrays[0].nbytes
        if sent != expected:
            of = f"{self.case}, all ranks together send {sent:,} bytes"
            chunks = f"cut the array into {self.size} chunks, without padding"
            raise Wrong(f"{of}; it must be 2 (N - 1) K = {expected:,}: {chunks}.")

    def _judge_result(self, rank: int, array: np.ndarray) -> None:
        mean = float(sum(self.units))
        for place, value in enumerate(array):
            case = f"{self.case}, element {place} of rank {rank}"
            if math.isclose(value, mean, rel_tol=1e-9):
                continue
            if math.isclose(value, mean * self.size, rel_tol=1e-9):
                mean_of = f"for the mean, divide by {self.size} in place, with `array /= ...`"
                raise Wrong(f"never divided: {case} is the sum; {mean_of}.")
            if math.isclose(value, mean / self.size, rel_tol=1e-9):
                raise Wrong(f"divided twice: {case} is the sum / {self.size}²; divide each chunk once.")
            if self._is_divided_on_the_way(value):
                raise Wrong(f"divided in every step: {case} is {value:g}; add up first, then divide once.")
            raise Wrong(f"{case} is wrong: {self._contributions(value)}.")

    def _is_divided_on_the_way(self, value: float) -> bool:
        """Whether `value` is a chunk's sum, begun at some rank, with a division by N in each step of the adding."""
        for first in range(self.size):
            # All is divided, what arrives, or the average of two is taken.
            ways = [float(self.size * self.units[first])] * 3
            for other in range(first + 1, first + self.size):
                own = self.size * self.units[other % self.size]
                ways = [(ways[0] + own) / self.size, ways[1] / self.size + own, (ways[2] + own) / 2]
            if any(math.isclose(value, way / last, rel_tol=1e-9) for way in ways for last in (1, self.size)):
                return True
        return False

    def _contributions(self, value: float) -> str:
        """Which ranks' contributions the sum or mean `value` lacks, or includes more than once, in words."""
        for total in (round(value), round(value / self.size)):
            counts = [total // unit % self.base for unit in self.units]
            missing = [str(rank) for rank, count in enumerate(counts) if count == 0]
            twice = [str(rank) for rank, count in enumerate(counts) if count > 1]
            is_sum = total == sum(count * unit for count, unit in zip(counts, self.units, strict=True))
            if is_sum and (missing or twice):
                lacks = f"it lacks the contribution of rank {', '.join(missing)}" if missing else ""
                repeats = f"it counts more than once that of rank {', '.join(twice)}" if twice else ""
                return "; ".join(filter(None, (lacks, repeats)))
        return f"it is {value:g}"
