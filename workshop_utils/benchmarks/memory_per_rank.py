"""Memory of a rank under ZeRO-1, -2 and -3: ours beside the formula, and beside what PyTorch has for the stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workshop_utils.benchmarks.comparison import Bar, BenchmarkError, Comparison, NotMeasured, Results
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.runs import RunFailed
from workshop_utils.scaling.memory import zero_memory

JOBS = Path(__file__).parents[2] / "jobs"
WORKERS = (2, 4)
SIZE = {"width": 2048, "layers": 8, "steps": 2, "batch-size": 16, "measure-memory": 1}  # 118 MB of parameters
THEIRS = {0: ("ddp", "DDP"), 1: ("zero", "ZeroRedundancyOptimizer"), 3: ("fsdp", "FSDP2")}
AS_FORMULA = Bar(high=1.1)
AS_THEIRS = Bar(high=1.1)

Say = Callable[[str], None]


def measure(say: Say) -> Results:
    """Bytes that each rank holds after a step, by stage and number of workers."""
    rows: list[Comparison | NotMeasured] = []
    for workers in WORKERS:
        for stage in (0, 1, 2, 3):
            say(f"{workers} workers, stage {stage}")
            try:
                rows += rows_of(stage, workers)
            except (JobError, RunFailed, BenchmarkError) as error:
                rows.append(NotMeasured(f"{workers} workers, stage {stage}", str(error)))
    return Results(
        "Memory of a rank, sharded by ZeRO's stages",
        tuple(rows),
        "A perceptron of 29 million parameters in float32, Adam. What the operating system counts for a process "
        "after its second step, less what it counted before the model was made; freed memory is given back at "
        "once. Pairs are ranks. Formula: Rajbhandari et al. (2020), section 5, without activations. PyTorch has "
        "nothing to set beside stage 2.",
    )


def rows_of(stage: int, workers: int) -> list[Comparison]:
    """One stage beside its formula and, where there is one, beside PyTorch's."""
    ours, parameters = megabytes("digits_sharded", workers, stage=stage)
    formula = zero_memory(parameters, workers, stage).total / 1e6
    subject = f"ZeRO-{stage}, N = {workers}" if stage else f"not sharded, N = {workers}"
    rows = [Comparison(f"{subject}, beside the formula", ours, (formula,) * workers, "MB", AS_FORMULA)]
    if stage in THEIRS:
        by, name = THEIRS[stage]
        theirs, _ = megabytes("digits_fsdp", workers, by=by)
        rows.append(Comparison(f"{subject}, beside {name}", ours, theirs, "MB", AS_THEIRS))
    return rows


def megabytes(job: str, workers: int, **arguments: str | int) -> tuple[tuple[float, ...], int]:
    """What each rank holds, the least first, and the number of parameters.

    Raises:
        RunFailed: if the job fails.
        BenchmarkError: if not every rank has reported what it holds.
    """
    ready = TrainingJob.load(JOBS / job).replace(workers=workers, arguments={**SIZE, **arguments})
    with Local(warm=True).launch(ready) as run:
        records = [record for record in run.wait().records if record.get("memory_nbytes") is not None]
    if len(records) != workers:
        raise BenchmarkError(f"{job}: {len(records)} of {workers} ranks have reported memory_nbytes")
    held = sorted(record["memory_nbytes"] / 1e6 for record in records)
    return tuple(held), int(records[0]["parameters"])
