"""From a sweep of training steps with a few workers to what many would take: fit, test on what was left out, predict.

    table = pd.read_parquet("build/scaling.parquet")             # of `experiment.measure_all`
    print(fit_strategy(table, "ring"))                           # latency and bandwidth, with intervals
    held_out(table, "ring", workers=[8])                         # predicted beside measured, for workers not fitted
    predict(table, "ring", workers=[8, 64, 1000])                # closed form with interval, and the simulated clock

A step is what one worker computes, and communication. Computing is taken from runs with one worker, as if each worker
had a core of its own; what is fitted is the rest of the step, in the runs with more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from workshop_utils.comm.cluster import Link
from workshop_utils.comm.recurrence import ring_finish_seconds
from workshop_utils.jobs import JobError
from workshop_utils.scaling.arrays import Numbers
from workshop_utils.scaling.communication import simulated_seconds
from workshop_utils.scaling.cost import Path, all_reduce_seconds, synchronous_server_seconds
from workshop_utils.scaling.fit import Fit, fit, path_of, path_terms

NEEDED = (
    "strategy", "workers", "network", "state", "step_seconds", "compute_seconds", "gradient_nbytes", "batch_size",
)  # fmt: skip
_ring = functools.partial(all_reduce_seconds, "ring")

# (workers, nbytes, path) to seconds. Gloo, below DDP, has a ring too; what DDP overlaps goes into its bandwidth.
COSTS: Mapping[str, Callable[[Numbers, Numbers, Path], Numbers]] = {
    "ring": _ring,
    "torch_ddp": _ring,
    "workshop_parameter_server": synchronous_server_seconds,
}


def strategies(table: pd.DataFrame) -> list[str]:
    """Those of `table` that can be predicted, in the order in which they come.

    Raises:
        JobError: if the table lacks what a prediction needs, or there is none.
    """
    missing = [name for name in NEEDED if name not in table]
    if missing:
        raise JobError(
            f"the table lacks {', '.join(missing)}; it must be one of `workshop scaling measure` with "
            "jobs/measure_step, or another job whose script reports its parts as that one does"
        )
    found = [name for name in dict.fromkeys(table["strategy"]) if name in COSTS]
    if not found:
        raise JobError(f"strategies are {', '.join(set(table['strategy']))}; known are {', '.join(COSTS)}")
    return found


def communication(table: pd.DataFrame, strategy: str) -> pd.DataFrame:
    """The runs of `strategy` that communicate: workers, nbytes, and `seconds`, the step without computing."""
    fewest = 1 if strategy == "workshop_parameter_server" else 2  # one worker of a server communicates, too
    own = table[
        (table["strategy"] == strategy) & (table["state"] == "succeeded") & (table["workers"] >= fewest)
    ]
    seconds = own["step_seconds"] - own["compute_seconds"]
    return own.assign(nbytes=own["gradient_nbytes"], seconds=seconds)[seconds > 0]


def fit_strategy(table: pd.DataFrame, strategy: str, leave_out: Sequence[int] = ()) -> Fit:
    """Latency and bandwidth from all runs of `strategy` but those with `leave_out` workers.

    Raises:
        JobError: if there are too few runs, or they are of several networks.
    """
    rows = communication(table, strategy)
    rows = rows[~rows["workers"].isin(leave_out)]
    networks = sorted(set(rows["network"]))
    if len(networks) > 1:
        raise JobError(
            f"network: the runs are of {' and '.join(networks)}; each has a bandwidth of its own, choose one"
        )
    if len(rows[["workers", "nbytes"]].drop_duplicates()) < 2:
        raise JobError(
            f"{strategy} was measured with {sorted(set(rows['workers']))} workers; it takes two numbers of "
            "workers, or two sizes, to tell latency and bandwidth apart"
        )
    terms = path_terms(COSTS[strategy])
    return fit(terms, [rows["workers"].to_numpy(), rows["nbytes"].to_numpy()], rows["seconds"].to_numpy())


def held_out(table: pd.DataFrame, strategy: str, workers: Sequence[int]) -> pd.DataFrame:
    """Communication of the runs with these numbers of `workers`, predicted by a fit to all others.

    Returns:
        Columns workers, nbytes, measured, predicted, error (predicted over measured, less 1).

    Raises:
        JobError: as `fit_strategy`, or if no run has such a number of workers.
    """
    found = fit_strategy(table, strategy, leave_out=workers)
    rows = communication(table, strategy)
    rows = rows[rows["workers"].isin(workers)]
    if rows.empty:
        raise JobError(
            f"no run of {strategy} has {' or '.join(map(str, workers))} workers, so none can be held out"
        )
    medians = rows.groupby(["workers", "nbytes"])["seconds"].median().rename("measured").reset_index()
    predicted = found.predict(medians["workers"].to_numpy(), medians["nbytes"].to_numpy())
    return medians.assign(predicted=predicted, error=predicted / medians["measured"] - 1)


def predict(table: pd.DataFrame, strategy: str, workers: Sequence[int]) -> pd.DataFrame:
    """A step with each of `workers`, for each size of model and batch that was measured with one worker.

    Returns:
        Columns strategy, workers, nbytes, batch_size, `step_seconds` by the closed form with `low` and `high` (95 %),
        `simulated_seconds` by the simulated clock, weak `efficiency`, and the `communication_share`.

    Raises:
        JobError: as `fit_strategy`, or if nothing was measured with one worker.
    """
    found = fit_strategy(table, strategy)
    path = path_of(found)
    alone = table[(table["workers"] == 1) & (table["state"] == "succeeded")]
    if alone.empty:
        raise JobError(
            "nothing was measured with 1 worker, so it is not known what computing takes by itself"
        )
    computing = alone.groupby(["gradient_nbytes", "batch_size"])["compute_seconds"].median().reset_index()
    rows = []
    for nbytes, batch, compute in computing.itertuples(index=False):
        for count in workers:
            seconds, (low, high) = found.predict(count, nbytes), found.interval(count, nbytes)
            step = compute + seconds
            rows.append(
                {
                    "strategy": strategy,
                    "workers": count,
                    "nbytes": int(nbytes),
                    "batch_size": int(batch),
                    "step_seconds": step,
                    "low": compute + low,
                    "high": compute + high,
                    "simulated_seconds": compute
                    + simulated_communication(strategy, count, int(nbytes), path),
                    "efficiency": compute / step,
                    "communication_share": seconds / step,
                }
            )
    return pd.DataFrame(rows)


def simulated_communication(strategy: str, workers: int, nbytes: int, path: Path) -> float:
    """The same in virtual time: a ring by the recurrence over its ranks, a server as one rank more, in the centre."""
    link = Link(float(path.latency_seconds), float(path.bandwidth_bytes_per_second))
    if strategy == "workshop_parameter_server":
        return simulated_seconds("central", workers + 1, nbytes // 4 * 4, link)
    return float(np.max(ring_finish_seconds(workers, nbytes // 4 * 4, link)))
