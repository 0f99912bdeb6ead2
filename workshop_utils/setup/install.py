"""Installs extras into this environment: `workshop install EXTRA...`, or a lesson that needs them, in the background.

A lesson begins with `need("tensorflow")`. In the workshop's own environment a process installs what is missing, and
ends with the kernel. Imports of it, and jobs that need it, wait and show the progress.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import metadata, version
from importlib.util import find_spec
from pathlib import Path

from workshop_utils import optional
from workshop_utils.cache import cache_folder
from workshop_utils.setup import horovod_build, logged_command
from workshop_utils.setup.logged_command import SetupError
from workshop_utils.setup.packages import MARKER, OVERRIDES, pinned, pytorch_arguments, run_uv

MEANWHILE = "Meanwhile read on, or take a lesson that needs nothing more: 00 to 05, 07 to 10, 15."


def install(extras: Sequence[str], *, in_background: bool = False) -> None:
    """Install the packages of `extras` into this environment; for "horovod", compile it, too.

    The workshop's own environment gets the versions that were tested. Any other keeps what it has, as far as the extras
    allow: Horovod wants exact versions of TensorFlow and PyTorch.

    Raises:
        SetupError: for an extra that does not exist, or if a package cannot be installed.
    """
    for extra in extras:
        if extra not in (names := [*optional.MODULES, "all"]):
            raise SetupError(f"EXTRA is {extra!r}; it must be one of {', '.join(names)}")
        if extra not in (metadata("workshop-utils").get_all("Provides-Extra") or ()):  # after a `git pull`
            raise SetupError(
                f"this environment was made before there was {extra!r}: bring it up to date by `make setup`"
            )
    if "horovod" in extras and not horovod_build.wheels():
        horovod_build.require(horovod_build.missing_build_tools())
    log, python = _log(), Path(sys.executable)
    log.parent.mkdir(parents=True, exist_ok=True)
    waiting = f"Another process is installing packages here: waiting for it (see {log})"
    with logged_command.only_one_at_a_time(log, waiting) as output:
        output.truncate(0)
        print(f"{time.time()} {', '.join(extras)}", file=output, flush=True)  # for `in_progress`
        arguments = pinned() if is_own_environment() else [*OVERRIDES]
        if find_spec("torch") is None or {"horovod", "torchvision"} & {*extras}:
            arguments += pytorch_arguments(python)
        if "torchvision" in extras and find_spec("torch"):  # each version fits one of PyTorch
            arguments.append(f"torch=={version('torch')}")
        wanted = f"workshop-utils[{','.join(extras)}]"
        command = ["pip", "install", "--python", str(python), wanted, *arguments]
        brought = optional.MODULES if "all" in extras else extras
        optional.UNFINISHED.write_text(" ".join(each for each in brought if optional.missing(each)))
        if in_background:
            command += ["--color", "never"]
        run_uv(python, *command, log=output if in_background else None)
        optional.UNFINISHED.unlink()
        if "horovod" in extras:
            horovod_build.install()


def is_own_environment() -> bool:
    """Whether the workshop's set-up has made this environment, so that it may change it without being asked."""
    return Path(sys.prefix, MARKER).is_file()


def is_for_lab_alone() -> bool:
    """Whether this environment has only what JupyterLab needed so far; otherwise its set-up has decided on Horovod."""
    return is_own_environment() and "all " not in Path(sys.prefix, MARKER).read_text()


def in_progress() -> str | None:
    """What another process is installing here, and how far it is; None if there is none."""
    log = _log()
    if not log.is_file() or not logged_command.is_locked(log):
        return horovod_build.in_progress()
    first, *rest = log.read_text(errors="replace").splitlines() or [f"{time.time()} packages"]
    began, _, extras = first.partition(" ")
    last = f"{rest[-1].strip()}, " if rest else ""
    since = logged_command.duration(time.time() - float(began))
    return horovod_build.in_progress() or f"Installing {extras}: {last}{since} so far"


def need(*extras: str) -> None:
    """Begin to install what is missing of `extras`, in the background; return at once.

    Raises:
        MissingPackage: if something is missing and this environment is not the workshop's own to change.
    """
    lacking = [extra for extra in extras if optional.missing(extra)]
    if not lacking:
        return
    if not is_own_environment():
        optional.require(*lacking)
    modules = {module for extra in lacking for module in optional.MODULES[extra]}
    arriving = [finder for finder in sys.meta_path if isinstance(finder, _Arriving)]
    if not any(modules <= finder.modules and not finder.installation.has_failed() for finder in arriving):
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in arriving]
        # The first, since a package that is half there must not be imported.
        sys.meta_path.insert(0, _Arriving(Installation(*lacking), modules))
    print(f"Installing {', '.join(lacking)} in the background. What needs it waits. {MEANWHILE}")


class Installation:
    """A process that installs extras at the lowest priority, for no longer than this one lives."""

    def __init__(self, *extras: str) -> None:
        command = [sys.executable, "-m", "workshop_utils.setup.install", str(os.getpid()), *extras]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would be full at some time
        # In a session of its own, since an interrupt is for the cell that waits.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=self._errors, start_new_session=True
        )

    def is_running(self) -> bool:
        """Whether it goes on."""
        return self._process.poll() is None

    def has_failed(self) -> bool:
        """Whether it has ended without success."""
        return bool(self._process.poll())

    def reason(self) -> str:
        """What it said of its failure."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()


class _Arriving(MetaPathFinder):
    """Finds the modules that an installation brings: it waits for them and shows the progress."""

    def __init__(self, installation: Installation, modules: set[str]) -> None:
        self.installation, self.modules = installation, modules

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Python calls it for every import, and for `importlib.util.find_spec`, which only asks: that does not wait."""
        if name not in self.modules or sys._getframe(2).f_code.co_name == "find_spec":
            return None
        wait_while(self.installation.is_running, "The cell goes on when that is finished")
        if self.installation.has_failed():
            raise optional.MissingPackage(
                f"{name} could not be installed. {self.installation.reason()}", name=name
            )
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        return PathFinder.find_spec(name)


def wait_while(is_busy: Callable[[], bool], then: str) -> None:
    """Show on one line what is being installed here, for as long as `is_busy()`."""
    width = 0
    while is_busy():
        line = f"{in_progress() or 'Installing packages'}. {then}."
        width = max(width, len(line))
        print(f"\r{line:<{width}}", end="", flush=True)
        time.sleep(1)
    if width:
        print(f"\r{'The installation has ended.':<{width}}", flush=True)
    importlib.invalidate_caches()


def mention() -> None:
    """In a notebook, while packages are being installed: say that measured times may be too long."""
    in_notebook = "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None
    if in_notebook and (progress := in_progress()):
        print(f"({progress}: until it is finished, measured times may be too long.)")


def _log() -> Path:
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return cache_folder() / "install" / f"{environment}.log"


def end_with(parent: int) -> None:
    """Have this process go on at the lowest priority, for no longer than its `parent` lives."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    os.nice(19)
    threading.Thread(target=watch, daemon=True).start()


def main(parent: int, extras: Sequence[str]) -> int:
    """Install `extras` in the background of the process `parent`; the exit code."""
    end_with(parent)
    return logged_command.exit_code(partial(install, extras, in_background=True), "The installation stopped")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
