"""JupyterLab while Horovod compiles behind it: what is started, who waits, what is said, and that all of it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import MakeJob

from workshop_utils import horovod_build, lab
from workshop_utils.horovod_build import Progress
from workshop_utils.jobs import JobError
from workshop_utils.launchers.local import Local

SECONDS = 60.0

# A program that opens the lab where Horovod is missing; what it would start are scripts that note what they are.
PROGRAM = """
import sys
from pathlib import Path
from workshop_utils import horovod_build, lab
horovod_build.is_installed = lambda: False
sys.executable = sys.argv[1]
lab.open_lab(Path("my lessons/00_welcome.ipynb"))
"""
INSTEAD_OF_PYTHON = """#!/bin/bash
case "$*" in
*horovod_build*) echo "$*" > build; exec {python} -c "$BUILD" "$@" ;;
*) trap : INT; echo "$*" > server; echo "$PATH" > path; until test -e end; do sleep 0.02; done; exit 3 ;;
esac
"""
# The build's own program, whose long part is a process that sleeps.
BUILD = """
import subprocess, sys
from workshop_utils import horovod_build
def install(**_):
    with subprocess.Popen(["sleep", "1000"]) as compiler:
        try:
            compiler.wait()
        except BaseException:
            compiler.kill()
            raise
horovod_build.install = install
sys.exit(horovod_build.main(sys.argv[3:]))  # after -c, -m and the module
"""


class OpenLab:
    """The program above in `folder`; `build` is what runs as Horovod's build."""

    def __init__(self, folder: Path, build: str) -> None:
        self.folder = folder
        instead = folder / "python"
        instead.write_text(INSTEAD_OF_PYTHON.format(python=sys.executable))
        instead.chmod(0o755)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(instead)], env={**os.environ, "BUILD": build},
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        wait_for(lambda: (folder / "build").exists() and (folder / "server").exists())

    def builders(self) -> list[psutil.Process]:
        """The build and what it has started, once its compiler runs."""
        found: list[psutil.Process] = []

        def look() -> bool:
            children = psutil.Process(self.process.pid).children(recursive=True)
            found[:] = [child for child in children if child.nice() == 19]
            return len(found) == 2

        wait_for(look)
        return found


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenLab]:
    made = OpenLab(tmp_path, BUILD)
    yield made
    (tmp_path / "end").touch()
    made.process.communicate(timeout=SECONDS)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "not within its time"
        time.sleep(0.02)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_jupyterlab_listens_here_alone_and_opens_the_page(opened: OpenLab, tmp_path: Path) -> None:
    wait_for(lambda: (tmp_path / "path").exists())
    server = (tmp_path / "server").read_text()
    assert server.startswith("-m jupyterlab --ServerApp.ip=127.0.0.1")
    assert "/lab/tree/my%20lessons/00_welcome.ipynb" in server
    wait_for(lambda: (tmp_path / "path").read_text().startswith(str(Path(sys.executable).parent)))
    wait_for(lambda: (tmp_path / "build").read_text() != "")
    build = f"-m workshop_utils.horovod_build --in-background {opened.process.pid}\n"
    assert (tmp_path / "build").read_text() == build


def test_a_ctrl_c_is_for_jupyterlab_and_its_end_is_that_of_the_build(opened: OpenLab, tmp_path: Path) -> None:
    builders = opened.builders()
    os.killpg(opened.process.pid, signal.SIGINT)  # as a terminal does; JupyterLab asks, and goes on
    assert not any(map(is_gone, builders))
    (tmp_path / "end").touch()
    assert opened.process.wait(SECONDS) == 3
    wait_for(lambda: all(map(is_gone, builders)))


def test_a_killed_jupyterlab_takes_the_build_with_it(opened: OpenLab) -> None:
    builders = opened.builders()
    opened.process.kill()
    wait_for(lambda: all(map(is_gone, builders)))


def test_that_it_is_built_or_why_not_is_said_when_it_is_known(tmp_path: Path) -> None:
    failing = BUILD.replace(
        "    with", "    raise horovod_build.HorovodBuildError('No compiler.\\n    Install one.')\n    with"
    )
    opened = OpenLab(tmp_path, failing)
    stdout = opened.process.stdout
    assert stdout is not None
    assert "Horovod compiles in the background" in stdout.readline()
    assert stdout.readline() == "Horovod is not installed. No compiler.\n"
    assert stdout.readline() == "    Install one.\n"
    (tmp_path / "end").touch()
    opened.process.communicate(timeout=SECONDS)


def test_a_folder_that_jupyterlab_would_not_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=f"folder is '{tmp_path}'; it must be below"):
        lab.open_lab(tmp_path)


# Jobs that need it


@pytest.mark.parametrize(
    ("is_built", "outcome"),
    [(True, "Horovod is ready."), (False, "Horovod could not be built, or its build was ended.")],
)
def test_a_job_waits_for_horovod_and_shows_how_far_it_is(
    is_built: bool,
    outcome: str,
    make_job: MakeJob,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = iter([Progress(42, 61.0), Progress(43, 120.0), None])
    monkeypatch.setattr(horovod_build, "in_progress", lambda: next(steps))
    monkeypatch.setattr(horovod_build, "is_installed", lambda: is_built)
    script = (
        "from workshop_utils import place\nif place.here().rank > 9:\n    import horovod.torch\nprint('on')"
    )
    run = Local().launch(make_job(script, strategy="single")).wait(SECONDS)
    assert [line.text for line in run.logs()] == ["on"]
    first, second, last = capsys.readouterr().out.removeprefix("\r").split("\r")
    assert first == "Horovod is being compiled: 42 %, 1 min 1 s so far. The job starts when that is finished."
    assert second.startswith("Horovod is being compiled: 43 %, 2 min 0 s so far.")
    assert len(second) >= len(first)  # each line covers the one before
    assert last.rstrip() == outcome
    assert len(last.rstrip("\n")) >= len(second.rstrip())


def test_without_horovod_its_strategies_are_refused_and_other_jobs_do_as_they_like(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horovod_build, "in_progress", lambda: None)
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda _: None)
    careful = "try:\n    import horovod_\nexcept ImportError:\n    print('without')"
    careful = careful.replace("horovod_", "horovod.nothing_of_this_name")
    run = Local().launch(make_job(careful, strategy="single")).wait(SECONDS)
    assert [line.text for line in run.logs()] == ["without"]
    with pytest.raises(
        JobError, match=r"strategy is 'horovod', but Horovod is not installed; `workshop install-horo"
    ):
        Local().launch(make_job("import horovod.torch", strategy="horovod", workers=2))


# Cells that measure


class Events:
    """IPython's events, of which a test says when they come."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Any]] = {"pre_run_cell": [], "post_run_cell": []}
        self.now = 0.0

    def register(self, event: str, callback: Any) -> None:
        self.callbacks[event].append(callback)

    def unregister(self, event: str, callback: Any) -> None:
        self.callbacks[event].remove(callback)

    def run_cell(self, seconds: float, then: Callable[[], None] = lambda: None) -> None:
        for callback in list(self.callbacks["pre_run_cell"]):
            callback(None)
        self.now += seconds
        then()
        for callback in list(self.callbacks["post_run_cell"]):
            callback(None)


def test_a_longer_cell_says_that_horovod_compiles_until_it_does_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = Events()
    shell = type("Shell", (), {"events": events})()
    monkeypatch.setitem(
        sys.modules, "IPython", type("IPython", (), {"get_ipython": staticmethod(lambda: shell)})
    )
    progress: list[Progress | None] = [Progress(42, 61.0)]
    monkeypatch.setattr(horovod_build, "in_progress", lambda: progress[0])
    monkeypatch.setattr(lab.time, "monotonic", lambda: events.now)
    lab.mention_build()
    events.run_cell(0.5)
    assert capsys.readouterr().out == ""
    events.run_cell(1.5)
    assert "42 %, 1 min 1 s so far, in the background: times measured in this cell" in capsys.readouterr().out
    lab.mention_build()  # as when the first cell is run again
    events.run_cell(1.5, then=lambda: progress.__setitem__(0, None))
    assert capsys.readouterr().out == (
        "(Horovod was being compiled, in the background: times measured in this cell may be too long.)\n"
    )
    events.run_cell(1.5)
    assert capsys.readouterr().out == ""
    assert events.callbacks == {"pre_run_cell": [], "post_run_cell": []}


def test_where_nothing_is_built_no_cell_says_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    shell = type("Shell", (), {"events": events})()
    monkeypatch.setitem(
        sys.modules, "IPython", type("IPython", (), {"get_ipython": staticmethod(lambda: shell)})
    )
    monkeypatch.setattr(horovod_build, "in_progress", lambda: None)
    lab.mention_build()
    assert events.callbacks == {"pre_run_cell": [], "post_run_cell": []}
