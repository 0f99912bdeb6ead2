"""Jobs on Spark: what is refused, ranks in a barrier stage, and a cluster of real processes that loses executors."""

import contextlib
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import eventually, failure_of, marked_processes

from workshop_utils.jobs import JobError
from workshop_utils.launchers.spark import Spark, StandaloneCluster
from workshop_utils.launchers.spark.driver import LineServer, explained
from workshop_utils.runs import RunState

JOBS = Path(__file__).parents[2] / "jobs"
PATIENCE_SECONDS = 240.0

pytestmark = pytest.mark.timeout(600)  # several JVMs, on a busy machine


def listening(pids):
    """The addresses on which these processes listen."""
    addresses = set()
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        addresses |= {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == "LISTEN"}
    return addresses


def family(pid):
    """A process and its descendants: their commands, by process id."""
    commands = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            commands[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue  # it has just ended
    return commands


def until(run, condition):
    """Whether `condition` becomes true, or the run ends."""
    return eventually(lambda: condition() or run.state is not RunState.RUNNING, PATIENCE_SECONDS)


# Before anything starts


def test_a_master_that_does_not_answer_is_named_before_anything_starts(make_job):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    job = make_job("", strategy="torch_ddp", workers=2)
    with pytest.raises(JobError, match=f"master is 'spark://127.0.0.1:{port}'; nobody answers there"):
        Spark(master=f"spark://127.0.0.1:{port}").launch(job)


MISMATCH = (
    "x: [PYTHON_VERSION_MISMATCH] Python in worker has different version (3, 6) than that in driver 3.11, "
    "PySpark cannot run with different minor versions."
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MISMATCH, "the executors' Python is 3.6, and the driver's 3.11"),
        ("\nsomething new\nand more", "something new"),
    ],
)
def test_a_failure_of_spark_is_explained_in_a_sentence(text, message):
    assert message in explained(text)


def test_the_server_for_ranks_lines_is_on_the_drivers_address_and_wants_its_secret(capfdbinary):
    server = LineServer("127.0.0.1")
    own = [c for c in psutil.Process().net_connections("inet") if c.laddr.port == server.address[1]]
    assert {connection.laddr.ip for connection in own} == {"127.0.0.1"}

    def send(secret, line):
        with socket.create_connection(server.address) as link:
            link.sendall(f"{secret} [worker-0]<stdout>: \n{line}".encode())
            link.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(1) == b""  # all that will be printed is

    earlier = server.secret
    send("wrong", "forged")
    send(earlier, "€\n\nhalf a line")
    server.next_attempt("again")
    send(earlier, "too late")
    tag = "[worker-0]<stdout>: "
    assert capfdbinary.readouterr().out.decode() == f"{tag}€\n{tag}\n{tag}half a line\nagain\n"


# Threads of this machine; lesson 14 trains there


@pytest.mark.usefixtures("nothing_is_left")
def test_ranks_run_on_loopback_and_the_one_that_fails_is_blamed(make_job, watch, tmp_path):
    job = make_job(
        """
        import os, pathlib, sys, time
        from workshop_utils import place
        here = place.here()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
        print(*[os.environ[name] for name in names], os.environ["MASTER_PORT"].isdigit(), *sys.argv[1:])
        print("to stderr", file=sys.stderr)
        here.model_folder.joinpath(here.name).touch()
        while not here.model_folder.joinpath("go").exists():
            time.sleep(0.05)
        if here.rank == 1:
            sys.exit("rank 1 has had enough")
        time.sleep(120)
        """,
        strategy="torch_ddp",
        workers=2,
        timeout="4min",
        arguments={"word": "it's"},
        outputs=str(tmp_path / "out"),
    )
    with Spark().launch(job) as run:
        assert until(run, lambda: len(list((tmp_path / "out").glob("worker-*"))) == 2)
        assert listening(family(run.process_ids["driver-0"])) == {"127.0.0.1"}
        (tmp_path / "out" / "go").touch()
        said = failure_of(run, PATIENCE_SECONDS)
    message = f"{job.name} failed: worker-1 (rank 1) ended with exit code 1; the others were stopped."
    assert said.startswith(message)
    assert said.endswith("rank 1 has had enough")
    assert sorted(start["rank"] for start in run.starts) == [0, 1]
    for rank in range(2):
        lines = {(line.stream, line.text) for line in run.logs(worker=f"worker-{rank}")}
        told = f"{rank} 2 {rank} 127.0.0.1 lo True --word it's"
        assert lines >= {("stdout", told), ("stderr", "to stderr")}


@pytest.mark.usefixtures("nothing_is_left")
def test_a_killed_launching_process_leaves_no_java_behind(tmp_path, watch):
    code = (
        "import time; from workshop_utils.jobs import TrainingJob; from workshop_utils.launchers.spark import Spark;"
        f"run = Spark().launch(TrainingJob.load({str(JOBS / 'mnist_torch_ddp')!r})); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as notebook:
        try:
            java = re.compile(r"\S+/java .*deploy\.SparkSubmit")
            assert watch.eventually(
                lambda: any(map(java.match, family(notebook.pid).values())), PATIENCE_SECONDS
            )
        finally:
            notebook.kill()
    # The fixture looks for what is left.


def test_a_spark_program_runs_as_the_driver_and_is_blamed_with_its_last_lines(make_job):
    job = make_job("""
        from pyspark.sql import SparkSession
        from workshop_utils import place
        place.here()
        session = SparkSession.builder.getOrCreate()
        place.report(step=1, total=session.sparkContext.parallelize(range(5), 2).sum())
        session.stop()
        raise SystemExit("the driver has had enough")
        """, strategy="spark_program", workers=2, timeout="4min")  # fmt: skip
    with Spark().launch(job) as run:
        said = failure_of(run, PATIENCE_SECONDS)
    assert [record["total"] for record in run.records] == [10]
    assert f"{job.name} failed: driver-0 ended with exit code 1" in said
    assert said.endswith("\n  the driver has had enough")


# A cluster of real processes


@pytest.fixture(scope="module")
def cluster():
    """A cluster for the tests below; nothing is left of it afterwards, nor of what it ran."""
    before = set(marked_processes())
    with StandaloneCluster(workers=2) as started:
        secret = started.spark().secret_file
        yield started
    assert eventually(lambda: not set(marked_processes()) - before), marked_processes()
    assert not secret.parent.exists()


def test_the_cluster_is_on_loopback_and_lets_nobody_in_without_its_secret(cluster, make_job):
    assert listening(set(cluster.process_ids.values())) == {"127.0.0.1"}
    secret = cluster.spark().secret_file
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    request = cluster.spark().render(make_job("", strategy="torch_ddp", workers=2))
    assert f"spark.authenticate.secret {secret.read_text()}\n" in request.files["conf/spark-defaults.conf"]
    assert "spark.authenticate.secret ****\n" in str(request)
    assert secret.read_text() not in str(request)


# Lesson 14 restarts an executor.
def test_a_lost_executor_is_named_and_the_cluster_outlives_its_job(cluster, make_job, watch):
    job = make_job("""
        import time
        from workshop_utils import place
        place.here()
        for step in range(1, 2000):
            place.report(step=step, loss=0.0)
            time.sleep(0.05)
        """, strategy="torch_ddp", workers=2, timeout="4min")  # fmt: skip
    with cluster.spark().launch(job) as run:
        until(run, lambda: {record["rank"] for record in run.records} == {0, 1})
        assert run.state is RunState.RUNNING, run.reason
        (executor,) = cluster.executors("worker-1")
        psutil.Process(executor).kill()
        said = failure_of(run, PATIENCE_SECONDS)
    assert f"{job.name} failed: executor" in said
    assert "was lost (Command exited with code 137); the others were stopped." in said
    # The cluster outlives the job, and has no executor of it left.
    assert watch.eventually(lambda: not cluster.executors("worker-0") + cluster.executors("worker-1"), 60)
