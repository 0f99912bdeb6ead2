"""What a finished run has reported, as rows of a table: steps and where their time went, all-reduces, or training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from workshop_utils.jobs import TrainingJob
from workshop_utils.runs import Run
from workshop_utils.scaling.communication import seconds_by_nbytes

BATCH = "batch-size"  # the argument that says how many examples a worker takes in a step


def rows_of(job: TrainingJob, run: Run) -> Iterator[dict[str, Any]]:
    """What a finished run has reported: one row, or for a job that measures all-reduces one for each size.

    - Of training steps: `step_seconds`, the median step of the slowest worker; the parts of `parts_of`; bytes that a
      worker and the busiest server send and receive in a step; `samples_per_second` of all workers. The first step, in
      which connections open up, is left out.
    - Of all-reduces: `nbytes` and `seconds`, the median of repeats.
    - Of any other job: `samples_per_second`, the sum of the workers' medians; `first_step_seconds`, from the launch to
      the first report; and the last `loss` and `accuracy`, means of the workers. NaN where nothing was reported.
    """
    metrics = run.metrics
    if "step_seconds" in metrics:
        yield _steps(job, metrics)
    elif "all_reduce_seconds" in metrics:
        calls = int(job.arguments.get("calls", 1))
        for nbytes, seconds in seconds_by_nbytes(job, run).items():
            yield {"nbytes": nbytes, "seconds": seconds / calls}
    else:
        by_worker = metrics.groupby("worker")
        last = by_worker[["loss", "accuracy"]].last()  # the last that is not NaN
        yield {
            "samples_per_second": float(by_worker["samples_per_second"].median().sum(min_count=1)),
            "first_step_seconds": float(metrics["seconds"].min()),
            "loss": float(last["loss"].mean()),
            "accuracy": float(last["accuracy"].mean()),
        }


def _steps(job: TrainingJob, metrics: pd.DataFrame) -> dict[str, Any]:
    steps = metrics.dropna(subset=["step_seconds"])
    if steps["step"].nunique() > 1:
        steps = steps[steps["step"] > steps["step"].min()]
    slowest = steps.groupby("step")["step_seconds"].max()
    row: dict[str, Any] = {"step_seconds": float(slowest.median())}
    if "communication_seconds" in steps:
        row |= {name: float(values.median()) for name, values in parts_of(steps).items()}
    if "gradient_nbytes" in steps:
        row["gradient_nbytes"] = int(steps["gradient_nbytes"].iloc[0])
    for name in ("bytes_sent", "bytes_received"):
        if name in steps:
            row[name] = float(steps[name].median())
    servers = metrics[metrics["worker"].str.startswith("server")]
    if "bytes_received" in servers and len(servers):
        row["server_bytes_received"] = float((servers["bytes_received"] / servers["step"]).max())
    if BATCH in job.arguments:
        row["samples_per_second"] = job.workers * int(job.arguments[BATCH]) / row["step_seconds"]
    row["loss"] = float(steps[steps["step"] == steps["step"].max()]["loss"].mean())
    return row


def parts_of(steps: pd.DataFrame) -> dict[str, pd.Series[float]]:
    """Where the seconds of each step went, a value a step; together they are the slowest worker's step.

    `compute_seconds` is the workers' mean. Of communication, the part that no worker escapes is `transfer_seconds`
    (that of the one who waits least), and what the others have more on average `waiting_seconds`: for slower workers,
    and for their turn at a link. `other_seconds` is the rest: changing the parameters, and by how much the
    slowest worker is behind the mean.
    """
    by_step = steps.groupby("step")
    compute, communication = by_step["compute_seconds"].mean(), by_step["communication_seconds"]
    transfer = communication.min()
    waiting = communication.mean() - transfer
    other = by_step["step_seconds"].max() - compute - transfer - waiting
    return {
        "compute_seconds": compute,
        "transfer_seconds": transfer,
        "waiting_seconds": waiting,
        "other_seconds": other,
    }
