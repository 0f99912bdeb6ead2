"""Commands that take minutes: what is said of them, and what is kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workshop_utils import logged_command
from workshop_utils.logged_command import duration, exit_code, run_logged


def test_how_far_a_command_is_is_said_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logged_command, "REPORT_SECONDS", 0.2)
    script = "import time\nfor p in (10, 55):\n    print(f'[ {p}%] Building', flush=True); time.sleep(1)"
    run_logged([sys.executable, "-c", script], tmp_path / "log", "building")
    reports = capsys.readouterr().err
    assert "building: 10 %, " in reports
    assert "building: 55 %, " in reports
    assert (tmp_path / "log").read_text() == "[ 10%] Building\n[ 55%] Building\n"


def test_a_failed_command_shows_its_first_error_its_last_lines_and_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = "".join(f"noise {i}\n" for i in range(100))
    text = f"first line\nx.cc:3: error: 'foo' was not declared\n{noise}the end"
    command = [sys.executable, "-c", f"print({text!r}); raise SystemExit(2)"]
    (tmp_path / "log").write_text("of an earlier command: error: not this one\n")
    assert exit_code(lambda: run_logged(command, tmp_path / "log", "building"), "Not installed") == 1
    message = capsys.readouterr().err
    assert message.startswith(f"Not installed. building failed. The full log is {tmp_path / 'log'}")
    assert "'foo' was not declared" in message
    assert message.endswith("the end\n")
    assert "first line" not in message
    assert "not this one" not in message


def test_times_are_written_as_people_say_them() -> None:
    assert [duration(seconds) for seconds in (0.2, 59.4, 60, 200)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "3 min 20 s",
    ]
