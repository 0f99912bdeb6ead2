"""The command line: what a learner types, and the sentence that answers a mistake."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workshop_utils.jobs import TrainingJob

REPORTS_THREE_STEPS = """
from workshop_utils import place
place.here()
for step in range(3):
    place.report(step=step, loss=1 / (step + 1), samples_per_second=1000)
"""


def workshop(*arguments, **options):
    command = [sys.executable, "-c", "from workshop_utils.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.fixture
def job(make_job):
    made = make_job(REPORTS_THREE_STEPS)
    made.save(made.folder)
    return made


def test_launch_prints_each_report_and_the_end(job, nothing_is_left):
    done = workshop("launch", job.folder)
    assert done.returncode == 0, done.stderr
    assert "[worker-0] step 2, loss 0.3333, samples_per_second 1,000" in done.stdout
    assert f"{job.name}: succeeded" in done.stdout


def test_a_job_that_fails_is_started_again_when_asked_to(make_job, nothing_is_left):
    made = make_job(
        """
        import sys
        from workshop_utils import place
        place.here()
        place.report(step=7, loss=1.0)
        sys.exit(0 if place.restart_count() == 2 else "not yet")
        """
    )
    made.save(made.folder)
    done = workshop("launch", made.folder, "--restarts", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[worker-0] step 7") == 3
    done = workshop("launch", made.folder, "--restarts", "1")
    assert done.returncode == 1
    assert f"{made.name} had been restarted once before." in done.stderr


def test_render_starts_nothing_and_shows_the_command(job, nothing_is_left):
    done = workshop("launch", job.folder, "--render", "-a", "epochs=7")
    assert done.returncode == 0, done.stderr
    assert "train.py --epochs 7" in done.stdout
    assert "WORKSHOP_DATA=" in done.stdout


def test_the_secret_of_a_run_is_not_shown(make_job):
    made = make_job("", strategy="ring", workers=2)
    made.save(made.folder)
    assert "WORKSHOP_SECRET=****" in workshop("launch", made.folder, "--render").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workers", "0"], "workers is 0"),
        (["--workers", "2"], "workers is 2; strategy 'single' has one worker"),
        (["--timeout", "soon"], "timeout is 'soon'"),
        (["--network", "1GBit/s"], "bandwidth is '1GBit/s'; it must be a rate in bits"),
        (["--on", "mars"], "--on is 'mars'"),
        (["--restarts", "-1"], "restarts is -1; it must be at least 0"),
        (["--argument", "epochs"], "--argument is 'epochs'; it must be NAME=VALUE"),
        (["--data", "/nowhere"], "data is '/nowhere'"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence_and_nothing_starts(job, arguments, sentence, nothing_is_left):
    done = workshop("launch", job.folder, *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_job_that_is_not_there_is_named(tmp_path):
    done = workshop("launch", tmp_path / "nothing")
    assert done.returncode == 2
    assert "there is no job at" in done.stderr


def test_a_failing_worker_gives_exit_code_one_and_its_last_lines(make_job, nothing_is_left):
    made = make_job("import sys", "print('so far so good')", "sys.exit(3)")
    made.save(made.folder)
    done = workshop("launch", made.folder)
    assert done.returncode == 1
    assert "worker-0" in done.stderr
    assert "exit code 3" in done.stderr
    assert "so far so good" in done.stderr


def test_an_interrupt_stops_the_run_and_says_so(make_job, nothing_is_left):
    made = make_job("import time", "print('up', flush=True)", "time.sleep(600)")
    made.save(made.folder)
    command = [
        sys.executable,
        "-c",
        "from workshop_utils.cli import main; main()",
        "launch",
        str(made.folder),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(3)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped, nothing is left running" in said


def test_every_job_in_the_project_can_be_rendered(tmp_path):
    from workshop_utils.launchers.local import Local

    folders = sorted(path.parent for path in Path("jobs").glob("*/job.yaml"))
    assert len(folders) >= 8
    for folder in folders:
        assert "train.py" in str(Local().render(TrainingJob.load(folder)))
