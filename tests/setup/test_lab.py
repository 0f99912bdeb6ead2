"""JupyterLab while Horovod compiles in the background: what is started, who waits, and that everything ends."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import eventually

from workshop_utils.jobs import JobError
from workshop_utils.launchers.local import Local
from workshop_utils.setup import horovod_build, lab

SECONDS = 60.0
PROGRESS = "Horovod is being compiled: {} %, 1 min 1 s so far"

# A program that opens the lab where Horovod is missing; what it would start are scripts that note what they are.
PROGRAM = """
import sys
from pathlib import Path
from workshop_utils.setup import horovod_build, lab
horovod_build.has_horovod = lambda: False
sys.executable = sys.argv[1]
lab.open_lab(Path("my lessons/00_welcome.ipynb"))
"""
INSTEAD_OF_PYTHON = """#!/bin/bash
case "$*" in
*horovod_build*) echo "$*" > build; exec {python} -c "$BUILD" "$@" ;;
*) trap : INT; echo "$PATH $*" > server; until test -e end; do sleep 0.02; done; exit 3 ;;
esac
"""
# The build's own program, whose long part is a process that sleeps.
BUILD = """
import subprocess, sys
from workshop_utils.setup import horovod_build
def install():
    with subprocess.Popen(["sleep", "1000"]) as compiler:
        try:
            compiler.wait()
        except BaseException:
            compiler.kill()
            raise
horovod_build.install = install
sys.exit(horovod_build.main(int(sys.argv[3])))  # after -c, -m and the module
"""


@pytest.fixture
def opened(tmp_path):
    """The program above, once its server has noted what it is."""
    instead = tmp_path / "python"
    instead.write_text(INSTEAD_OF_PYTHON.format(python=sys.executable))
    instead.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(instead)], env={**os.environ, "BUILD": BUILD}, cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    server = tmp_path / "server"
    assert eventually(lambda: server.exists() and server.read_text(), SECONDS)
    yield process
    (tmp_path / "end").touch()
    process.wait(SECONDS)


def builders(process):
    """The build and its compiler, at the lowest priority."""
    with contextlib.suppress(psutil.NoSuchProcess):  # one has ended since
        children = psutil.Process(process.pid).children(recursive=True)
        return [child.pid for child in children if child.nice() == 19]
    return []


@pytest.mark.processes
@pytest.mark.parametrize("is_killed", [False, True])
def test_jupyterlab_opens_the_page_for_this_machine_alone_and_takes_the_build_with_it_when_it_ends(
    is_killed, opened, tmp_path, watch
):
    server = (tmp_path / "server").read_text()
    assert server.startswith(str(Path(sys.executable).parent))
    assert " -m jupyterlab --ServerApp.ip=127.0.0.1 " in server
    assert "/lab/tree/my%20lessons/00_welcome.ipynb" in server
    assert eventually(lambda: len(builders(opened)) == 2, SECONDS)
    pids = builders(opened)
    os.killpg(opened.pid, signal.SIGINT)  # a Ctrl-C is for JupyterLab, which asks, and continues
    assert all(map(watch.alive, pids))
    opened.kill() if is_killed else (tmp_path / "end").touch()
    assert opened.wait(SECONDS) == (-signal.SIGKILL if is_killed else 3)
    assert eventually(lambda: not any(map(watch.alive, pids)), SECONDS)


# Jobs that need it


@pytest.mark.processes
def test_a_job_waits_for_horovod_and_shows_how_far_it_is(make_job, monkeypatch, capsys):
    steps = iter([PROGRESS.format(42), PROGRESS.format(43), None])
    monkeypatch.setattr(horovod_build, "in_progress", lambda: next(steps))
    monkeypatch.setattr(horovod_build, "has_horovod", lambda: True)
    run = Local().launch(make_job("print('on')\nif False:\n    import horovod.torch")).wait(SECONDS)
    assert [line.text for line in run.logs()] == ["on"]
    first, second, last = capsys.readouterr().out.removeprefix("\r").split("\r")
    assert first == f"{PROGRESS.format(42)}. The job starts when that is finished."
    assert second.startswith(PROGRESS.format(43))
    assert last.rstrip() == "Horovod is ready."


@pytest.mark.processes
def test_without_horovod_its_strategies_are_refused_and_other_jobs_do_as_they_like(make_job, monkeypatch):
    monkeypatch.setattr(horovod_build, "in_progress", lambda: None)
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda _: None)
    careful = """
        try:
            import horovod.nothing_of_this_name
        except ImportError:
            print("without")
    """
    run = Local().launch(make_job(careful)).wait(SECONDS)
    assert [line.text for line in run.logs()] == ["without"]
    with pytest.raises(JobError, match="'horovod', but Horovod is not installed; `workshop install-horovod`"):
        Local().launch(make_job("import horovod.torch", strategy="horovod", workers=2))
