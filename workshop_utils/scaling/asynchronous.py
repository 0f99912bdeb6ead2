"""Throughput and staleness of asynchronous parameter servers: between real processes, and by the event kernel.

    job = TrainingJob.load("jobs/measure_parameter_server")
    job = job.replace(workers=8, arguments={"consistency": "asynchronous", "compute-seconds": 0.05})
    network = Network(bandwidth="100Mbit", latency="2ms")
    pushes, how = measured(job, network)
    summary(pushes), summary(predicted(job, link_of(network, how)))

Both look at the same job: `compute_times` gives workers and kernel the same computing times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from workshop_utils.comm.asynchronous import Pushes, compute_times, simulate_pushes
from workshop_utils.comm.parameter_server import Arrangement
from workshop_utils.comm.topology import Link
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network
from workshop_utils.scaling.communication import goodput

DEFAULTS = {"compute-seconds": 0.0, "jitter": 0.0, "seed": 0, "bound": 0}  # of jobs/measure_parameter_server


def measured(job: TrainingJob, network: Network | None = None) -> tuple[Pushes, str]:
    """What the servers log when `job`, jobs/measure_parameter_server, runs as real processes behind `network`.

    Returns:
        The pushes, whose `seconds` count from each server's first one; and what made the network slow ("network
        namespaces", "stamped links", "full speed").

    Raises:
        JobError: if this machine cannot emulate `network`.
        RunFailed: if the job fails.
    """
    with Local(network=network, warm=True).launch(job.replace(arguments={"log-pushes": 1})) as run:
        table = run.wait().metrics
    logs = [log.sort_values("step") for _, log in table.dropna(subset=["pusher"]).groupby("worker")]
    pushes = Pushes(
        np.array([log["pusher"].to_numpy(int) for log in logs]),
        np.array([log["push_seconds"].to_numpy(float) for log in logs]),
        np.array([log["staleness"].to_numpy(int) for log in logs]),
    )
    return pushes, run.emulation or "full speed"


def predicted(job: TrainingJob, link: Link) -> Pushes:
    """The same by the event kernel, all behind such a `link`; starts nothing. Raises as `simulate_pushes` does."""
    arguments: dict[str, Any] = DEFAULTS | dict(job.arguments)
    steps = int(arguments["steps"])
    arrangement = Arrangement(
        job.parameter_servers, job.workers, steps, arguments["consistency"], int(arguments["bound"])
    )
    times = compute_times(
        job.workers,
        steps,
        float(arguments["compute-seconds"]),
        float(arguments["jitter"]),
        seed=int(arguments["seed"]),
    )
    return simulate_pushes(arrangement, int(arguments["nbytes"]), times, link)


def link_of(network: Network, how: str = "stamped links") -> Link:
    """A link of `network` as the simulated clock takes it: for payload, in namespaces, less what TCP's headers take."""
    bandwidth = network.bandwidth_bytes_per_second if how == "stamped links" else goodput(network)
    return Link(network.latency_seconds, bandwidth)


def summary(pushes: Pushes) -> pd.Series:
    """Updates per second, and mean and largest staleness, in the steady part of a run."""
    steady = pushes.steady()
    return pd.Series(
        {
            "updates per second": steady.updates_per_second,
            "mean staleness": float(steady.staleness.mean()),
            "largest staleness": float(steady.staleness.max()),
        }
    )
