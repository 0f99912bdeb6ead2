"""Elephas in its own environment: every mode trains, and what it would let pass is refused."""

import contextlib
from pathlib import Path

import psutil
import pytest

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.spark import Spark
from workshop_utils.launchers.spark.launcher import environment_of
from workshop_utils.runs import RunFailed, RunState

JOB = Path(__file__).parents[2] / "jobs" / "elephas_digits"
PATIENCE_SECONDS = 280.0


@pytest.fixture(autouse=True)
def _leaves_nothing(nothing_is_left: None) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def _environment() -> None:
    """Made once, which is most of the time that these tests take on a fresh machine."""
    environment = environment_of(TrainingJob.load(JOB))
    assert environment is not None
    environment.build()


# A tenth is what guessing gives; with a server, which worker comes when decides the rest.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_asynchronous_mode_trains_and_listens_on_loopback_only() -> None:  # lesson 14 runs the others
    job = TrainingJob.load(JOB).replace(arguments={"mode": "asynchronous", "epochs": 3})
    addresses: set[str] = set()
    with Spark().launch(job) as run:
        while run.state is RunState.RUNNING:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                driver = psutil.Process(run.process_ids["driver-0"])
                for process in (driver, *driver.children(recursive=True)):
                    listening = [each for each in process.net_connections("inet") if each.status == "LISTEN"]
                    addresses |= {each.laddr.ip.removeprefix("::ffff:") for each in listening}
            with contextlib.suppress(TimeoutError):
                run.wait(0.5)
        run.wait(PATIENCE_SECONDS)
    assert addresses == {"127.0.0.1"}  # Spark's, and the parameter server's
    (record,) = run.records
    assert record["accuracy"] > 0.5
    assert any("Async training complete" in line.text for line in run.logs())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_batch_that_leaves_a_partition_nothing_to_train_on_is_refused_in_the_drivers_last_line() -> None:
    job = TrainingJob.load(JOB).replace(arguments={"mode": "hogwild", "batch-size": 1000})
    with Spark().launch(job) as run, pytest.raises(RunFailed) as failure:
        run.wait(PATIENCE_SECONDS)
    first, *_, last = str(failure.value).splitlines()
    assert first.startswith(f"{job.name} failed: driver-0 ended with exit code 1")
    assert last.startswith("  batch-size is 1000; each of 2 partitions has 750 images")
