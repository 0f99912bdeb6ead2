"""Checks of lesson 08, tensor and pipeline parallelism; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real

from workshop_utils.lessons.checks import Wrong, exercise, questions, result_of
from workshop_utils.parallel import schedule as schedules
from workshop_utils.parallel.schedule import Kind, Pass, Schedule, ScheduleError

__getattr__ = questions(__name__)


Answer = Callable[[int, int, int], list[tuple[Kind, int]]]


@exercise
def microbatches_for_five_percent(answer: float) -> str:
    """`answer` is the smallest number of microbatches with which 8 ranks wait for 5 % of the time at most."""
    ranks, fewest = 8, 133
    if isinstance(answer, bool) or not isinstance(answer, Real):
        raise Wrong(f"{answer!r} is no number of microbatches.")
    count = round(answer)
    if count < 1 or not math.isclose(answer, count):
        raise Wrong(f"{float(answer):g}: a batch is cut into whole microbatches, at least one.")
    idle = schedules.bubble_fraction(ranks, count)
    of = f"with {count} microbatches, 7/({count} + 7) = {100 * idle:.2f} % of the time is idle"
    if count < fewest:
        raise Wrong(f"{of}: that is more than 5 %.")
    if count > fewest:
        hint = {
            134: "compare 7/(m + 7) itself with 0.05, since 1 − m/(m + 7) is subject to rounding",
            140: "7/m is what is lost beside the work; of all the time it is 7/(m + 7)",
            152: "p − 1 ranks are waited for, that is 7, not 8",
            160: "p − 1 ranks are waited for, that is 7, not 8, and of all the time it is 7/(m + 7)",
        }.get(count, "solve 7/(m + 7) = 0.05 for m")
        raise Wrong(f"{of}; fewer microbatches would do: {hint}.")
    return f"{fewest} microbatches: 7/(m + 7) ≤ 0.05 from there on, 19 times the 7 slots that are lost."


@exercise
def one_f_one_b(answer: Answer) -> str:
    """`answer(rank, ranks, microbatches)` is the order of passes of 1F1B on a rank: ("forward", 0), and so on."""
    for ranks, microbatches in ((2, 4), (4, 8), (3, 2), (4, 5), (1, 2)):
        of = f"with {ranks} ranks and {microbatches} microbatches"
        try:
            schedule = _schedule(answer, ranks, microbatches)
            idle = schedules.bubble(schedules.predict(schedule, 1.0, 2.0))
        except ScheduleError as error:
            raise Wrong(f"{of}, {error}.") from None
        yours = _name_of(schedule)
        formula = schedules.bubble_fraction(ranks, microbatches)
        if idle > formula + 1e-9:
            least = f"1F1B waits {100 * formula:.0f} %{yours}"
            raise Wrong(f"{of}, ranks wait {100 * idle:.0f} % of the time; {least}.")
        for rank, passes in enumerate(schedule.passes):
            most, kept = min(microbatches, ranks - rank), schedules.held(passes)
            if kept > most:
                text = f"rank {rank} holds the activations of {kept} microbatches at once; {most} would do"
                early = f"begin with backward as soon as you can{yours}"
                raise Wrong(f"{of}, ranks wait no longer than they must, but {text}: {early}.")
    return "as short as GPipe, and no rank holds more microbatches than there are ranks from it to the last."


def _name_of(schedule: Schedule) -> str:
    """The name of `schedule`, if it is one that the lesson has shown."""
    for name, words in (("naive", "the naive schedule"), ("gpipe", "GPipe")):
        if schedule.passes == schedules.schedule_of(name, schedule.ranks, schedule.microbatches).passes:
            return f" (what you have written is {words})"
    return ""


def _schedule(answer: Answer, ranks: int, microbatches: int) -> Schedule:
    orders = [result_of(answer, rank, ranks, microbatches) for rank in range(ranks)]
    passes = []
    for rank, order in enumerate(orders):
        of = f"rank {rank} of {ranks} with {microbatches} microbatches"
        if not isinstance(order, (list, tuple)):
            raise Wrong(f"{of} has {order!r}; it must be a list of passes, such as [('forward', 0)].")
        kinds = ("forward", "backward")
        for step, each in enumerate(order):
            pair = isinstance(each, tuple) and len(each) == 2
            if not (pair and each[0] in kinds and isinstance(each[1], Integral)):
                form = "each pass must look like ('forward', 0) or ('backward', 0)"
                raise Wrong(f"{of} has {each!r} as its pass {step}; {form}.")
        for kind in kinds:
            numbers = [number for name, number in order if name == kind]
            runs = f"{of} runs {kind} of microbatches {numbers}"
            if missing := sorted(set(range(microbatches)) - set(numbers)):
                raise Wrong(f"{runs}; each from 0 on must come exactly once: {missing} never come.")
            if repeated := sorted({number for number in numbers if numbers.count(number) > 1}):
                raise Wrong(f"{runs}; each from 0 on must come exactly once: {repeated} come more often.")
            if others := [number for number in numbers if number not in range(microbatches)]:
                raise Wrong(f"{runs}; there are only {microbatches}, from 0 on, so {others} are too many.")
        passes.append(tuple(Pass(kind, number, rank) for kind, number in order))
    return Schedule("yours", tuple(passes), microbatches)
