"""The command line as a process: what a learner sees, its exit codes, and that nothing is left behind.

Each mistake that can be foreseen is in `guards/bad_inputs.yaml`; each way to end is in
`guards/test_nothing_left_behind.py`.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import save
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.cli import terminal
from workshop_utils.jobs import JobError
from workshop_utils.launchers.local import Local
from workshop_utils.runs import RunState

REPORTS_THREE_STEPS = """
from workshop_utils import place
place.here()
for step in range(3):
    place.report(step=step, loss=1 / (step + 1), samples_per_second=1000)
"""
COMMAND = [sys.executable, "-c", "from workshop_utils.cli import main; main()", "launch"]

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]


def launch(job, *arguments):
    save(job)
    return subprocess.run([*COMMAND, str(job.folder), *arguments], capture_output=True, text=True, timeout=60)


def test_launch_prints_each_line_and_each_report_as_it_comes_and_logs_shows_them_again(make_job):
    job = make_job(REPORTS_THREE_STEPS, "print('10%\\r50%\\rdone')\nprint('odd \\x1b[A')")
    done = launch(job)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[2:5] == [
        "[worker-0] step 2, loss 0.3333, samples_per_second 1,000",
        "[worker-0] done",
        "[worker-0] odd \x1b[A",
    ]
    assert printed[5].startswith(f"{job.name}: succeeded")
    again = CliRunner().invoke(cli.app, ["logs", job.name]).output
    assert again.startswith("==> worker-0 <==\n")
    assert "\ndone\nodd \x1b[A\nthese files are in /" in again
    with pytest.raises(JobError, match=rf"there is no run 'nobody'; there are: .*{job.name}-2"):
        CliRunner().invoke(cli.app, ["logs", "nobody"], catch_exceptions=False)


def test_a_run_whose_checkpoints_another_writes_is_refused_and_says_whose_they_are(make_job, tmp_path):
    job = make_job("print('ready')\nimport time\ntime.sleep(600)", checkpoints=str(tmp_path))
    with Local().launch(job) as run:
        assert next(run.logs(follow=True)).text == "ready"
        done = launch(make_job(""), "--checkpoints", str(tmp_path))
    holder = f"checkpoints is '{tmp_path}'; {job.name} (process {os.getpid()}) writes there"
    assert done.stderr == f"workshop: {holder}: stop it, wait for its end, or give another folder\n"
    assert (done.returncode, done.stdout) == (2, "")


def test_what_the_terminal_cannot_show_is_replaced(tmp_path):
    folder = tmp_path / "runs" / "job-20261129-080255"
    folder.mkdir(parents=True)
    (folder / "worker-0.log").write_text("caf\u00e9\n", encoding="utf-8")
    environment = {**os.environ, "WORKSHOP_STATE": str(tmp_path), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*COMMAND[:-1], "logs"], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout == f"==> worker-0 <==\ncaf?\nthese files are in {folder}\n", done.stderr


def test_a_reader_that_closes_the_pipe_ends_the_run(make_job):
    job = make_job("while True: print('x' * 1000)")
    save(job)
    with subprocess.Popen(
        [*COMMAND, str(job.folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == f"[worker-0] {'x' * 1000}\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_an_interrupt_before_the_display_stops_the_run_as_well(make_job, monkeypatch):
    interrupted = []

    def show(run):
        interrupted.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "show", show)
    job = make_job("import time\ntime.sleep(600)")
    save(job)
    assert CliRunner().invoke(cli.app, ["launch", str(job.folder)]).exit_code == 130
    assert [run.state for run in interrupted] == [RunState.STOPPED]


@pytest.mark.parametrize("is_interrupt", [True, False])
def test_what_python_makes_of_an_interrupt_while_a_thread_starts_is_one(make_job, monkeypatch, is_interrupt):
    def launch(*_):
        try:
            raise KeyboardInterrupt if is_interrupt else ValueError
        finally:
            threading.Lock().release()  # as Condition.wait does then

    monkeypatch.setattr(Local, "launch", launch)
    save(job := make_job("pass"))
    done = CliRunner().invoke(cli.app, ["launch", str(job.folder)])
    assert (done.exit_code, "nothing is left running" in done.output) == (
        (130, True) if is_interrupt else (1, False)
    )
    assert isinstance(done.exception, SystemExit if is_interrupt else RuntimeError)


def test_three_interrupts_in_a_moment_are_one(make_job):
    job = make_job("""
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that to end it takes longer than the interrupts
    print("ready", flush=True)
    time.sleep(1000)
    """)
    save(job)
    with subprocess.Popen(
        [*COMMAND, str(job.folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "[worker-0] ready\n"
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.06)
        assert process.communicate(timeout=60)[1] == f"{job.name}: stopped, nothing is left running\n"
    assert process.returncode == 130
