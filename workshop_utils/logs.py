"""The log files of runs: one for each process, in a folder that outlives the run.

The folder is `runs/NAME-TIME/` in the user's state folder, which has the last 20. Where a run has outputs, a copy of it
is left there at the end, as `OUTPUTS/logs/NAME-TIME/`: before, a script would find it among its own files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import time
from pathlib import Path
from typing import TextIO

from workshop_utils.cache import state_folder

KEPT = 20  # runs
# The folder of a run: the second in which it was made, and a number where that second has others of the name. On
# SageMaker, also the emulated one, a run is called after its job, cut to 42 characters, with an ending of its own. The
# time is UTC, which goes on where a clock is put back.
RUN = re.compile(
    r"(?P<name>(?P<job>.+?)(?P<ending>-\d{14}-[0-9a-f]{4})?)-(?P<time>\d{8}-\d{6})(-(?P<number>\d+))?"
)
CONTROLS = re.compile(r"(\x1b\[[\d;]*m)|\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class RunLog:
    """The log files of the run `name`, made at its first line and open until `close`; then `hand_over` gives them away.

    Attributes:
        folder: where they are; None before the first line, and where no folder can be made.
    """

    def __init__(self, name: str, outputs: str | None = None) -> None:
        self.folder: Path | None = None
        self._name, self._outputs, self._is_closed = name, outputs, False
        self._files: dict[str, TextIO] = {}
        self._lock: int | None = None

    def write(self, process: str, line: str) -> None:
        """Add a line to the log of `process`; nothing once it is closed. Raises OSError where it cannot, and closes."""
        if self._is_closed:
            return
        try:
            if self.folder is None:
                self.folder = _made(self._name)
                self._lock = _locked(self.folder)
            if process not in self._files:
                path = self.folder / f"{process}.log"
                self._files[process] = path.open("a", encoding="utf-8", errors="replace", newline="\n")
            self._files[process].write(f"{line}\n")
        except OSError:
            self.close()
            raise

    def flush(self) -> None:
        """Let others read what has been written."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # the next line will say so
                file.flush()

    def close(self) -> None:
        """Close the files; what comes now is not kept."""
        self._is_closed = True
        for file in self._files.values():
            with contextlib.suppress(OSError):  # the disk is full
                file.close()
        self._files = {}

    def hand_over(self) -> None:
        """Copy the files to the outputs, once they are closed; from now on another run may remove them."""
        if self.folder and self._outputs:
            with contextlib.suppress(OSError):  # copied before, or kept in any case
                shutil.copytree(self.folder, Path(self._outputs) / "logs" / self.folder.name)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def shown(path: Path) -> str:
    """`path` as a message has it: from the user's home folder."""
    return str(Path("~", path.relative_to(Path.home())) if path.is_relative_to(Path.home()) else path)


def runs() -> list[Path]:
    """The folders of the runs that are kept, the latest first, by the time in their names."""
    known = {}
    for path in (state_folder() / "runs").glob("*"):
        with contextlib.suppress(OSError):  # another run removes it
            if (run := RUN.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
                known[path] = run["time"], int(run["number"] or 1)
    return sorted(known, key=lambda path: known[path], reverse=True)


def is_of(name: str, folder: Path) -> bool:
    """Whether `folder`, one of `runs()`, is that of a run called `name`, or of a job called so."""
    run = RUN.fullmatch(folder.name)
    return name == folder.name or bool(run and name in (run["name"], run["job"]))


def printable(text: str) -> str:
    """`text` without what would move a terminal's cursor, or worse; its colours stay."""
    return CONTROLS.sub(lambda found: found[1] or "", text)


def _made(name: str) -> Path:
    """A new folder for the logs of the run `name`. Raises OSError where there can be none."""
    kept, moment = state_folder() / "runs", time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    kept.mkdir(parents=True, exist_ok=True)
    same = [run for path in kept.glob(f"{name}-{moment}*") if (run := RUN.fullmatch(path.name))]
    for number in itertools.count(1 + max((int(run["number"] or 1) for run in same), default=0)):
        folder = kept / f"{name}-{moment}{f'-{number}' if number > 1 else ''}"
        with contextlib.suppress(FileExistsError):  # of a run that began in the same second
            folder.mkdir(mode=0o700)
            break
    for old in runs()[KEPT:]:
        if old != folder and (lock := _locked(old, alone=True)) is not None:  # otherwise it is still going
            shutil.rmtree(old, ignore_errors=True)
            os.close(lock)
    return folder


def _locked(folder: Path, alone: bool = False) -> int | None:
    """A descriptor that keeps other processes from removing `folder`; None where they do, or the system has no such."""
    with contextlib.suppress(ImportError, OSError), contextlib.ExitStack() as cleanup:
        import fcntl  # not on Windows

        descriptor = os.open(folder, os.O_RDONLY)
        cleanup.callback(os.close, descriptor)
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        cleanup.pop_all()
        return descriptor
    return None
