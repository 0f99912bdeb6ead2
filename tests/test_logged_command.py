"""Commands that take minutes: what is said of them, what is kept, and that none outlives its caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from workshop_utils import logged_command
from workshop_utils.logged_command import CommandFailed


@pytest.fixture
def said() -> list[str]:
    return []


def test_progress_and_time_are_reported_while_a_command_runs(tmp_path: Path, said: list[str]) -> None:
    script = "import time\nfor p in (10, 55):\n    print(f'[ {p}%] Building', flush=True); time.sleep(1)"
    logged_command.run_logged(
        [sys.executable, "-c", script],
        tmp_path / "log",
        label="building",
        describe=lambda line: line.split()[1].rstrip("]").replace("%", " %"),
        every_seconds=0.2,
        report=said.append,
    )
    assert any(line.startswith("building: 10 %, ") for line in said)
    assert any(line.startswith("building: 55 %, ") for line in said)
    assert (tmp_path / "log").read_text() == "[ 10%] Building\n[ 55%] Building\n"


def test_a_failed_command_shows_its_first_error_its_last_lines_and_its_log(tmp_path: Path) -> None:
    lines = [
        "first line",
        "x.cc:3: error: 'foo' was not declared",
        *(f"noise {i}" for i in range(100)),
        "the end",
    ]
    command = [sys.executable, "-c", f"print({chr(10).join(lines)!r}); raise SystemExit(2)"]
    with pytest.raises(CommandFailed) as failure:
        logged_command.run_logged(command, tmp_path / "log", label="building")
    message = str(failure.value)
    assert "building failed" in message
    assert str(tmp_path / "log") in message
    assert "'foo' was not declared" in message
    assert message.endswith("the end")
    assert "first line" not in message


def _runs(pid: int) -> bool:
    """Says whether the process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_build_leaves_no_compiler_behind(number: signal.Signals, tmp_path: Path) -> None:
    build = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '300']); print(p.pid, flush=True); p.wait()"
    )
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from workshop_utils import logged_command
        logged_command.end_on_signals()
        logged_command.run_logged([sys.executable, "-c", {build!r}], Path("log"), label="building")
    """)
    root = Path(__file__).parent.parent
    outer = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root)},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    log = tmp_path / "log"
    while not (log.is_file() and log.read_text().strip()):
        assert time.monotonic() < deadline, "the inner process did not start"
        time.sleep(0.05)
    compiler = int(log.read_text())
    assert _runs(compiler)
    outer.send_signal(number)
    outer.wait(30)
    while _runs(compiler):
        assert time.monotonic() < deadline + 30, "the compiler is still running"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (200, "3 min 20 s")]
)
def test_times_are_written_as_people_say_them(seconds: float, text: str) -> None:
    assert logged_command.duration(seconds) == text
