"""Checks of lesson 04, ring all-reduce; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from workshop_utils.comm import ring as collectives
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.halving_doubling import doubling_all_gather, halving_doubling_all_reduce
from workshop_utils.comm.simulated import Link, Topology, simulate
from workshop_utils.lessons.checks import NotYet, Wrong, exercise, listed, number_of, refuse, refuse_any
from workshop_utils.lessons.checks.open_question import Simulated, measured, runs_of
from workshop_utils.lessons.checks.processes import (
    NETWORK,
    Observed,
    Stuck,
    compare_on_processes,
    on_threads,
    values_on_ranks,
)
from workshop_utils.network import Network

Answer = Callable[[Communicator, np.ndarray], None]

# Of a ring: numbers of ranks and of elements.
TRIALS = ((4, 4), (2, 2), (3, 3), (4, 10), (3, 7), (1, 5), (8, 8), (5, 3), (3, 0), (7, 9), (6, 6), (16, 16))

# Of two levels: numbers of ranks, of those in a machine, and of elements; then such as divide badly.
LEVELS = ((4, 2, 8), (8, 4, 16), (6, 3, 12), (6, 2, 12))
ODD_LEVELS = ((4, 2, 7), (8, 4, 19), (6, 2, 13), (4, 4, 9), (4, 1, 10), (1, 1, 3), (6, 3, 2), (4, 2, 0))
# Of which it may be composed.
PARTS = ("ring_reduce_scatter", "ring_all_reduce", "ring_all_gather", "halving_doubling_all_reduce")

RACKS = "bandwidth=100Mbit,racks=2,spine=100Mbit"  # of the open question


@exercise
def ring_all_reduce(answer: Answer) -> str:
    """`answer(communicator, array)` replaces `array` on every rank by the mean over all ranks, by a ring."""
    for size, elements in TRIALS:
        _judge_ring(answer, size, elements)
    _judge_ring(answer, 5, 7, np.float32)
    times = _times(answer, 2 * 7 / 8)
    long = f"with 8 ranks in simulated time it takes {times:.0f} times as long as a ring's bytes need"
    why = "either not all ranks send at once, as they do in `send_recv`, or the chunks differ in size"
    refuse(times > 3, f"{long}: {why}.")
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
    compare_on_processes(
        answer, lambda each, array, _: doubling_all_gather(each, array), size=4, elements=40_000
    )
    return (
        "with 8 ranks each sent 3 messages, 7/8 of the array in all. On four processes behind links of 100 Mbit/s, "
        "too, values, messages and bytes are right. Halving and doubling together are an all-reduce."
    ) + _remark(_times(answer, 7 / 8))


class _Sent(NamedTuple):
    to: int
    nbytes: int
    place: int | None  # of its first element in the sender's array; None for a copy


class _Trial:
    """What a learner's collective does with the `arrays` of ranks that are threads.

    Attributes:
        case: in words.
        sent: what each rank sent.
        is_unchanged: whether all arrays are as they were.
        stuck: why it did not end, which other mistakes may explain better.
    """

    def __init__(self, answer: Answer, arrays: list[np.ndarray]) -> None:
        size, elements, dtype = len(arrays), arrays[0].size, arrays[0].dtype
        kind = "" if dtype == np.float64 else f" of {dtype}"
        self.case = f"with {size} ranks and {elements} elements{kind}"
        self.sent: list[list[_Sent]] = [[] for _ in arrays]
        self.stuck: Stuck | None = None
        before = [array.copy() for array in arrays]

        def program(communicator: Communicator) -> None:
            array = arrays[communicator.rank]

            def watch(to: int | None, outgoing: Any) -> None:
                if to is not None:
                    offset = (outgoing.ctypes.data - array.ctypes.data) // array.itemsize
                    inside = 0 <= offset < array.size and outgoing.size
                    place = offset if inside else None
                    self.sent[communicator.rank].append(_Sent(to, outgoing.nbytes, place))

            answer(Observed(communicator, watch), array)

        try:
            on_threads(self.case, size, program)
        except Stuck as stuck:
            self.stuck = stuck
        self.is_unchanged = all(map(np.array_equal, arrays, before))
        if elements == size in range(2, 5) and self.is_unchanged and not self.stuck and not any(self.sent):
            raise NotYet("no message was sent: write the function, then run this again.")

    def judge_count(self, messages: int | None, why: str) -> None:
        """Raise Wrong unless it ended, and each rank sent so many messages; None: any number."""
        if self.stuck:
            raise self.stuck
        for rank, sent in enumerate(self.sent):
            sends = f"{self.case}, rank {rank} sends {number_of(len(sent), 'message')}"
            refuse(messages not in (None, len(sent)), f"{sends}; {why}.")

    def judge_bytes(self, nbytes: int, formula: str, why: str) -> None:
        """Raise Wrong unless all ranks together sent so many bytes."""
        total = sum(message.nbytes for sent in self.sent for message in sent)
        sends = f"{self.case}, all ranks together send {total:,} bytes"
        refuse(total != nbytes, f"{sends}; it must be {formula} = {nbytes:,}: {why}.")


def _judge_doubling(answer: Answer, size: int, elements: int, dtype: type = np.float64) -> None:
    """Raise for the first mistake on threads. Block r holds r + 1 on rank r, and -1, which is not ready, elsewhere."""
    complete = np.repeat(np.arange(1.0, size + 1), np.diff(np.arange(size + 1) * elements // size))
    arrays: list[Any] = [np.where(complete == rank + 1, complete, -1.0).astype(dtype) for rank in range(size)]
    trial = _Trial(answer, arrays)
    count, nbytes = (size - 1).bit_length(), (size - 1) * arrays[0].nbytes
    double = f"what a rank has doubles in each step, so {count} are enough"
    # With fewer elements than ranks, messages without contents may be left out.
    trial.judge_count(count if elements >= size else None, double)
    if trial.is_unchanged and min(size - 1, elements):
        raise Wrong(f"{trial.case}, `array` has not changed on any rank: receive into it, not into a copy.")
    for rank, array in enumerate(arrays):
        for place in np.flatnonzero(array != complete)[:1]:
            block, value = int(complete[place]) - 1, array[place]
            held = "a value that was not complete where it came from" if value == -1 else f"{value:g}"
            held = f"what belongs in block {value - 1:g}" if value in range(1, size + 1) else held
            raise Wrong(f"{trial.case}, block {block} of rank {rank} does not hold the result, but {held}.")
    ready = "in step s a rank sends the 2^s blocks that it has, and no others"
    trial.judge_bytes(nbytes, "(N - 1) K", ready)


def _judge_ring(answer: Answer, size: int, elements: int, dtype: type = np.float64) -> None:
    """Raise for the first mistake on threads; those that explain most come first.

    Rank r contributes N · base^r, so a mean's digits name its parts.
    """
    base = 16 if size <= 8 else 2
    units = [base**rank for rank in range(size)]
    arrays: list[np.ndarray] = [np.full(elements, size * unit, dtype) for unit in units]
    trial = _Trial(answer, arrays)
    if size > 1:
        _judge_neighbours(trial, size, arrays[0])
        if elements == size:
            _judge_chunks(trial, size)
        phases = f"it must send {2 * (size - 1)}: {size - 1} to add up and {size - 1} to pass on"
        trial.judge_count(2 * (size - 1) if elements >= size else None, phases)
        if trial.is_unchanged and elements:
            because = "`array = ...` only rebinds the name; change the array in place"
            raise Wrong(f"{trial.case}, `array` has not changed on any rank: {because}.")
        # Over all ranks, a step sends each chunk once, whatever the chunks' sizes.
        chunks = f"cut the array into {size} chunks, without padding"
        trial.judge_bytes(2 * (size - 1) * arrays[0].nbytes, "2 (N - 1) K", chunks)
    elif trial.stuck:
        raise trial.stuck
    for rank, array in enumerate(arrays):
        for place in np.flatnonzero(~np.isclose(array, sum(units), rtol=1e-9, atol=0))[:1]:
            _explain_result(f"{trial.case}, element {place} of rank {rank}", float(array[place]), units)


def _judge_neighbours(trial: _Trial, size: int, array: np.ndarray) -> None:
    for rank, messages in enumerate(trial.sent):
        for number, sent in enumerate(messages, 1):
            of, right = f"{trial.case}, message {number} of rank {rank}", (rank + 1) % size
            slips = {
                f"wrong neighbour: {of} goes to rank {sent.to}; in a ring a rank sends to its right neighbour only, "
                f"here rank {right}.": sent.to != right,
                f"whole tensors sent: {of} holds all {array.size} elements; cut the array into {size} chunks and send "
                "one per step.": array.size >= size and sent.nbytes >= array.nbytes,
            }
            refuse_any("", slips)


def _judge_chunks(trial: _Trial, size: int) -> None:
    """With one element per chunk, its place is the chunk's number.

    Ranks may begin with any chunks, if no two begin with the same; then each passes on what has just come.
    """
    firsts = [messages[0].place if messages else None for messages in trial.sent]
    if firsts[0] is None:
        return
    if {*firsts} != {*range(size)}:
        firsts = [(firsts[0] + rank) % size for rank in range(size)]
    for step, (rank, messages) in itertools.product(range(2 * (size - 1)), enumerate(trial.sent)):
        place = messages[step].place if step < len(messages) else None
        expected = firsts[(rank - step) % size]
        passing_on, number = divmod(step, size - 1)
        sends = f"in {'all-gather' if passing_on else 'reduce-scatter'} step {number + 1} rank {rank} sends"
        right = "which arrived in the step before" if step else "one after its left neighbour's"
        says = (
            f"the wrong chunk: {trial.case}, {sends} chunk {place}; it must send chunk {expected}, {right}."
        )
        refuse(place not in (None, expected), says)


def _explain_result(case: str, value: float, units: list[int]) -> None:
    """Raise Wrong for a `value` that is not the sum of `units`: a rank's array holds its unit N times."""
    size, mean, near = len(units), sum(units), functools.partial(math.isclose, value, rel_tol=1e-9)
    divided = []  # a chunk's sum, begun at some rank, with a division by N in each step of the adding
    for first in range(size):
        # All is divided, what arrives, or the average of two is taken.
        ways = [float(size * units[first])] * 3
        for other in range(first + 1, first + size):
            own = size * units[other % size]
            ways = [(ways[0] + own) / size, ways[1] / size + own, (ways[2] + own) / 2]
        divided += [*ways, *(way / size for way in ways)]
    slips = {
        f"never divided: {case} is the sum; for the mean, divide by {size} in place, with `array /= ...`.": near(
            mean * size
        ),
        f"divided twice: {case} is the sum / {size}²; divide each chunk once.": near(mean / size),
        f"divided in every step: {case} is {value:g}; add up first, then divide once.": any(
            map(near, divided)
        ),
        f"{case} is wrong: {_contributions(value, units)}.": True,
    }
    refuse_any("", slips)


def _contributions(value: float, units: list[int]) -> str:
    """Which ranks' contributions the sum or mean `value` lacks, or includes more than once, in words."""
    size, base = len(units), units[1] if len(units) > 1 else 2
    for total in (round(value), round(value / size)):
        counts = [total // unit % base for unit in units]
        missing = [rank for rank, count in enumerate(counts) if count == 0]
        twice = [rank for rank, count in enumerate(counts) if count > 1]
        if total == sum(map(operator.mul, counts, units)) and (missing or twice):
            lacks = f"it lacks the contribution of rank {listed(missing)}" if missing else ""
            repeats = f"it counts more than once that of rank {listed(twice)}" if twice else ""
            return "; ".join(filter(None, (lacks, repeats)))
    return f"it is {value:g}"


class _Level(NamedTuple):
    """What a rank has after an all-reduce on two levels, and the bytes that it sent to each rank."""

    array: np.ndarray
    sent: list[int]


@exercise
def two_level(answer: Callable[[Communicator, np.ndarray, int], None]) -> str:
    """`answer(communicator, array, group)` replaces `array` by the sum; `group` consecutive ranks share a machine.

    Bytes are least between machines and inside, and every rank sends its share of them.
    """
    for size, group, elements in (*LEVELS, *ODD_LEVELS):
        _judge_levels(answer, size, group, elements)
    _judge_levels(answer, 4, 2, 6, np.float32)
    machine, ones = Link(0.0, 800.0), np.ones(800)
    run = simulate(8, lambda each: answer(each, ones.copy(), 4), Topology(machine, 4, machine))
    times = run.seconds / (2.5 * ones.nbytes / machine.bandwidth_bytes_per_second)
    late = f"with 8 ranks in simulated time it takes {times:.0f} times as long as its bytes need"
    refuse(times > 3, f"{late}: all ranks must send at once, as they do in `send_recv`.")
    where = f"on 4 processes behind links of {NETWORK}/s"
    arguments = {"answer": answer, "per_machine": 2, "elements": 40_000}
    _judge_level(where, values_on_ranks(where, 4, _level, arguments, network=NETWORK), 2)
    return (
        "with 8 ranks in 2 machines each sent a quarter of the array to the other machine, and 1.5 times the array "
        "inside its own. With 4 processes behind links of 100 Mbit/s, too, sums and bytes were right: that is a "
        "hierarchical all-reduce."
    ) + _remark(times)


def _judge_levels(answer: Any, size: int, group: int, elements: int, dtype: type = np.float64) -> None:
    """Raise for the first mistake on threads."""
    kind = "" if dtype == np.float64 else f" of {np.dtype(dtype)}"
    where = f"with {number_of(size, 'rank')}, {group} a machine, and {number_of(elements, 'element')}{kind}"
    program = functools.partial(_level, answer=answer, per_machine=group, elements=elements, dtype=dtype)
    _judge_level(where, on_threads(where, size, program), group)


def _level(
    communicator: Communicator, answer: Any, per_machine: int, elements: int, dtype: type = np.float64
) -> _Level:
    """Rank r contributes 16^r times the place's 1.25, 2.25 ..., so a sum's digits name its parts."""
    array: Any = (16.0**communicator.rank * (np.arange(elements) + 1.25)).astype(dtype)
    observed = Observed(communicator, lambda *_: None, PARTS)
    answer(observed, array, per_machine)
    return _Level(array, observed.traffic.bytes_sent.tolist())


def _judge_level(where: str, outcomes: list[_Level], group: int) -> None:
    size, elements = len(outcomes), outcomes[0].array.size
    units, numbers = [16**rank for rank in range(size)], np.arange(elements) + 1.25
    is_unchanged = all(
        np.array_equal(each.array, unit * numbers) for each, unit in zip(outcomes, units, strict=True)
    )
    if is_unchanged and size > 1 and elements:
        if not any(sum(each.sent) for each in outcomes):
            raise NotYet("no message was sent: write the function, then run this again.")
        raise Wrong(f"{where}, `array` has not changed on any rank: change it in place.")
    right = sum(units) * numbers
    for rank, (array, _) in enumerate(outcomes):
        for place in np.flatnonzero(array != right)[:1]:
            first, value = rank // group * group, float(array[place] / numbers[place])
            machine = range(first, first + group)
            ready = [other for other in machine if outcomes[other].array[place] == right[place]]
            what, others = f"{where}, element {place} of rank {rank}", np.flatnonzero(array[place] == right)
            divisor = next((each for each in range(2, size + 1) if math.isclose(value * each, sum(units))), 0)
            slips = {
                f"{what} is the sum divided by {divisor}; this one is a sum.": divisor,
                f"{what} is what belongs in element {listed(others[:1])}.": others.size,
                f"{what} is wrong: rank {listed(ready[:1])} of its machine has the sum; gather inside.": ready,
            }
            refuse_any("", slips)
            is_whole = 0 < value < 16**size and value == round(value)
            parts = _contributions(value, units) if is_whole else f"it is {array[place]:g}"
            raise Wrong(f"{what} is wrong: {parts}.")
    _judge_shares(where, outcomes, group)


def _judge_shares(where: str, outcomes: list[_Level], group: int) -> None:
    """Raise Wrong where more bytes are sent between machines or inside them than it takes, or a rank sends too many."""
    size, machines, array = len(outcomes), len(outcomes) // group, outcomes[0].array
    inside = [sum(sent[rank // group * group :][:group]) for rank, (_, sent) in enumerate(outcomes)]
    across = [sum(sent) - own for own, (_, sent) in zip(inside, outcomes, strict=True)]
    least = 2 * (machines - 1) * array.nbytes
    sends = f"{where}, all ranks together send {sum(across):,} bytes to other machines"
    advice = "add up inside each machine first, whose ranks are consecutive, then send only that sum across"
    refuse(sum(across) > least, f"{sends}; 2 (m - 1) K = {least:,} are enough: {advice}.")
    busy, power = max(range(size), key=across.__getitem__), 1 << (machines.bit_length() - 1)
    # What `halving_doubling_all_reduce` sends: a ring's bytes, or a few more where m is not a power of two.
    most = (2 + (machines.bit_count() - 3) / power) * array.nbytes / group
    sends = f"{where}, rank {busy} sends {across[busy]:,} bytes to other machines"
    enough = f"2 (m - 1)/m · K/g = {least // size:,} are enough"
    busiest = f"with a card for each rank all wait for the busiest, but each can send 1/{group} of the sum"
    refuse(array.size % size == 0 and across[busy] > most, f"{sends}; {enough}: {busiest}.")
    least = 2 * machines * (group - 1) * array.nbytes
    sends = f"{where}, ranks send {sum(inside):,} bytes inside their machines"
    advice = "a reduce-scatter before and an all-gather after send (g - 1)/g · K each"
    refuse(sum(inside) > least, f"{sends}; 2 (g - 1) K a machine, {least:,} in all, are enough: {advice}.")


@measured
def across_racks(results: Any) -> float:
    """How many times as long as with one switch halving-doubling of 1 MB takes in two racks: medians of the slowest.

    Where this machine cannot make racks, those are simulated.
    """
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for run in runs_of(results, "timed", ranks=8, network=(NETWORK, RACKS)):
        nbytes = run.arguments["nbytes"]
        refuse(nbytes != 1_000_000, f"`nbytes` is {nbytes:,}; it must be 1,000,000.")
        says = "`all_reduce` sends other messages than the workshop's halving-doubling"
        try:
            same = _sent(run.arguments["all_reduce"]) == _sent(halving_doubling_all_reduce)
        except Exception:  # one of a framework, which does not run on our communicators
            same = False
        refuse(not same, f'{says}; give `algorithms["halving-doubling"]`.')
        seconds[run.links.racks if run.links else 1] += np.max(run.values, axis=0).tolist()
    if not seconds[1]:
        raise NotYet(f'`results` has no run at "{NETWORK}", to compare with.')
    if seconds[2]:
        return float(np.median(seconds[2]) / np.median(seconds[1]))
    if Network.parse(RACKS).in_namespaces:
        raise NotYet(f'`results` has no run in two racks, "{RACKS}".')
    link, array = Link(0.0, Network.parse(NETWORK).goodput), np.zeros(250_000, np.float32)
    flat, racks = (
        simulate(8, lambda each: halving_doubling_all_reduce(each, array.copy()), topology).seconds
        for topology in (link, Topology(link, 4, link))
    )
    return Simulated(racks / flat)


def _sent(all_reduce: Any) -> list[list[int]]:
    """The bytes that each of 8 ranks sends to each, in an all-reduce of 64 numbers."""

    def program(communicator: Communicator) -> list[int]:
        all_reduce(communicator, np.ones(64, np.float32))
        return communicator.traffic.bytes_sent.tolist()

    return simulate(8, program).results
