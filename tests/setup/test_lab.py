"""JupyterLab opens on the page that was asked for, for this machine alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import eventually

from workshop_utils.jobs import JobError
from workshop_utils.setup import lab

SECONDS = 60.0

# A program that opens the lab; instead of it, a script notes how it was called.
PROGRAM = """
import sys
from pathlib import Path
from workshop_utils.setup import lab
sys.executable = sys.argv[1]
lab.open_lab(Path("my lessons/00_welcome.ipynb"))
"""
INSTEAD_OF_PYTHON = """#!/bin/bash
trap : INT; echo "$PATH $*" > server; until test -e end; do sleep 0.02; done; exit 3
"""


def test_a_home_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "file" / "runtime"))
    with pytest.raises(
        JobError, match=r"JupyterLab's folder .*/file/runtime cannot be written .*: set another HOME"
    ):
        lab.open_lab(tmp_path)


@pytest.mark.processes
def test_jupyterlab_opens_the_page_for_this_machine_alone_and_gets_every_interrupt(tmp_path):
    instead, server = tmp_path / "python", tmp_path / "server"
    instead.write_text(INSTEAD_OF_PYTHON)
    instead.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(instead)], env=os.environ, cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert eventually(lambda: server.exists() and server.read_text(), SECONDS)
    called = server.read_text()
    assert called.startswith(str(Path(sys.executable).parent))
    assert " -m jupyterlab --ServerApp.ip=127.0.0.1 " in called
    assert "/lab/tree/my%20lessons/00_welcome.ipynb" in called
    os.killpg(process.pid, signal.SIGINT)  # JupyterLab asks, and continues
    (tmp_path / "end").touch()
    assert process.wait(SECONDS) == 3
