"""What the parts of the set-up share: reports, a long command whose output goes to a log, and locks.

For Python 3.9 or later and its standard library alone, since it runs before anything else is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

REPORT_SECONDS = 15.0
LAST_LINES = 12  # of a failed command, in the message


class SetupError(RuntimeError):
    """A step of the set-up failed; the message says why, and what to do."""


def say(line: str) -> None:
    """Reports progress, at once, so that it is seen through a pipe too; standard output stays the commands' own."""
    print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Writes a time as people say it: `7 s`, `3 min 20 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def run_logged(command: Sequence[str], log: Path, label: str, env: Mapping[str, str] | None = None) -> None:
    """Runs a command to its end, appends what it prints to `log`, and says now and then how far it is.

    The command has a process group of its own, which is ended with it when this call is interrupted.

    Raises `SetupError` with the last lines and the log's path where the command fails.
    """
    start = time.monotonic()
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while process.poll() is None:
                try:
                    process.wait(REPORT_SECONDS)
                except subprocess.TimeoutExpired:
                    say(f"{label}: {percent(log)}{duration(time.monotonic() - start)}")
        except BaseException:
            _end_group(process)
            raise
    if process.returncode != 0:
        lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
        errors = [line for line in lines[:-LAST_LINES] if re.search(r"\berror:|CMake Error", line)][:5]
        tail = "\n    ".join(errors + lines[-LAST_LINES:])
        raise SetupError(f"{label} failed. The full log is {log}; its last lines:\n    {tail}")


def percent(log: Path) -> str:
    """How far the compilation is that writes to `log`, such as `42 %, `; empty where it has not said."""
    percents = re.findall(r"^\s*\[\s*(\d+)%\]", log.read_text(errors="replace"), flags=re.MULTILINE)
    return f"{percents[-1]} %, " if percents else ""


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def exit_code(work: Callable[[], None], failure: str) -> int:
    """Does the work of a command: returns 0, or 1 after a `SetupError`, which is printed behind `failure`.

    An interrupt or a termination signal ends the processes that were started here first.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    try:
        work()
    except SetupError as error:
        say(f"{failure}. {error}")
        return 1
    except KeyboardInterrupt:
        say("Interrupted. Run it again to go on.")
        return 130
    return 0


@contextlib.contextmanager
def only_one_at_a_time(file: Path, waiting: str) -> Iterator[TextIO]:
    """Holds the lock on `file`; says `waiting` where another process holds it. A killed process lets go of it."""
    with file.open("a") as lock:
        if is_locked(file):
            say(waiting)
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def is_locked(file: Path) -> bool:
    """Whether some process holds the lock on `file`."""
    with file.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
