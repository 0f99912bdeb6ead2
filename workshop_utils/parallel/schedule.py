"""Pipeline schedules as data: which pass each rank runs after which.

A model is cut into *stages*, one after the other, and a batch into *microbatches*. Stage s is on rank s mod p, so with
p ranks and one *chunk* a rank there are p stages, with v chunks v · p; in a V, stages go down the ranks and back up. A
pass is one microbatch, forward or backward, through one stage. Some schedules split the backward pass: "backward" is
then the gradient of the stage's input, for which another rank waits, and "weight" that of its weights, for which none
does. A schedule is no more than the order of passes on every rank:

    schedule = one_f_one_b(ranks=4, microbatches=8)
    print(timetable(schedule))                    # the schedule as text
    bubble(predict(schedule, 1.0, 2.0))           # the share of time in which ranks wait: 3/11

| schedule | from | idle share | activations held, in microbatches |
| --- | --- | --- | --- |
| `naive` | | (p − 1)/p | 1 |
| `gpipe` | Huang et al. (2019), without their recomputation | (p − 1)/(m + p − 1) | m |
| `one_f_one_b` | PipeDream-Flush, Narayanan et al. (2021a) | (p − 1)/(m + p − 1) | p − rank, at most m |
| `interleaved` | Narayanan et al. (2021b), section 2.2 | (p − 1)/(v · m + p − 1) | up to p (1 + (p − 1)/(p · v)) |
| `zb_h1` | Qi et al. (2023), section 2.1 | (p − 1)/(3 m + p − 1), from m = p on | at most min(p, m) |
| `zbv` | Qi et al. (2023), section 6 | (p − 1)/(6 m + p − 1), from m = 2 p − 1 on | at most min(p, m) |

The last two split the backward pass. Their shares are those of three passes that take equally long; they hold a
microbatch until its weight pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from typing import Literal, NamedTuple, get_args

Kind = Literal["forward", "backward", "weight"]
Ahead = Callable[[int], int]  # by rank, how many forward passes it runs before its first backward pass


class ScheduleError(ValueError):
    """A schedule that cannot be: passes are missing, or wait for each other; the message names one."""


class Pass(NamedTuple):
    """One microbatch through one stage, forward or backward, or the second part of backward: the weights' gradients."""

    kind: Kind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The order of passes on every rank: `passes[rank]`.

    Args:
        is_v: whether stage p is on the rank of stage p − 1, and the following ones go back up to rank 0.

    Raises:
        ScheduleError: if a rank lacks a pass of one of its stages, has it twice, has one of another rank, or goes
            backward before forward, or computes weights' gradients before backward.
    """

    name: str
    passes: tuple[tuple[Pass, ...], ...]
    microbatches: int
    chunks: int = 1
    is_v: bool = False

    def __post_init__(self) -> None:
        before: dict[Kind, Kind] = {"backward": "forward"}
        if self.is_split:
            before["weight"] = "backward"
        for rank, passes in enumerate(self.passes):
            due = {
                Pass(kind, microbatch, stage)
                for kind in ("forward", *before)
                for microbatch in range(self.microbatches)
                for stage in self.stages_of(rank)
            }
            wrong = due.symmetric_difference(passes) or {
                each for each, count in Counter(passes).items() if count > 1
            }
            if wrong:
                kind, microbatch, stage = min(wrong)
                of = f"schedule {self.name!r}: rank {rank} must run every pass of its stages exactly once"
                raise ScheduleError(f"{of}; look at {kind} of microbatch {microbatch} through stage {stage}")
            done: set[Pass] = set()
            for each in passes:
                done.add(each)
                first = before.get(each.kind)
                if first and each._replace(kind=first) not in done:
                    early = f"{each.kind} of microbatch {each.microbatch} through stage {each.stage}"
                    of = f"schedule {self.name!r}: rank {rank}"
                    raise ScheduleError(f"{of} runs {early} before its {first}")

    @property
    def is_split(self) -> bool:
        """Whether backward passes are split: gradients of weights have passes of their own."""
        return any(each.kind == "weight" for passes in self.passes for each in passes)

    @property
    def ranks(self) -> int:
        """p, the number of ranks."""
        return len(self.passes)

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Where `stage` lies."""
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.is_v and chunk % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages on `rank`."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def source(self, each: Pass) -> Pass | None:
        """The pass of another stage whose result is the input of `each`.

        None for the first stage's forward, the last's backward, and every weight pass.
        """
        return self._neighbour(each, -1)

    def consumer(self, each: Pass) -> Pass | None:
        """The pass whose input is the result of `each`."""
        return self._neighbour(each, 1)

    def _neighbour(self, each: Pass, step: int) -> Pass | None:
        stage = each.stage + (step if each.kind == "forward" else -step)
        is_there = each.kind != "weight" and 0 <= stage < self.stages
        return each._replace(stage=stage) if is_there else None


class Timed(NamedTuple):
    """One pass as it was predicted, or measured, in seconds of one clock: processes of a machine share theirs."""

    rank: int
    each: Pass
    start: float
    end: float


Timeline = Sequence[Timed]


def naive(ranks: int, microbatches: int) -> Schedule:
    """One microbatch after the other goes through all stages and back: only one rank works at a time."""
    return _schedule("naive", ranks, microbatches, lambda _: 0)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes, in the same order of microbatches.

    So drawn by Narayanan et al. (2021b), figure 3. In "GPipe" itself (Huang et al. 2019, figure 2c) the microbatches go
    backward in reverse order, which takes as long and holds as much.
    """
    return _schedule("gpipe", ranks, microbatches, lambda _: microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Forward passes until the first gradient can come, then one backward after each forward, then the rest.

    Narayanan et al. (2021a), "Memory-Efficient Pipeline-Parallel DNN Training", who call it PipeDream-Flush.
    """
    return _schedule("one_f_one_b", ranks, microbatches, lambda rank: ranks - rank - 1)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with several smaller stages a rank: less bubble, more messages.

    Bubble over work is `chunks` times smaller; there are more than `chunks` times as many messages.

    Narayanan et al. (2021b), "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    figure 4; the order of passes is that of Megatron-LM.

    Raises:
        ValueError: if `ranks` does not divide `microbatches`, since microbatches go round in groups of p.
    """
    check_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if microbatches % ranks:
        right = f"with schedule 'interleaved' it must be a multiple of the {ranks} ranks"
        raise ValueError(f"microbatches is {microbatches}; {right}")
    ahead = lambda rank: 2 * (ranks - rank - 1) + (chunks - 1) * ranks  # noqa: E731
    return _schedule("interleaved", ranks, microbatches, ahead, chunks)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with the backward pass split: rank r runs its weight passes r microbatches late, when it would wait.

    All ranks then hold as many microbatches as rank 0 of 1F1B.

    Qi et al. (2023), "Zero Bubble Pipeline Parallelism", section 2.1.
    """

    def order(rank: int, one_f_one_b: Sequence[Pass]) -> Iterator[Pass]:
        for each in one_f_one_b:
            yield each
            if each.kind == "backward" and each.microbatch >= rank:
                yield Pass("weight", each.microbatch - rank, rank)
        late = range(max(0, microbatches - rank), microbatches)
        yield from (Pass("weight", microbatch, rank) for microbatch in late)

    passes = one_f_one_b(ranks, microbatches).passes
    return Schedule("zb_h1", tuple(tuple(order(*each)) for each in enumerate(passes)), microbatches)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank in a V and split backward passes: ranks wait only until the first microbatch reaches them.

    Each rank works without a pause if the three passes take equally long and m ≥ 2 p − 1. First and last stage are
    both on rank 0.

    Qi et al. (2023), section 6; the order is that of PyTorch's `ScheduleZBVZeroBubble`. With fewer microbatches the
    passes of those that are missing are left out.
    """
    check_counts(ranks=ranks, microbatches=microbatches)
    count = max(microbatches, 2 * ranks - 1)
    kind_of: dict[str, Kind] = {kind[0].upper(): kind for kind in get_args(Kind)}

    def order(rank: int) -> Iterator[Pass]:
        stages = {True: rank, False: 2 * ranks - 1 - rank}
        left = {
            letter: iter(range(count)) for letter in "FBWfbw"
        }  # small: of the second stage, as in a timetable
        for times, letters in (
            (2 * (ranks - rank) - 1, "F"),
            (rank, "fF"),
            (ranks - rank, "fbw"),
            (count - ranks, "FBWfbw"),
            (rank, "Bb"),
            (ranks - rank, "BW"),
            (rank, "w"),
            (rank, "W"),
        ):
            for letter in times * letters:
                if (microbatch := next(left[letter], count)) < microbatches:
                    yield Pass(kind_of[letter.upper()], microbatch, stages[letter.isupper()])

    orders = tuple(tuple(order(rank)) for rank in range(ranks))
    return Schedule("zbv", orders, microbatches, chunks=2, is_v=True)


def _schedule(name: str, ranks: int, microbatches: int, ahead: Ahead, chunks: int = 1) -> Schedule:
    """The schedule in which each rank runs `ahead(rank)` forward passes, then alternates, then drains."""
    check_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)

    def passes(kind: Kind, rank: int) -> list[Pass]:
        """Groups of p microbatches, each through the rank's first chunk, then its second, and so on."""
        return [
            Pass(kind, microbatch, (chunk if kind == "forward" else chunks - 1 - chunk) * ranks + rank)
            for first in range(0, microbatches, ranks)
            for chunk in range(chunks)
            for microbatch in range(first, min(first + ranks, microbatches))
        ]

    def order(rank: int) -> Iterator[Pass]:
        forward, backward = passes("forward", rank), passes("backward", rank)
        warm_up = min(ahead(rank), len(forward))
        yield from forward[:warm_up]
        yield from chain.from_iterable(zip(forward[warm_up:], backward, strict=False))
        yield from backward[len(forward) - warm_up :]

    return Schedule(name, tuple(tuple(order(rank)) for rank in range(ranks)), microbatches, chunks)


def check_counts(**counts: int) -> None:
    """Raise ValueError unless all are whole numbers from 1 on; the message names the first that is not."""
    for field, value in counts.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{field} is {value}; it must be at least 1, and whole")


def check_weight_seconds(weight_seconds: float, backward_seconds: float) -> None:
    """Raise ValueError unless a backward pass can have such a part."""
    if not 0 <= weight_seconds <= backward_seconds:
        right = f"it must be at least 0 and at most backward_seconds, {backward_seconds}"
        raise ValueError(f"weight_seconds is {weight_seconds}; {right}")


SCHEDULES: dict[str, Callable[..., Schedule]] = {"naive": naive, "gpipe": gpipe}
SCHEDULES |= {"one_f_one_b": one_f_one_b, "interleaved": interleaved, "zb_h1": zb_h1, "zbv": zbv}


def schedule_of(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule called `name`; `interleaved` alone takes a number of chunks.

    Raises:
        ValueError: for a name, or numbers, that cannot be; the message names the field.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule is {name!r}; it must be one of {', '.join(SCHEDULES)}")
    if name == "interleaved":
        return interleaved(ranks, microbatches, chunks)
    if chunks != 1:
        advice = "leave chunks at 1, or use 'interleaved'"
        raise ValueError(f"chunks is {chunks}; schedule {name!r} cuts the model in its own way: {advice}")
    return SCHEDULES[name](ranks, microbatches)


def predict(
    schedule: Schedule,
    forward_seconds: float,
    backward_seconds: float,
    message_seconds: float = 0.0,
    weight_seconds: float | None = None,
) -> list[Timed]:
    """When each pass runs: as soon as its rank is free and what it takes in is there.

        start = max(end of the pass before it on its rank, end of its source + message_seconds)

    Args:
        schedule: the order of passes.
        forward_seconds, backward_seconds: of one microbatch through all chunks of a rank.
        message_seconds: from one rank to another.
        weight_seconds: the part of `backward_seconds` that the gradients of weights take, half of it if None. It counts
            in schedules that split backward passes only.

    Raises:
        ScheduleError: if passes wait for each other for ever.
        ValueError: if `weight_seconds` is negative, or more than `backward_seconds`.
    """
    of_weights = backward_seconds / 2 if weight_seconds is None else weight_seconds
    check_weight_seconds(of_weights, backward_seconds)
    seconds = {"forward": forward_seconds, "backward": backward_seconds, "weight": of_weights}
    if schedule.is_split:
        seconds["backward"] -= of_weights
    ends: dict[Pass, float] = {}
    timeline: list[Timed] = []
    waiting = [list(reversed(passes)) for passes in schedule.passes]
    free = [0.0] * schedule.ranks
    while any(waiting):
        before = len(timeline)
        for rank, passes in enumerate(waiting):
            while passes and ((source := schedule.source(passes[-1])) is None or source in ends):
                each = passes.pop()
                crosses = source is not None and schedule.rank_of(source.stage) != rank
                ready = 0.0 if source is None else ends[source] + message_seconds * crosses
                start = max(free[rank], ready)
                free[rank] = ends[each] = start + seconds[each.kind] / schedule.chunks
                timeline.append(Timed(rank, each, start, free[rank]))
        if len(timeline) == before:
            kind, microbatch, stage = next(passes[-1] for passes in waiting if passes)
            waits = f"{kind} of microbatch {microbatch} through stage {stage} waits for a later pass"
            raise ScheduleError(f"schedule {schedule.name!r} never ends: {waits}")
    return timeline


def bubble(timeline: Timeline) -> float:
    """The share of the ranks' time, from the first start to the last end, in which they run no pass."""
    ranks = len({timed.rank for timed in timeline})
    whole = max(timed.end for timed in timeline) - min(timed.start for timed in timeline)
    return 1 - sum(timed.end - timed.start for timed in timeline) / (ranks * whole)


def bubble_fraction(ranks: int, microbatches: float, chunks: int = 1, parts: int = 1) -> float:
    """(p − 1)/(k · v · m + p − 1): the idle share of a schedule with v `chunks` and k `parts`.

    Of k · v · m + p − 1 slots each rank works in k · v · m. With k = 1 it is that of GPipe, 1F1B and, with v chunks,
    the interleaved schedule, where all stages take equally long and messages no time. Source: Huang et al. (2019),
    section 2.3; Narayanan et al. (2021b), section 2.2, who give bubble over work, (p − 1)/(v · m).

    With k = 3 it is that of ZB-H1 (v = 1, from m = p on) and of ZBV (v = 2, from m = 2 p − 1 on), where forward,
    backward and weight passes take equally long, too. Source: Qi et al. (2023), sections 2 and 6, who count ZBV's as 0:
    there each rank is timed from its own first pass to its own last one.
    """
    return (ranks - 1) / (parts * chunks * microbatches + ranks - 1)


def held(passes: Sequence[Pass]) -> int:
    """The most passes whose forward is done and whose last part is not: activations that a rank keeps at once.

    The last part is backward, or where that is split the weight pass, which needs the inputs of linear layers and their
    outputs' gradients.
    """
    last = "weight" if any(each.kind == "weight" for each in passes) else "backward"
    most = now = 0
    for each in passes:
        now += (each.kind == "forward") - (each.kind == last)
        most = max(most, now)
    return most


def timetable(schedule: Schedule) -> str:
    """The schedule as text: a row a rank, a column for the time of one forward pass; dots are the bubble.

    A backward pass takes two columns; where it is split, it and its weight pass take one each. Passes through a rank's
    second chunk and those after it are in small letters.
    """
    rows = [f"schedule {schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches"]
    timeline = predict(schedule, schedule.chunks, 2 * schedule.chunks)
    slots = round(max(timed.end for timed in timeline))
    width = len(str(schedule.microbatches - 1)) + 2
    for rank in range(schedule.ranks):
        cells = ["." * (width - 1)] * slots
        for timed in timeline:
            if timed.rank == rank:
                first, last = round(timed.start), round(timed.end)
                name = str(timed.each) if timed.each.stage < schedule.ranks else str(timed.each).lower()
                cells[first:last] = [name.ljust(width - 1)] + ["–" * (width - 1)] * (last - first - 1)
        rows.append(f"rank {rank} | " + " ".join(cells))
    return "\n".join(rows)
