"""Checks of lesson 08, tensor and pipeline parallelism; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

from workshop_utils.lessons.checks import Wrong, exercise, questions, result_of
from workshop_utils.parallel.schedule import (
    Kind,
    Pass,
    Schedule,
    ScheduleError,
    bubble,
    bubble_fraction,
    held,
    predict,
    schedule_of,
)

__getattr__ = questions(__name__)


Answer = Callable[[int, int, int], list[tuple[Kind, int]]]


@exercise
def microbatches_for_five_percent(answer: int) -> str:
    """`answer` is the smallest number of microbatches with which 8 ranks wait for 5 % of the time at most."""
    ranks, fewest = 8, 133
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise Wrong(f"{answer!r} is no number of microbatches.")
    if answer != int(answer) or answer < 1:
        raise Wrong(f"{answer:g}: a batch is cut into whole microbatches, at least one.")
    idle = bubble_fraction(ranks, int(answer))
    of = f"with {answer:g} microbatches, 7/({answer:g} + 7) = {100 * idle:.2f} % of the time is idle"
    if idle > 0.05:
        raise Wrong(f"{of}: that is more than 5 %.")
    if answer > fewest:
        hint = {
            140: "7/m is what is lost beside the work; of all the time it is 7/(m + 7)",
            152: "p − 1 ranks are waited for, that is 7, not 8",
        }.get(int(answer), "solve 7/(m + 7) = 0.05 for m")
        raise Wrong(f"{of}; fewer microbatches would do: {hint}.")
    return (
        f"{fewest} microbatches: 7/(m + 7) ≤ 0.05 from there on, that is 19 times the 7 slots that are lost."
    )


@exercise
def one_f_one_b(answer: Answer) -> str:
    """`answer(rank, ranks, microbatches)` is the order of passes of 1F1B on a rank: ("forward", 0), and so on."""
    for ranks, microbatches in ((2, 4), (4, 8), (3, 2), (4, 5), (1, 2)):
        of = f"with {ranks} ranks and {microbatches} microbatches"
        try:
            schedule = _schedule(answer, ranks, microbatches)
            idle = bubble(predict(schedule, 1.0, 2.0))
        except ScheduleError as error:
            raise Wrong(f"{of}, {error}.") from None
        yours = _name_of(schedule)
        formula = bubble_fraction(ranks, microbatches)
        if idle > formula + 1e-9:
            least = f"1F1B waits {100 * formula:.0f} %{yours}"
            raise Wrong(f"{of}, ranks wait {100 * idle:.0f} % of the time; {least}.")
        for rank, passes in enumerate(schedule.passes):
            most = min(microbatches, ranks - rank)
            if held(passes) > most:
                raise Wrong(
                    f"{of}, ranks wait no longer than they must, but rank {rank} holds the activations of "
                    f"{held(passes)} microbatches at once; {most} would do: begin with backward as soon as you "
                    f"can{yours}."
                )
    return (
        "as short as GPipe, and a rank holds no more microbatches than there are ranks from it to the last."
    )


def _name_of(schedule: Schedule) -> str:
    """The name of `schedule`, if it is one that the lesson has shown."""
    for name, words in (("naive", "the naive schedule"), ("gpipe", "GPipe")):
        if schedule.passes == schedule_of(name, schedule.ranks, schedule.microbatches).passes:
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
            if not (isinstance(each, tuple) and len(each) == 2 and each[0] in kinds):
                raise Wrong(
                    f"{of} has {each!r} as its pass {step}; each pass must look like ('forward', 0) or ('backward', 0)."
                )
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
