"""JupyterLab opens as soon as the packages are there; Horovod, the last part of the set-up, compiles in the background.

`workshop lab` starts both. A job that needs Horovod waits for it and shows how far it is (`await_horovod`); a cell that
measures meanwhile says so (`mention_build`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.setup import horovod_build

MEASURING_SECONDS = 1.0  # cells that take less are not worth a note


def open_lab(page: Path) -> NoReturn:
    """Become JupyterLab, with the notebook or folder `page` open; it listens on this machine alone.

    Where Horovod is not there yet, it compiles meanwhile, at the lowest priority, and no longer than JupyterLab runs.

    Raises:
        JobError: as `below_working_folder` does.
    """
    url = quote(below_working_folder(page).as_posix())
    if not horovod_build.is_installed():
        print(
            "Horovod compiles in the background; jobs that need it wait for it. Closing JupyterLab ends it.",
            flush=True,
        )
        command = [
            sys.executable,
            "-m",
            "workshop_utils.setup.horovod_build",
            "--in-background",
            str(os.getpid()),
        ]
        # A session of its own: the terminal's Ctrl-C is for JupyterLab, which asks whether it is meant.
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]),
        "JUPYTER_PREFER_ENV_PATH": "1",  # the kernel python3 is this environment's, whatever kernels the user has
    }
    environment.pop("JUPYTER_PATH", None)
    arguments = ["--ServerApp.ip=127.0.0.1", f"--LabApp.default_url=/lab/tree/{url}"]
    if os.geteuid() == 0:
        arguments.append("--allow-root")
    os.execve(sys.executable, [sys.executable, "-m", "jupyterlab", *arguments], environment)


def below_working_folder(path: Path) -> Path:
    """`path` from the working folder. Raises JobError where it is elsewhere, which JupyterLab would not show."""
    folder = Path.cwd()
    if not path.resolve().is_relative_to(folder):
        raise JobError(
            f"folder is {str(path)!r}; it must be below {folder}, from where JupyterLab is started"
        )
    return path.resolve().relative_to(folder)


def await_horovod(job: TrainingJob) -> None:
    """Return once Horovod, which the script of `job` imports, is no longer being compiled; say how far it is.

    Raises:
        JobError: if the job's strategy is Horovod's, and there is no Horovod.
    """
    shown = ""
    while progress := horovod_build.in_progress():  # also while it is installed already, and being tried
        line = f"{progress}. The job starts when that is finished."
        print(f"\r{line:<{len(shown)}}", end="", flush=True)
        shown = line
        time.sleep(1)
    if shown:
        ready = horovod_build.is_installed()
        line = "Horovod is ready." if ready else "Horovod could not be built, or its build was ended."
        print(f"\r{line:<{len(shown)}}", flush=True)
    importlib.invalidate_caches()
    if job.strategy.startswith("horovod") and importlib.util.find_spec("horovod") is None:
        raise JobError(
            f"strategy is {job.strategy!r}, but Horovod is not installed; `workshop install-horovod` compiles it"
        )


def mention_build() -> None:
    """In a notebook, from now on: each longer cell during which Horovod compiles ends with a note on it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or hasattr(shell, "workshop_notes"):
        return
    begun, progress = time.monotonic(), horovod_build.in_progress()
    if progress is None:
        return
    shell.workshop_notes = True  # a cell that is run again registers nothing twice

    def before_cell(_: Any) -> None:
        nonlocal begun, progress
        begun, progress = time.monotonic(), horovod_build.in_progress()

    def after_cell(_: Any) -> None:
        if progress is None:
            shell.events.unregister("pre_run_cell", before_cell)
            shell.events.unregister("post_run_cell", after_cell)
        elif time.monotonic() - begun >= MEASURING_SECONDS:
            now = horovod_build.in_progress() or "Horovod was being compiled"
            print(f"({now}, in the background: times measured in this cell may be too long.)")

    shell.events.register("pre_run_cell", before_cell)
    shell.events.register("post_run_cell", after_cell)
