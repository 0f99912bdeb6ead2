"""What the ranks of a data parallel step did when: how much of the communication hid behind the backward pass."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from workshop_utils.runs import Run

MARKS = ("forward_start", "forward_end", "backward_end", "synchronised")


class Phase(NamedTuple):
    """What a rank did from `start` to `end`, in seconds since the first rank began the step.

    `kind` is "forward", "backward", "wait" (for gradients, once the backward pass has ended) or "all-reduce", which
    has the `nbytes` of its array.
    """

    kind: str
    start: float
    end: float
    nbytes: int = 0


def timeline(run: Run) -> dict[int, list[Phase]]:
    """The phases of the last step of each rank, from a run of jobs/digits_buckets or jobs/digits_torch_ddp.

    PyTorch's DDP waits within its backward pass. There "wait" begins when the last bucket is handed over, for then the
    last gradient has been computed.

    Raises:
        ValueError: if the run has reported no timeline.
    """
    phases: dict[int, list[Phase]] = {}
    marks: dict[int, dict[str, float]] = {}
    for record in run.records:
        if "backward_end" in record:
            marks[record["rank"]] = {name: record[name] for name in MARKS if name in record}
        elif "all_reduce" in record:
            phase = Phase("all-reduce", record["start"], record["end"], int(record["nbytes"]))
            phases.setdefault(record["rank"], []).append(phase)
    for rank, of_rank in marks.items():
        travelled = phases.setdefault(rank, [])
        if "synchronised" not in of_rank and travelled:
            of_rank["synchronised"] = of_rank["backward_end"]
            of_rank["backward_end"] = max(phase.start for phase in travelled)
        spans = itertools.pairwise(of_rank[name] for name in MARKS if name in of_rank)
        kinds = zip(("forward", "backward", "wait"), spans, strict=False)
        travelled[:0] = [Phase(kind, *span) for kind, span in kinds]
    if not phases:
        jobs = "jobs/digits_buckets or digits_torch_ddp"
        raise ValueError(f"{run.name} has reported no timeline; it must be {jobs}")
    return dict(sorted(phases.items()))
