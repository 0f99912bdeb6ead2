"""From a sweep of training steps with a few workers to what many would take: fit, then predict.

    table = pd.read_parquet("build/scaling.parquet")             # of `experiment.measure_all`
    for (strategy, network), runs in swept(table):
        print(fit_steps(runs))                                   # latency and bandwidth, with intervals
        predict_steps(runs, workers=[8, 64, 1000])               # closed form with interval, and the simulated clock

A step is what one worker computes, and communication. Computing is taken from runs with one worker, as if each worker
had a core of its own; what is fitted is the rest of the step, in the runs with more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from workshop_utils.comm.central import central_all_reduce
from workshop_utils.comm.recurrence import ring_finish_seconds
from workshop_utils.comm.shape import Shape
from workshop_utils.comm.simulated import simulate
from workshop_utils.comm.topology import Link, Numbers
from workshop_utils.jobs import JobError
from workshop_utils.scaling.cost import all_reduce_seconds, synchronous_server_seconds
from workshop_utils.scaling.fit import Fit, fit, path_of, path_terms

NEEDED = (
    "strategy", "workers", "network", "state", "step_seconds", "compute_seconds", "gradient_nbytes", "batch_size",
)  # fmt: skip
VARIED = ["workers", "gradient_nbytes"]  # what communication depends on
_ring = functools.partial(all_reduce_seconds, "ring")

# (workers, nbytes, path) to seconds. Gloo, below DDP, has a ring too; what DDP overlaps goes into its bandwidth.
COSTS: Mapping[str, Callable[[Numbers, Numbers, Link], Numbers]] = {
    "ring": _ring,
    "torch_ddp": _ring,
    "workshop_parameter_server": synchronous_server_seconds,
}


def swept(table: pd.DataFrame) -> list[tuple[Any, pd.DataFrame]]:
    """The runs of each strategy that can be predicted and each network, under (strategy, network), in their order.

    Raises:
        JobError: if the table lacks what a prediction needs, or there is none.
    """
    missing = [name for name in NEEDED if name not in table]
    if missing:
        right = "one of `workshop scaling measure` with jobs/measure_step, or a job that reports its parts as that"
        raise JobError(f"the table lacks {', '.join(missing)}; it must be {right}")
    known = table[table["strategy"].isin(COSTS)]
    if known.empty:
        raise JobError(f"strategies are {', '.join(set(table['strategy']))}; known are {', '.join(COSTS)}")
    return list(known.groupby(["strategy", "network"], sort=False, dropna=False))


def communicating(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of one strategy that communicate, with `seconds`: the step without computing."""
    strategy = runs["strategy"].iloc[0]
    fewest = 1 if strategy == "workshop_parameter_server" else 2  # one worker of a server communicates, too
    seconds = runs["step_seconds"] - runs["compute_seconds"]
    communicates = (runs["state"] == "succeeded") & (runs["workers"] >= fewest) & (seconds > 0)
    return runs.assign(seconds=seconds)[communicates]


def fit_steps(runs: pd.DataFrame) -> Fit:
    """Latency and bandwidth from the runs of one strategy behind one network.

    Raises:
        JobError: if there are too few runs.
    """
    strategy, rows = runs["strategy"].iloc[0], communicating(runs)
    varied = rows[VARIED]
    if len(varied.drop_duplicates()) < 2:
        takes = "it takes two numbers of workers, or two sizes, to tell latency and bandwidth apart"
        raise JobError(f"{strategy} was measured with {sorted(set(rows['workers']))} workers; {takes}")
    return fit(path_terms(COSTS[strategy]), [*varied.to_numpy().T], rows["seconds"].to_numpy())


def held_out(runs: pd.DataFrame, workers: Sequence[int]) -> pd.DataFrame:
    """Communication of the runs with these numbers of `workers`, as a fit to all others predicts it.

    Returns:
        Columns workers, gradient_nbytes, measured, predicted, error (predicted over measured, less 1).

    Raises:
        JobError: as `fit_steps`, or if no run has such a number of workers.
    """
    rows = communicating(runs)
    rows = rows[rows["workers"].isin(workers)]
    if rows.empty:
        raise JobError(f"no run has {' or '.join(map(str, workers))} workers, so none can be held out")
    medians = rows.groupby(VARIED)["seconds"].median().rename("measured").reset_index()
    predicted = fit_steps(runs[~runs["workers"].isin(workers)]).predict(*medians[VARIED].to_numpy().T)
    return medians.assign(predicted=predicted, error=predicted / medians["measured"] - 1)


def predict_steps(runs: pd.DataFrame, workers: Sequence[int]) -> pd.DataFrame:
    """A step with each of `workers`, for each size of model and batch that was measured with one worker.

    Returns:
        Columns strategy, network, workers, nbytes, batch_size, `step_seconds` by the closed form with `low` and `high`
        (95 %), `simulated_seconds` by the simulated clock, weak `efficiency`, and the `communication_share`.

    Raises:
        JobError: as `fit_steps`, or if nothing was measured with one worker.
    """
    fitted = fit_steps(runs)
    alone = runs[(runs["workers"] == 1) & (runs["state"] == "succeeded")]
    if alone.empty:
        raise JobError("nothing was measured with 1 worker, so what computing takes by itself is unknown")
    alike = ["strategy", "network", "gradient_nbytes", "batch_size"]
    computing = alone.groupby(alike)["compute_seconds"].median().reset_index()
    table = computing.merge(pd.DataFrame({"workers": workers}), how="cross")
    varied = table[VARIED].to_numpy().T
    seconds, (low, high) = fitted.predict(*varied), fitted.interval(*varied)
    compute, strategy, path = table.pop("compute_seconds"), runs["strategy"].iloc[0], path_of(fitted)
    simulated = [simulated_communication(strategy, n, nbytes, path) for n, nbytes in varied.T.tolist()]
    return table.rename(columns={"gradient_nbytes": "nbytes"}).assign(
        step_seconds=compute + seconds,
        low=compute + low,
        high=compute + high,
        simulated_seconds=compute + simulated,
        efficiency=compute / (compute + seconds),
        communication_share=seconds / (compute + seconds),
    )


def simulated_communication(strategy: str, workers: int, nbytes: int, path: Link) -> float:
    """The same in virtual time: a ring by the recurrence over its ranks, a server as one rank more, in the centre."""
    if strategy == "workshop_parameter_server":
        array = Shape(nbytes // 4)
        return simulate(
            workers + 1, lambda communicator: central_all_reduce(communicator, array), path
        ).seconds
    return float(np.max(ring_finish_seconds(workers, nbytes // 4 * 4, path)))
