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
            most, kept = min(microbatches, ranks - rank), held(passes)
            if kept > most:
                text = f"rank {rank} holds the activations of {kept} microbatches at once; {most} would do"
                raise Wrong(f"{of}, {text}: begin with backward earlier{yours}.")
    return "as short as GPipe, and a rank holds no more microbatches than there are ranks from it on."


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
                raise Wrong(f"{of} has {each!r} as its pass {step}; it must look like ('forward', 0).")
        for kind in kinds:
            numbers = [number for name, number in order if name == kind]
            if sorted(numbers) != list(range(microbatches)):
                raise Wrong(f"{of} runs {kind} of microbatches {numbers}; each must come exactly once.")
        passes.append(tuple(Pass(kind, number, rank) for kind, number in order))
    return Schedule("yours", tuple(passes), microbatches)
