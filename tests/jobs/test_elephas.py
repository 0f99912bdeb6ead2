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


def test_the_lock_fixes_every_version_and_lacks_what_the_workshop_brings() -> None:
    lines = [
        line.partition(";")[0].strip()
        for line in (JOB / "requirements.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(line.count("==") == 1 for line in lines)
    assert not {"pyspark", "cython"} & {line.partition("==")[0] for line in lines}


def listening(pid: int | None) -> set[str]:
    """The addresses on which a process or a descendant of it listens now."""
    found: set[str] = set()
    if pid is None:
        return found
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                connections = process.net_connections("inet")
                found |= {
                    c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN
                }
    return found


# A tenth is what guessing gives; with a server, which worker comes when decides the rest.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "epochs", "least"), [("asynchronous", 3, 0.5)])  # lesson 14 runs the others
def test_every_mode_trains(mode: str, epochs: int, least: float) -> None:
    job = TrainingJob.load(JOB).replace(arguments={"mode": mode, "epochs": epochs})
    addresses: set[str] = set()
    with Spark().launch(job) as run:
        while run.state is RunState.RUNNING:
            addresses |= listening(run.process_ids.get("driver-0"))
            with contextlib.suppress(TimeoutError):
                run.wait(0.5)
        run.wait(PATIENCE_SECONDS)
    assert addresses == {"127.0.0.1"}  # Spark's, and the parameter server's
    (record,) = run.records
    assert record["accuracy"] > least
    said = [line.text for line in run.logs()]
    assert any("Async training complete" in line for line in said) == (mode != "synchronous")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_batch_that_leaves_a_partition_nothing_to_train_on_is_refused() -> None:
    job = TrainingJob.load(JOB).replace(arguments={"mode": "hogwild", "batch-size": 1000})
    with Spark().launch(job) as run, pytest.raises(RunFailed, match="must have more than a batch"):
        run.wait(PATIENCE_SECONDS)


def test_the_server_by_sockets_is_no_choice() -> None:
    job = TrainingJob.load(JOB).replace(arguments={"server": "socket"})
    with Spark().launch(job) as run, pytest.raises(RunFailed, match="invalid choice: 'socket'"):
        run.wait(PATIENCE_SECONDS)
