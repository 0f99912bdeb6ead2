"""A Spark cluster of real processes: who may enter, what becomes of a job whose executor is killed, what is left."""

import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import MakeJob, Watch, eventually, marked_processes
from test_spark import GROUP, PATIENCE_SECONDS, RANK, listening

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.spark import Spark, StandaloneCluster
from workshop_utils.runs import RunFailed, RunState

JOBS = Path(__file__).parents[2] / "jobs"

pytestmark = pytest.mark.timeout(600)  # two JVMs and four Pythons for a job, on a busy machine


@pytest.fixture(scope="module")
def cluster() -> Iterator[StandaloneCluster]:
    """A cluster for all tests here; after them nothing is left of it, nor of what it has run."""
    before = set(marked_processes())
    with StandaloneCluster(workers=2) as started:
        yield started
    assert eventually(lambda: not set(marked_processes()) - before), marked_processes()
    assert not started._scratch.exists()


def test_the_cluster_is_on_loopback_and_lets_nobody_in_without_its_secret(
    cluster: StandaloneCluster, make_job: MakeJob
) -> None:
    assert listening(set(cluster.process_ids.values())) == {"127.0.0.1"}
    settings = cluster.settings()
    assert stat.S_IMODE(cluster._scratch.stat().st_mode) == 0o700
    request = Spark(settings).render(make_job("", strategy="torch_ddp", workers=2))
    assert settings.secret_file is not None
    assert settings.secret_file.read_text() not in str(request)


def test_after_an_executor_is_killed_all_ranks_go_on_from_the_checkpoint(
    cluster: StandaloneCluster, watch: Watch, tmp_path: Path
) -> None:
    steps = {"steps": 40, "checkpoint-steps": 5, "step-seconds": 0.05}
    job = TrainingJob.load(JOBS / "digits_resumable").replace(arguments=steps, timeout="4min")
    launcher = Spark(cluster.settings(restarts=1), output=tmp_path / "model")
    with launcher.launch(job) as run:
        assert watch.eventually(
            lambda: any(record["step"] >= 12 for record in run.records) or run.state is not RunState.RUNNING,
            PATIENCE_SECONDS,
        ), run.reason
        (executor,) = cluster.executors("worker-1")
        psutil.Process(executor).kill()
        run.wait(PATIENCE_SECONDS)
    assert len(run.starts) == 4  # two ranks, twice
    (resumed,) = [line.text for line in run.logs() if line.text.startswith("resumed after step")]
    assert int(resumed.split()[-1]) >= 10
    said = [line.text for line in run.logs(worker="driver-0")]
    assert any(line.startswith("Spark: all ranks are started anew after:") for line in said)
    assert max(record["step"] for record in run.records) == 40
    assert sorted({record["attempt"] for record in run.records}) == [0, 1]
    assert (
        min(record["step"] for record in run.records if record["attempt"] == 1)
        == int(resumed.split()[-1]) + 1
    )
    # What was interrupted has come to where an undisturbed run comes, bit by bit.
    with Local(output=tmp_path / "undisturbed").launch(job) as undisturbed:
        undisturbed.wait(PATIENCE_SECONDS)
    weights = [np.load(tmp_path / name / "model.npz")["weights"] for name in ("model", "undisturbed")]
    assert np.array_equal(*weights)


def test_without_restarts_a_killed_executor_is_what_the_run_failed_of(
    cluster: StandaloneCluster, make_job: MakeJob, watch: Watch
) -> None:
    job = make_job(
        RANK, GROUP, "place.report(1)\ntime.sleep(2)\ndist.all_reduce(total)\ntime.sleep(200)",
        strategy="torch_ddp", workers=2, timeout="4min",
    )  # fmt: skip
    with Spark(cluster.settings()).launch(job) as run:
        assert watch.eventually(lambda: len(run.records) == 2, PATIENCE_SECONDS), run.reason
        (executor,) = cluster.executors("worker-0")
        psutil.Process(executor).kill()
        with pytest.raises(RunFailed) as failure:
            run.wait(PATIENCE_SECONDS)
    assert f"{job.name} failed: executor" in str(failure.value)
    assert "was lost (Command exited with code 137); the others were stopped." in str(failure.value)
    # The cluster outlives the job, and has no executor of it left.
    assert watch.eventually(lambda: not cluster.executors("worker-0") + cluster.executors("worker-1"), 60)
