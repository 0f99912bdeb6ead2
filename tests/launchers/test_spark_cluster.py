"""A Spark cluster of real processes: who may enter, what becomes of a job whose executor is killed, what is left."""

import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import MakeJob, Watch, eventually, marked_processes
from test_spark import PATIENCE_SECONDS, listening

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.spark import Spark, SparkRun, StandaloneCluster
from workshop_utils.runs import RunFailed, RunState

JOBS = Path(__file__).parents[2] / "jobs"

pytestmark = pytest.mark.timeout(600)  # two JVMs and four Pythons for a job, on a busy machine


@pytest.fixture(scope="module")
def cluster() -> Iterator[StandaloneCluster]:
    """A cluster for all tests here; after them nothing is left of it, nor of what it has run."""
    before = set(marked_processes())
    with StandaloneCluster(workers=2) as started:
        secret = started.settings().secret_file
        assert secret is not None
        yield started
    assert eventually(lambda: not set(marked_processes()) - before), marked_processes()
    assert not secret.parent.exists()


def test_the_cluster_is_on_loopback_and_lets_nobody_in_without_its_secret(
    cluster: StandaloneCluster, make_job: MakeJob
) -> None:
    assert listening(set(cluster.process_ids.values())) == {"127.0.0.1"}
    secret = cluster.settings().secret_file
    assert secret is not None
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    request = Spark(cluster.settings()).render(make_job("", strategy="torch_ddp", workers=2))
    assert f"spark.authenticate.secret {secret.read_text()}\n" in request.files["conf/spark-defaults.conf"]
    assert "spark.authenticate.secret ****\n" in str(request)
    assert secret.read_text() not in str(request)


def test_after_a_killed_executor_all_ranks_go_on_from_the_checkpoint_as_often_as_restarts_allow(
    cluster: StandaloneCluster, watch: Watch
) -> None:
    job = TrainingJob.load(JOBS / "digits_resumable").replace(timeout="4min")
    slow = job.replace(arguments={"steps": 200, "checkpoint-steps": 5, "step-seconds": 0.05})
    with Spark(cluster.settings(restarts=1)).launch(slow) as run:
        for attempt, step in ((0, 12), (1, 24)):
            watch.eventually(lambda least=(attempt, step): has_reached(run, *least), PATIENCE_SECONDS)
            assert run.state is RunState.RUNNING, run.reason
            (executor,) = cluster.executors("worker-1")
            psutil.Process(executor).kill()
        with pytest.raises(RunFailed) as failure:
            run.wait(PATIENCE_SECONDS)
    assert f"{job.name} failed: executor" in str(failure.value)
    assert "was lost (Command exited with code 137); the others were stopped." in str(failure.value)
    assert len(run.starts) == 4  # two ranks, twice
    said = [line.text for line in run.logs(worker="driver-0")]
    assert any(line.startswith("Spark: all ranks are started anew after:") for line in said)
    (resumed,) = [line.text for line in run.logs() if line.text.startswith("resumed after step")]
    again = [record["step"] for record in run.records if record["attempt"] == 1]
    assert min(again) - 1 == int(resumed.split()[-1]) >= 10
    # Every step was the same as in an undisturbed run, bit by bit.
    with Local(warm=True).launch(job.replace(arguments={"steps": 200})) as undisturbed:
        undisturbed.wait(PATIENCE_SECONDS)
    losses = {(record["rank"], record["step"]): record.get("loss") for record in undisturbed.records}
    assert all(record["loss"] == losses[record["rank"], record["step"]] for record in run.records)
    # The cluster outlives the job, and has no executor of it left.
    assert watch.eventually(lambda: not cluster.executors("worker-0") + cluster.executors("worker-1"), 60)


def has_reached(run: SparkRun, attempt: int, step: int) -> bool:
    """Whether the attempt is so far, or the run has ended."""
    steps = [record["step"] for record in run.records if record["attempt"] == attempt]
    return max(steps, default=0) >= step or run.state is not RunState.RUNNING
