"""Real processes, started and ended. The scripts are plain Python, so that a test takes a fraction of a second."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest
from conftest import eventually, failure_of, marked_processes, save

from workshop_utils.jobs import JobError
from workshop_utils.jobs.function import TRAVELS
from workshop_utils.launchers.local import Local
from workshop_utils.runs import RunFailed, RunState

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]

# Says who it is, and then does what its command line asks of the rank that is meant.
SAY = """
    import os, signal, subprocess, sys, time
    from workshop_utils import place
    here = place.here()
"""
SLEEP = (
    SAY
    + """
    print("ready", flush=True)
    time.sleep(1000)
"""
)


def until_ready(run, workers=1):
    """Wait until so many workers have printed `ready`."""
    lines = run.logs(follow=True)
    for _ in range(workers):
        # Somewhere in a line, since an orphan may print into the same pipe.
        assert any("ready" in line.text for line in lines), run.reason


# What a worker is, and what comes back


def test_a_job_succeeds_and_its_lines_and_metrics_come_back(make_job, watch):
    job = make_job(SAY, """
    print("hello from", here.name, "of", here.world_size)
    print("a warning", file=sys.stderr)
    place.report(step=1, loss=0.5 + here.rank, accuracy=0.1)
    place.report(step=2, loss=0.25 + here.rank, samples_per_second=100)
    """, strategy="torch_ddp", workers=3)  # fmt: skip
    run = Local().launch(job)
    assert run.wait(60) is run
    assert run.state is RunState.SUCCEEDED
    assert run.workers == ("worker-0", "worker-1", "worker-2")
    assert sorted(line.text for line in run.logs() if line.stream == "stdout") == [
        f"hello from worker-{rank} of 3" for rank in range(3)
    ]
    assert [line.text for line in run.logs(worker="worker-2") if line.stream == "stderr"] == ["a warning"]
    table = run.metrics
    assert len(table) == 6
    assert list(table[table["worker"] == "worker-2"]["loss"]) == [2.5, 2.25]
    assert sorted(table["rank"].unique()) == [0, 1, 2]
    assert table["seconds"].between(0, run.seconds).all()
    assert {start["pid"] for start in run.starts} == set(run.process_ids.values())
    # At once, not eventually: a run that has ended has left nothing.
    assert not any(map(watch.alive, run.process_ids.values()))
    assert watch.reserved_ports() == []


NAMES = ("COLOUR", "FROM_OUTSIDE", "RANK", "TF_CONFIG", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")


def test_a_worker_finds_arguments_variables_data_and_folders(make_job, data_folder, monkeypatch):
    monkeypatch.setenv("RANK", "7")  # as if launched from inside another job
    monkeypatch.setenv("TF_CONFIG", "not for the job")
    monkeypatch.setenv("FROM_OUTSIDE", "kept")
    job = make_job(f"names = {NAMES}", """
    import json, os, sys
    from pathlib import Path
    from workshop_utils import place
    here = place.here()
    print(json.dumps({
        "arguments": sys.argv[1:], "folder": os.getcwd(), "images": place.load("test").count,
        "data": str(here.data_folder), "model": here.model_folder.is_dir(),
        "variables": {name: os.environ.get(name) for name in names},
        "package": sorted(file.name for file in Path(place.__file__).parent.rglob("*.py")),
    }))
    """, arguments={"epochs": 3, "batch-size": 32}, environment={"COLOUR": "red"})  # fmt: skip
    run = Local().launch(job).wait(60)
    (line,) = run.logs()
    assert json.loads(line.text) == {
        "arguments": ["--batch-size", "32", "--epochs", "3"],
        "folder": str(job.folder),
        "images": 2,
        "data": str(data_folder),
        "model": True,
        "variables": dict(zip(NAMES, ("red", "kept", None, None, "1", "1"), strict=True)),
        "package": sorted(["__init__.py", *(f"{module.rpartition('.')[2]}.py" for module in TRAVELS)]),
    }


def test_long_lines_odd_bytes_and_a_last_line_without_its_end_come_whole(make_job):
    job = make_job(
        """
    import os
    os.write(1, b"x" * 300_000 + b"\\n")
    os.write(1, b"caf\\xc3\\xa9 \\xff\\r\\n\\n")
    os.write(1, b"no end")
    """
    )
    run = Local().launch(job).wait(60)
    assert [line.text for line in run.logs()] == ["x" * 300_000, "café \ufffd", "", "no end"]


# Bad ends


@pytest.mark.parametrize("strategy", ["torch_ddp", pytest.param("mpi", marks=pytest.mark.processes)])
def test_a_run_fails_when_a_worker_does_and_says_who_how_and_why(strategy, make_job, watch, nothing_is_left):
    job = make_job(SAY, f"""
    if {strategy == "mpi"}:
        from mpi4py import MPI
    else:
        print("ready", flush=True)
    if here.rank == 1:
        raise RuntimeError("the gradient is gone")
    time.sleep(1000)
    """, strategy=strategy, workers=3)  # fmt: skip
    run = Local().launch(job)
    message = failure_of(run)
    failed = f"{job.name} failed: worker-1 (rank 1) ended with exit code 1; the others were stopped."
    assert message.startswith(f"{failed} Its traceback:\n")
    assert f"RuntimeError: the gradient is gone\nThe whole log is in {run.log_folder}/worker-1.log" in message
    assert run.state is RunState.FAILED
    assert run.reason == message
    assert not any(map(watch.alive, run.process_ids.values()))
    assert list(nothing_is_left.iterdir()) == []  # Open MPI keeps its session there


def test_a_killed_worker_makes_the_run_fail_within_seconds_though_the_others_ignore_sigterm(make_job, watch):
    script = SLEEP.replace("print", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    print")
    run = Local().launch(make_job(script, strategy="torch_ddp", workers=3))
    until_ready(run, 3)
    assert watch.reserved_ports()  # which no other launch can take while the run lasts
    os.kill(run.process_ids["worker-2"], signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"worker-2 \(rank 2\) was killed by SIGKILL"):
        run.wait(60)
    assert not any(map(watch.alive, run.process_ids.values()))


@pytest.mark.parametrize(
    ("is_warm", "end", "message"),
    [
        (
            False,
            "os.abort()",
            r"SIGABRT; .*\. Fatal Python error: Aborted, at train\.py, line 4 \(in crash\)\. ",
        ),
        (
            True,
            "ctypes.string_at(0)",
            r"SIGSEGV; .*: Segmentation fault, at train\.py, line 4 \(in string_at\)\. ",
        ),
    ],
)
def test_a_worker_that_a_fatal_signal_ends_is_blamed_with_the_scripts_lines(is_warm, end, message, make_job):
    script = f"""
    import ctypes, numpy, os, time
    def crash():
        {end}
    print("ready", flush=True)
    crash() if os.environ["RANK"] == "1" else time.sleep(1000)
    """
    run = Local(warm=is_warm).launch(make_job(script, strategy="torch_ddp", workers=2))
    text = failure_of(run)
    assert run.warm == is_warm
    assert re.search(rf"worker-1 .*was killed by {message}Its stack", text)
    assert "  crash (train.py, line 4)\n  <module> (train.py, line 6)\nIts last lines:\n  ready\n" in text


# What a worker leaves behind

# In a session of its own, as a daemon, deaf to signals, and never silent.
ORPHANS = """
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.run(["sh", "-c", "(setsid sleep 1000 >/dev/null 2>&1 &) &"])
    subprocess.Popen(["sh", "-c", 'trap "" TERM HUP INT; sleep 1000; sleep 1000'])
    subprocess.Popen(["yes"])
    print("ready", flush=True)
"""


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        ("time.sleep(1000)", RunState.STOPPED),
        ("pass", RunState.SUCCEEDED),
        ("sys.exit(3)", RunState.FAILED),
    ],
)
def test_what_a_worker_started_ends_with_the_run(ending, state, make_job, watch):
    with Local().launch(make_job(SAY, ORPHANS, ending)) as run:
        until_ready(run)
        if state is not RunState.STOPPED:
            assert watch.eventually(lambda: run.state is not RunState.RUNNING)
    run.stop()  # once more, which changes nothing
    assert run.state is state


# The owner's end


def owner(job, body, warm=False):
    """A Python process that launches `job` as `run`, and does `body` once all workers are ready.

    It leads a process group of its own, as a notebook's kernel does.
    """
    script = f"""
        import os, time
        from workshop_utils.jobs import TrainingJob
        from workshop_utils.launchers.local import Local
        job = TrainingJob.load({str(job.folder)!r})
        run = Local(warm={warm}).launch(job)
        lines = run.logs(follow=True)
        for _ in run.workers:
            assert any(line.text == "ready" for line in lines)
    """
    save(job)
    words = [sys.executable, "-c", textwrap.dedent(script) + textwrap.dedent(body)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_an_interrupt_while_a_run_starts_leaves_nothing(make_job):
    job, kept = make_job("import time", "time.sleep(3)"), []
    for milliseconds in range(20):
        alarm = threading.Timer(milliseconds / 1000, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt) as interrupt:
            assert [alarm.start(), Local().launch(job).wait()]
        kept.append(interrupt.value)  # as a notebook does, with what led to the error
    assert eventually(lambda: not marked_processes())


@pytest.mark.parametrize(
    ("then", "warm"),
    [
        ("while True: print('x' * 1000)", False),  # into a pipe that nobody reads any more
        ("import numpy; time.sleep(1000)", True),
    ],
)
def test_a_killed_owner_leaves_nothing_though_a_child_that_it_forked_still_holds_its_pipes(
    then, warm, make_job, watch, nothing_is_left, tmp_path
):
    job = make_job(SLEEP.replace("time.sleep(1000)", then), checkpoints=str(tmp_path))
    body = """
        child = os.fork()
        if child == 0:
            os.close(1)
            time.sleep(1000)
            os._exit(0)
        print(child, flush=True)
        time.sleep(1000)
    """
    before = set(watch.marked_processes())
    with owner(job, body, warm) as process:
        child = int(process.stdout.readline())
        process.kill()
    try:
        # A warm server, too, ends with its owner.
        assert watch.eventually(lambda: set(watch.marked_processes()) - before == {child})
        assert watch.eventually(lambda: not list(nothing_is_left.glob("workshop-*")))
        Local().launch(job).stop()  # its folder is free again
    finally:
        os.kill(child, signal.SIGKILL)


# Two runs


@pytest.mark.parametrize("warm", [False, True])
def test_the_folders_of_a_run_are_closed_to_others_until_it_has_ended(warm, make_job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = make_job(f"import {'numpy' if warm else 'sys'}", SLEEP, checkpoints="saved", outputs="saved")
    after = make_job("print('after')", checkpoints=str(tmp_path / "kept" / ".." / "saved"), outputs="other")
    apart = make_job("", checkpoints="saved/below")
    holder = f"{job.name} \\(process {os.getpid()}\\)"
    ask = "stop it, wait for its end, or give another folder"
    with Local(warm=warm).launch(job) as run:
        until_ready(run)
        for field, second in (
            ("checkpoints", job),
            ("checkpoints", after),
            ("outputs", apart.replace(outputs="saved")),
        ):
            value = re.escape(repr(getattr(second, field)))
            with pytest.raises(JobError, match=f"^{field} is {value}; {holder} writes there: {ask}$"):
                Local(warm=warm).launch(second)
        Local().launch(apart).wait(60)
        run.stop()
        assert [line.text for line in Local(warm=warm).launch(after).wait(60).logs()] == ["after"]
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"logs", "below"}


def test_a_killed_supervisor_locks_no_folder(make_job, tmp_path):
    job = make_job(SLEEP, checkpoints=str(tmp_path / "saved"))
    run = Local().launch(job)
    until_ready(run)
    psutil.Process(run.process_ids["worker-0"]).parent().kill()
    with pytest.raises(RunFailed, match="the process that watches over it was killed"):
        run.wait(60)
    Local().launch(job).stop()


# Many


def test_a_launch_and_the_check_up_import_nothing_that_takes_longer_than_they():
    heavy = {
        "boto3",
        "horovod",
        "kubernetes",
        "matplotlib",
        "numpy",
        "pandas",
        "pyspark",
        "tensorflow",
        "torch",
    }
    script = """
import sys
from workshop_utils import cli
from workshop_utils.launchers import local, targets
from workshop_utils.setup import doctor
doctor.examine()
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())


def test_launching_again_and_again_keeps_no_descriptors_and_no_threads(make_job, watch):
    job = make_job("print('hello')", strategy="torch_ddp", workers=2)
    Local().launch(job).wait(60)
    this = psutil.Process()
    before = this.num_fds(), this.num_threads()
    for _ in range(5):
        Local().launch(job).wait(60)
    assert watch.eventually(lambda: this.num_fds() <= before[0] and this.num_threads() <= before[1])


def test_what_is_rendered_and_a_launch_that_is_refused_keep_no_port(make_job, watch):
    job = make_job("", strategy="torch_ddp", workers=2)
    shown = Local().render(job)
    assert "MASTER_PORT=" in str(shown)
    assert watch.reserved_ports() == []
    job = job.replace(data="/nowhere")
    with pytest.raises(ValueError, match="data is '/nowhere'"):
        Local().launch(job)
    with pytest.raises(JobError, match="workers is 2"):
        Local().launch(job.replace(strategy="single"))
    assert watch.reserved_ports() == []
