"""What the parts of the set-up share: reports, locks, and long commands whose output goes to a log.

It needs Python 3.9 and its standard library alone, since it runs before anything else is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
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
# Runs a command; its standard input is a pipe, and once that closes, if only since its other end was killed, all of
# its process group ends.
UNTIL_PIPE_CLOSES = (
    "sh",
    "-c",
    'exec 3<&0; (read _ <&3; kill -9 0) >/dev/null 2>&1 & "$@" </dev/null 3<&-',
    "sh",
)


class SetupError(ValueError):
    """A step of the set-up failed; the message says why, and what to do."""

    def _render_traceback_(self) -> list[str]:
        # IPython asks an exception for its representation: the message is for people, the frames are not.
        return [f"{type(self).__name__}: {self}"]


def announce(line: str) -> None:
    """Report progress on standard error, at once: a pipe shows it too, and standard output stays the commands' own."""
    print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A time as people write it: `7 s`, `3 min 20 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def run_logged(command: Sequence[str], log: Path, label: str, env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end, append its output to `log`, and report progress from time to time.

    If this call is interrupted, or its process is killed, so are the command and everything it has started.

    Raises:
        SetupError: if the command fails; the message has its last lines and the log's path.
    """
    start = time.monotonic()
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            [*UNTIL_PIPE_CLOSES, *command], env=env, start_new_session=True,
            stdin=subprocess.PIPE, stdout=output, stderr=output,
        )  # fmt: skip
    with process:  # whose end closes the pipe
        while process.poll() is None:
            try:
                process.wait(REPORT_SECONDS)
            except subprocess.TimeoutExpired:
                announce(f"{label}: {percent(log)}{duration(time.monotonic() - start)}")
    if process.returncode != 0:
        lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
        errors = [line for line in lines[:-LAST_LINES] if re.search(r"\berror:|CMake Error", line)][:5]
        tail = "\n    ".join(errors + lines[-LAST_LINES:])
        raise SetupError(f"{label} failed. The full log is {log}; its last lines:\n    {tail}")


def percent(log: Path) -> str:
    """The progress of the compilation that writes to `log`, such as `42 %, `; empty before its first report."""
    percents = re.findall(r"^\s*\[\s*(\d+)%\]", log.read_text(errors="replace"), flags=re.MULTILINE)
    return f"{percents[-1]} %, " if percents else ""


def exit_code(work: Callable[[], None], failure: str) -> int:
    """Run a command's `work`; return 0, or 1 after an error that can be foreseen, which is printed after `failure`.

    An interrupt or a termination signal first ends the processes that were started here.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    try:
        work()
    except SetupError as error:
        announce(f"{failure}. {error}")
        return 1
    except OSError as error:  # a folder that may not be written, a full disk
        announce(f"{failure}. {error.filename or 'a file'} cannot be written: {error.strerror}")
        return 1
    except KeyboardInterrupt:
        announce("Interrupted. Run it again to continue.")
        return 130
    return 0


@contextlib.contextmanager
def only_one_at_a_time(file: Path, waiting: str) -> Iterator[TextIO]:
    """Hold the lock on `file`; print `waiting` if another process holds it. A killed process releases it."""
    with file.open("a") as lock:
        if is_locked(file):
            announce(waiting)
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
