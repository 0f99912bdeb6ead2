"""The event kernel and real processes: counts, bytes, bounds exactly; staleness and throughput to a tolerance."""

from pathlib import Path

import numpy as np
import pytest

from workshop_utils.comm.parameter_server import VERSION_NBYTES, server_bytes_received
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network
from workshop_utils.scaling.communication import link_of, measured_pushes, simulated_pushes, steady_rates

JOBS = Path(__file__).parents[2] / "jobs"
SLOW = Network(bandwidth="100Mbit", latency="2ms")


def job_of(workers, servers=1, **arguments):
    values = {"nbytes": 200_000, "steps": 10, "compute-seconds": 0.05, "jitter": 0.2, "seed": 3}
    return TrainingJob.load(JOBS / "measure_parameter_server").replace(
        workers=workers,
        parameter_servers=servers,
        arguments=values | {"consistency": "asynchronous"} | arguments,
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 6])  # before and behind the bend: 6 wait for the server's link
def test_real_processes_push_as_often_and_as_stale_as_the_kernel_says(workers):
    job = job_of(workers)
    pushes, how = measured_pushes(job, SLOW)
    kernel = simulated_pushes(job, link_of(SLOW, how))
    np.testing.assert_array_equal(np.bincount(pushes.worker[0]), np.bincount(kernel.worker[0]))
    real, simulated = steady_rates(pushes), steady_rates(kernel)
    assert real["mean staleness"] == pytest.approx(simulated["mean staleness"], rel=0.2)
    # A link lets through what it lets through; a busy machine may be slower, by how much is not the kernel's matter.
    assert 0.2 < real["updates per second"] / simulated["updates per second"] < 1.3


@pytest.mark.slow
def test_real_servers_receive_and_send_the_bytes_of_the_formulas_and_keep_the_bound():
    job = job_of(
        4, servers=2, consistency="stale_synchronous", bound=1, **{"log-pushes": 1, "compute-seconds": 0}
    )
    metrics = Local(warm=True).launch(job).wait(60).metrics
    ends = metrics.dropna(subset=["bytes_received"])
    assert set(ends["bytes_received"]) == {10 * server_bytes_received(4, 200_000, 2)}
    assert set(ends["bytes_sent"]) == {11 * (server_bytes_received(4, 200_000, 2) + 4 * VERSION_NBYTES)}
    for _, log in metrics.dropna(subset=["pusher"]).groupby("worker"):
        made = dict.fromkeys(range(4), 0)
        for pusher in log.sort_values("step")["pusher"].astype(int):
            assert made[pusher] - min(made.values()) <= 1
            made[pusher] += 1
        assert set(made.values()) == {10}
