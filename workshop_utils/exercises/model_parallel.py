"""Checks of lesson 08, tensor and pipeline parallelism; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

from workshop_utils.exercises import NotYet, Wrong, exercise, number
from workshop_utils.parallel.schedule import (
    Kind,
    Pass,
    Schedule,
    ScheduleError,
    bubble,
    bubble_fraction,
    held,
    predict,
)
from workshop_utils.parallel.tensor import block_bytes_sent

idle_percent = number(
    100 * bubble_fraction(8, 32), "%", "(p − 1)/(m + p − 1) = 7/39; the other 32 of 39 slots are work"
)
microbatches_for_five_percent = number(
    133, "microbatches", "7/(m + 7) ≤ 0.05 from m = 133 on: 19 times the 7 slots that are lost"
)
megabytes_a_block = number(
    block_bytes_sent(8, 2048 * 4096 * 2) / 1e6,
    "MB",
    "an activation has 16.8 MB, an all-reduce sends 2 · 7/8 of it, and a block has 4 all-reduces",
)

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
        formula = bubble_fraction(ranks, microbatches)
        if idle > formula + 1e-9:
            raise Wrong(f"{of}, ranks wait {100 * idle:.0f} % of the time; 1F1B waits {100 * formula:.0f} %.")
        for rank, passes in enumerate(schedule.passes):
            most = min(microbatches, ranks - rank)
            if held(passes) > most:
                raise Wrong(
                    f"{of}, ranks wait no longer than they must, but rank {rank} holds the activations of "
                    f"{held(passes)} microbatches at once; {most} would do: begin with backward as soon as you can."
                )
    return (
        "as short as GPipe, and a rank holds no more microbatches than there are ranks from it to the last."
    )


def _schedule(answer: Answer, ranks: int, microbatches: int) -> Schedule:
    orders = [answer(rank, ranks, microbatches) for rank in range(ranks)]
    if any(order is None or order is ... for order in orders):
        raise NotYet("your function gave nothing: write it, then run this again.")
    passes = []
    for rank, order in enumerate(orders):
        of = f"rank {rank} of {ranks} with {microbatches} microbatches"
        for each in order:
            if not (isinstance(each, tuple) and len(each) == 2 and each[0] in ("forward", "backward")):
                raise Wrong(f"{of} has {each!r}; each pass must look like ('forward', 0) or ('backward', 0).")
        for kind in ("forward", "backward"):
            numbers = sorted(number for name, number in order if name == kind)
            if numbers != list(range(microbatches)):
                raise Wrong(
                    f"{of} runs {kind} of microbatches {numbers}; each from 0 on must come exactly once."
                )
        passes.append(tuple(Pass(kind, number, rank) for kind, number in order))
    return Schedule("yours", tuple(passes), microbatches)
