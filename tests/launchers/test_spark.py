"""Jobs on Spark: what is refused before anything starts, and the workshop's scripts unmodified on threads."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import MakeJob, Watch

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.spark import Settings, Spark
from workshop_utils.launchers.spark.driver import LineServer, explained
from workshop_utils.runs import RunFailed, RunState

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "jobs"
PATIENCE_SECONDS = 240.0

pytestmark = pytest.mark.timeout(600)  # two JVMs and four Pythons for a job, on a busy machine
RANK = """
    import os, sys, time
    from workshop_utils import place
    here = place.here()
"""


@pytest.fixture(autouse=True)
def _leaves_nothing(nothing_is_left: None) -> None:
    pass


def listening(pids: set[int]) -> set[str]:
    """The addresses on which these processes listen."""
    found: set[str] = set()
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        found |= {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def family(pid: int) -> dict[int, str]:
    """A process and its descendants: their commands, by process id."""
    found = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue  # it has just ended
    return found


# What is said before anything starts


def test_a_master_that_nobody_answers_for_is_named_before_anything_is_started(make_job: MakeJob) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    job = make_job("", strategy="torch_ddp", workers=2)
    with pytest.raises(JobError, match=f"master is 'spark://127.0.0.1:{port}'; nobody answers there"):
        Spark(Settings(master=f"spark://127.0.0.1:{port}")).launch(job)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "x: [PYTHON_VERSION_MISMATCH] Python in worker has different version (3, 6) than that in driver 3.11, "
            "PySpark cannot run with different minor versions.",
            "the executors' Python is 3.6, and the driver's 3.11",
        ),
        ("\nsomething new\nand more", "something new"),
    ],
)
def test_what_spark_says_of_a_failure_comes_down_to_a_sentence(said: str, message: str) -> None:
    assert message in explained(said)


def test_the_servers_for_ranks_lines_listens_on_the_drivers_address_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = LineServer()
    server.start("127.0.0.1")
    own = [c for c in psutil.Process().net_connections("inet") if c.laddr.port == server.port]
    assert [connection.laddr.ip for connection in own] == ["127.0.0.1"]
    with socket.create_connection(("127.0.0.1", server.port or 0)) as link:
        for text in (b"[worker-0]<stdout>: one", b"", b"[worker-0]<stdout>: \xe2\x82\xac"):
            link.sendall(len(text).to_bytes(4, "big") + text)
    server.shutdown()  # returns once all that was sent has been said
    assert capfd.readouterr().out == "[worker-0]<stdout>: one\n\n[worker-0]<stdout>: €\n"


# For real, on threads of this machine


def test_the_workshops_script_runs_unmodified_in_a_barrier_stage(tmp_path: Path, watch: Watch) -> None:
    job = TrainingJob.load(JOBS / "mnist_torch_ddp").replace(arguments={"epochs": 2})
    with Spark(output=tmp_path / "model").launch(job) as run:
        assert watch.eventually(
            lambda: len(run.starts) == 2 or run.state is not RunState.RUNNING, PATIENCE_SECONDS
        )
        jvms = {
            pid
            for pid, command in family(run.process_ids["driver-0"]).items()
            if "java" in command.partition(" ")[0]
        }
        assert listening(jvms) == {"127.0.0.1"}
        run.wait(PATIENCE_SECONDS)
    metrics = run.metrics
    assert set(metrics["worker"]) == {"worker-0", "worker-1"}
    assert sorted(start["rank"] for start in run.starts) == [0, 1]  # and each once
    steps = metrics[metrics["loss"].notna()].groupby("worker")["step"].apply(list)
    assert steps["worker-0"] == steps["worker-1"]
    assert metrics["accuracy"].dropna().iloc[-1] > 0.6
    assert (tmp_path / "model" / "model.pt").is_file()


def test_a_rank_that_fails_is_blamed_and_the_others_are_stopped(make_job: MakeJob) -> None:
    job = make_job(
        RANK,
        """
        print("to stderr", file=sys.stderr)
        if here.rank == 1:
            sys.exit("rank 1 has had enough")
        time.sleep(120)
        """,
        strategy="torch_ddp",
        workers=2,
        timeout="4min",
    )
    with Spark().launch(job) as run, pytest.raises(RunFailed) as failure:
        run.wait(PATIENCE_SECONDS)
    assert str(failure.value).startswith(
        f"{job.name} failed: worker-1 (rank 1) ended with exit code 1; the others were stopped."
    )
    assert str(failure.value).endswith("rank 1 has had enough")
    assert next(line.text for line in run.logs(worker="worker-1") if line.stream == "stderr") == "to stderr"


def test_who_is_killed_while_a_job_runs_leaves_no_java_behind(tmp_path: Path, watch: Watch) -> None:
    code = (
        "import time; from workshop_utils.jobs import TrainingJob; from workshop_utils.launchers.spark import Spark;"
        f"run = Spark().launch(TrainingJob.load({str(JOBS / 'mnist_torch_ddp')!r})); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as notebook:
        try:
            assert watch.eventually(
                lambda: any(
                    "deploy.SparkSubmit" in command and command.partition(" ")[0].endswith("/java")
                    for command in family(notebook.pid).values()
                ),
                PATIENCE_SECONDS,
            )
        finally:
            notebook.kill()
    # The fixture looks for what is left.
