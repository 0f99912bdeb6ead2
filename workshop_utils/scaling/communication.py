"""How long an all-reduce, or a step of parameter servers, takes: between real processes and in virtual time.

    network = Network(bandwidth="100Mbit")
    measure(TrainingJob.load("jobs/measure_all_reduce").replace(workers=4), network)

gives one row for each size: nbytes, seconds, and in the column `how` what made the network slow. In virtual time the
same algorithms run by `simulated_seconds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd

from workshop_utils.comm.central import central_all_reduce
from workshop_utils.comm.halving_doubling import halving_doubling_all_reduce
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.shape import Shape
from workshop_utils.comm.simulated import simulate
from workshop_utils.comm.topology import Link
from workshop_utils.comm.tree import tree_all_reduce
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network
from workshop_utils.runs import Run
from workshop_utils.strategies import strategy_of

ALL_REDUCES: Mapping[str, Callable[..., None]] = {
    "ring": ring_all_reduce,
    "central": central_all_reduce,
    "tree": tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
}

COLUMNS = ["workers", "servers", "nbytes", "seconds", "how"]


def measure(job: TrainingJob, network: Network | None = None) -> pd.DataFrame:
    """Seconds of what `job` (one of jobs/measure_*) repeats: the median of repeats, of the slowest rank in each.

    Where this machine cannot make other frameworks feel `network`, their table is empty.

    Returns:
        Columns workers, servers, nbytes, seconds and how ("network namespaces", "stamped links", "full speed").

    Raises:
        JobError: if the workshop's own message passing cannot feel `network` either.
        RunFailed: if the job fails.
    """
    strategy = strategy_of(job)
    try:
        how = "full speed" if network is None else network.emulation(strategy)
    except JobError:
        if strategy.uses_comm:
            raise
        return pd.DataFrame(columns=COLUMNS)
    with Local(network=network, warm=True).launch(job) as run:
        rows = seconds_by_nbytes(job, run.wait())
    servers = job.parameter_servers if job.strategy == "workshop_parameter_server" else 0
    table = [(job.workers, servers, nbytes, seconds, how) for nbytes, seconds in rows.items()]
    return pd.DataFrame(table, columns=COLUMNS)


def seconds_by_nbytes(job: TrainingJob, run: Run) -> dict[int, float]:
    """Median seconds by size, from the records of a run of one of jobs/measure_*.

    For parameter servers it is the slowest worker's mean step instead: its first step begins as soon as all have
    the initial parameters, and its last one ends with the last answer.
    """
    table = run.metrics
    if "step_seconds" in table:
        totals = table.groupby("worker")["step_seconds"].sum()
        return {int(job.arguments["nbytes"]): float(totals.max()) / int(job.arguments["steps"])}
    medians = seconds_by_repeat(run).groupby("nbytes")["seconds"].median()
    return dict(zip(medians.index.astype(int).tolist(), medians.tolist(), strict=True))


def seconds_by_repeat(run: Run) -> pd.DataFrame:
    """Seconds of every repeat, of its slowest rank, from a run of an all-reduce job: nbytes, step, seconds."""
    table = run.metrics.dropna(subset=["all_reduce_seconds"])
    slowest = table.groupby(["nbytes", "step"])["all_reduce_seconds"].max()
    return slowest.rename("seconds").reset_index()


def simulated_seconds(algorithm: str, size: int, nbytes: int, link: Link) -> float:
    """Seconds of one all-reduce of `nbytes` among `size` ranks, by the algorithm's own text in virtual time."""
    all_reduce = ALL_REDUCES[algorithm]
    return simulate(size, lambda communicator: all_reduce(communicator, Shape(nbytes // 4)), link).seconds
