"""The job that measures collectives: results, messages and bytes between real processes."""

from pathlib import Path

import pytest

from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local

JOBS = Path(__file__).parents[2] / "jobs"
pytestmark = pytest.mark.processes


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
