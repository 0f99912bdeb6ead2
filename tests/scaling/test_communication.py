"""The jobs that measure collectives and servers: results, messages and bytes between real processes."""

from pathlib import Path

import pytest

from workshop_utils.comm.parameter_server import REQUEST_NBYTES, server_bytes_received
from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local

JOBS = Path(__file__).parents[2] / "jobs"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("algorithm", ["ring", "central", "tree", "halving_doubling"])
def test_every_all_reduce_gives_the_mean_between_processes_and_is_timed_for_each_size(algorithm):
    workers = 3
    arguments = {"nbytes": "4,4004", "calls": 2, "repeats": 2, "algorithm": algorithm}
    job = TrainingJob.load(JOBS / "measure_all_reduce").replace(workers=workers, arguments=arguments)
    run = Local(warm=True).launch(job).wait(60)
    assert len(run.metrics) == workers * 2 * 2
    assert run.metrics["error"].max() < 1e-6
    assert sorted(run.metrics["nbytes"].unique()) == [4, 4004]
    if algorithm == "ring":
        sent = run.metrics.groupby("nbytes")["bytes_sent"].sum() / (2 * 2)
        assert sent[4004] == pytest.approx(workers * ring_bytes_sent(workers, 4004))


def test_real_servers_receive_and_send_the_bytes_of_the_formulas():
    job = TrainingJob.load(JOBS / "measure_parameter_server").replace(
        workers=4, parameter_servers=2, arguments={"nbytes": 200_000, "steps": 10}
    )
    ends = Local(warm=True).launch(job).wait(60).metrics.dropna(subset=["bytes_received"])
    pushed = server_bytes_received(4, 200_000, 2)  # in a step; workers pull as much, and once at the start
    assert set(ends["bytes_received"]) == {10 * pushed + 11 * 4 * REQUEST_NBYTES}
    assert set(ends["bytes_sent"]) == {
        11 * (pushed + 4 * 8)
    }  # with the version, in 8 bytes, before each answer
