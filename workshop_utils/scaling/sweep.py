"""Measures how a job scales: the same training by every strategy, with more and more workers.

This is weak scaling in the field's sense: each worker keeps its batch size, so the global batch grows with the
number of workers, and an epoch takes fewer steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.runs import Run, RunFailed, RunState
from workshop_utils.strategies import strategy_of


@dataclass(frozen=True)
class Measurement:
    """What one run of a sweep gave.

    `samples_per_second` is that of all workers together: the sum over workers of each one's median report.
    `first_step_seconds` is from the launch to the first report of a step. `loss` and `accuracy` are the last
    that were reported, averaged over the workers that did. What was not reported is NaN.
    """

    strategy: str
    workers: int
    state: str
    seconds: float
    first_step_seconds: float
    samples_per_second: float
    loss: float
    accuracy: float
    reason: str = ""


def plan(jobs_folder: str | Path, workers: Sequence[int] = (1, 2, 4), **arguments: Any) -> list[TrainingJob]:
    """The jobs of a sweep: each `mnist_*` job of `jobs_folder` with each number of workers that it can have.

    `single` runs with one worker; `parameter_server` starts at two. `arguments` are given to every script.
    """
    planned = []
    for folder in sorted(Path(jobs_folder).glob("mnist_*/job.yaml")):
        job = TrainingJob.load(folder)
        for count in workers:
            candidate = job.replace(workers=count, arguments=arguments)
            try:
                strategy_of(candidate)
            except JobError:
                continue  # this strategy does not come in that number
            planned.append(candidate)
    return planned


def sweep(jobs: Sequence[TrainingJob]) -> Iterator[Measurement]:
    """Run `jobs` one after the other on this machine; a run that fails is a row, not the end of the sweep."""
    launcher = Local()
    for job in jobs:
        with launcher.launch(job) as run, contextlib.suppress(RunFailed):  # its reason becomes a row
            run.wait()
        yield measurement_of(job, run)


def measurement_of(job: TrainingJob, run: Run) -> Measurement:
    """The figures of one finished run."""
    metrics = run.metrics
    throughput = metrics.groupby("worker")["samples_per_second"].median().sum(min_count=1)
    last = metrics.groupby("worker")[["loss", "accuracy"]].last()  # the last that is not NaN
    return Measurement(
        strategy=job.strategy,
        workers=job.workers,
        state=str(run.state),
        seconds=run.seconds,
        first_step_seconds=float(metrics["seconds"].min()),
        samples_per_second=float(throughput),
        loss=float(last["loss"].mean()),
        accuracy=float(last["accuracy"].mean()),
        reason=run.reason,
    )


def table(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """Measurements as a table, with efficiency: throughput a worker over that of the fastest with the fewest workers.

    It is the weak efficiency of `scaling.efficiency`: one baseline for all strategies. NaN where nothing succeeded.
    """
    rows = pd.DataFrame(measurements, columns=[each.name for each in fields(Measurement)])
    each = rows["samples_per_second"] / rows["workers"]
    counted = (rows["state"] == str(RunState.SUCCEEDED)) & each.notna()
    fewest = rows.loc[counted, "workers"].min()
    return rows.assign(efficiency=each / each[counted & (rows["workers"] == fewest)].max())
