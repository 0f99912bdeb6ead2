"""Commands that take minutes: what is said of them, and what is kept. How one fails: in test_horovod_build.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workshop_utils.setup import logged_command


def test_how_far_a_command_is_is_said_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logged_command, "REPORT_SECONDS", 0.2)
    script = "import time\nfor p in (10, 55):\n    print(f'[ {p}%] Building', flush=True); time.sleep(1)"
    logged_command.run_logged([sys.executable, "-c", script], tmp_path / "log", "building")
    reports = capsys.readouterr().err
    assert "building: 10 %, " in reports
    assert "building: 55 %, " in reports
    assert (tmp_path / "log").read_text() == "[ 10%] Building\n[ 55%] Building\n"
