"""Long commands, as a set-up has them: all that they print goes to a log, and how they go is said now and then.

Standard library only, since it runs before anything else is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

Report = Callable[[str], None]


class CommandFailed(RuntimeError):
    """A command ended with another code than 0; the message has the end of what it printed, and its log's path."""


def say(line: str) -> None:
    """Prints a line at once, so that progress is seen through a pipe too."""
    print(line, flush=True)


def run_logged(
    command: Sequence[str],
    log: Path,
    *,
    label: str,
    env: Mapping[str, str] | None = None,
    describe: Callable[[str], str | None] | None = None,
    every_seconds: float = 15.0,
    report: Report = say,
) -> None:
    """Runs a command to its end, appends all that it prints to `log`, and reports how it goes now and then.

    `describe` is given each line of output and returns what to tell the reader about it, or None. The command
    has a process group of its own, which is ended with it when this call is interrupted.

    Raises `CommandFailed` with the last lines and the log's path where the command fails.
    """
    start = time.monotonic()
    seen: list[str] = []
    state = "started"
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def read() -> None:
        nonlocal state
        assert process.stdout is not None
        with log.open("a") as copy:
            for line in process.stdout:
                copy.write(line)
                copy.flush()
                seen.append(line.rstrip())
                state = (describe(line) if describe else None) or state

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            try:
                process.wait(every_seconds)
                break
            except subprocess.TimeoutExpired:
                report(f"{label}: {state}, {duration(time.monotonic() - start)}")
    except BaseException:
        _end_group(process)
        raise
    reader.join()
    if process.returncode != 0:
        errors = [line for line in seen[:-12] if re.search(r"\berror:|CMake Error", line)][:5]
        tail = "\n    ".join(errors + seen[-12:])
        raise CommandFailed(f"{label} failed. The full log is {log}; its last lines:\n    {tail}")


def _end_group(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def duration(seconds: float) -> str:
    """Writes a time as people say it: `7 s`, `3 min 20 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def end_on_signals() -> None:
    """Turns a termination signal into an exception, so that the processes started here are ended first."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
