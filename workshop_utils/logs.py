"""The log files of runs: one for each process, in a folder that outlives the run.

The folder is `OUTPUTS/logs/NAME-TIME/`, or without outputs `runs/NAME-TIME/` in the user's state folder, which has the
last 20; there a link leads to the former.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import TextIO

from workshop_utils.cache import state_folder

KEPT = 20  # runs


class RunLog:
    """The log files of the run `name`, made at its first line and open until `close`.

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
                self.folder = _made(self._name, self._outputs)
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
        """Close the files; from now on another run may remove them."""
        self._is_closed = True
        for file in self._files.values():
            with contextlib.suppress(OSError):  # the disk is full
                file.close()
        if self._lock is not None:
            os.close(self._lock)
        self._files, self._lock = {}, None


def shown(path: Path) -> str:
    """`path` as a message has it: from the user's home folder."""
    return str(Path("~", path.relative_to(Path.home())) if path.is_relative_to(Path.home()) else path)


def runs() -> list[Path]:
    """The folders of the runs that are kept, the latest first."""
    known = (state_folder() / "runs").glob("*-????????-??????*")
    return sorted(known, key=lambda path: path.lstat().st_mtime_ns, reverse=True)


def _made(name: str, outputs: str | None) -> Path:
    """A new folder for the logs of the run `name`. Raises OSError where there can be none."""
    kept = state_folder() / "runs"
    parent, moment = Path(outputs).absolute() / "logs" if outputs else kept, time.strftime("%Y%m%d-%H%M%S")
    folder, number = parent / f"{name}-{moment}", 1
    # Of a run that began in the same second, perhaps one with other outputs.
    while any(os.path.lexists(each / folder.name) for each in (parent, kept)):
        number += 1
        folder = parent / f"{name}-{moment}-{number}"
    try:
        folder.mkdir(parents=True)
    except FileExistsError:  # of one that has just begun
        return _made(name, outputs)
    with contextlib.suppress(OSError):  # the logs themselves are elsewhere, or another run removes old ones
        if outputs:
            kept.mkdir(parents=True, exist_ok=True)
            (kept / folder.name).symlink_to(folder)
        for old in runs()[KEPT:]:
            _remove(old)
    return folder


def _remove(folder: Path) -> None:
    """Remove what is kept of a run, unless it is still going; what lies in its outputs stays."""
    if folder.is_symlink():
        folder.unlink()
    elif (lock := _locked(folder, alone=True)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


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
