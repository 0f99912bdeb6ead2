"""JupyterLab opens as soon as the packages are installed; Horovod, the last part of the set-up, compiles meanwhile.

`workshop lab` starts both. A job that needs Horovod waits for it and shows its progress (`wait_for_horovod`); each
lesson, when it imports its checks, warns that measured times may be too long (`mention_build`).
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
from typing import NoReturn
from urllib.parse import quote

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.setup import horovod_build


def open_lab(page: Path) -> NoReturn:
    """Become JupyterLab, with the notebook or folder `page` open; it listens on this machine only.

    If Horovod is missing, it compiles in the background, at the lowest priority, and no longer than JupyterLab runs.

    Raises:
        JobError: as `below_working_folder` does.
    """
    url = quote(below_working_folder(page).as_posix())
    if not horovod_build.has_horovod():
        print("Horovod compiles in the background; jobs that need it wait. Closing JupyterLab ends it.")
        sys.stdout.flush()
        build = [sys.executable, "-m", "workshop_utils.setup.horovod_build", str(os.getpid())]
        # In a session of its own: the terminal's Ctrl-C is for JupyterLab, which asks for confirmation.
        subprocess.Popen(build, stdin=subprocess.DEVNULL, start_new_session=True)
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    # The kernel python3 is this environment's, whatever kernels the user has.
    environment = {**os.environ, "PATH": path, "JUPYTER_PREFER_ENV_PATH": "1"}
    environment.pop("JUPYTER_PATH", None)
    arguments = ["--ServerApp.ip=127.0.0.1", f"--LabApp.default_url=/lab/tree/{url}"]
    if os.geteuid() == 0:
        arguments.append("--allow-root")
    os.execve(sys.executable, [sys.executable, "-m", "jupyterlab", *arguments], environment)


def below_working_folder(path: Path) -> Path:
    """`path` relative to the working folder. Raises JobError if it is elsewhere; JupyterLab would not show it."""
    folder = Path.cwd()
    if not path.resolve().is_relative_to(folder):
        raise JobError(f"folder is {str(path)!r}; it must be below {folder}, where JupyterLab is started")
    return path.resolve().relative_to(folder)


def wait_for_horovod(job: TrainingJob) -> None:
    """Wait until Horovod, which the script of `job` imports, is no longer being compiled; show the progress.

    Raises:
        JobError: if the job's strategy needs Horovod, and it is not installed.
    """
    line = ""
    while progress := horovod_build.in_progress():  # also while it is being installed and tried
        line = f"{progress}. The job starts when that is finished."
        print(f"\r{line}", end="", flush=True)
        time.sleep(1)
    if line:
        outcome = "is ready." if horovod_build.has_horovod() else "was not built, or its build was ended."
        print(f"\r{f'Horovod {outcome}':<{len(line)}}", flush=True)
    importlib.invalidate_caches()
    if job.strategy.startswith("horovod") and importlib.util.find_spec("horovod") is None:
        missing = f"strategy is {job.strategy!r}, but Horovod is not installed"
        raise JobError(f"{missing}; `workshop install-horovod` compiles it")


def mention_build() -> None:
    """In a notebook, while Horovod compiles: say that measured times may be too long."""
    in_notebook = "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None
    if in_notebook and (progress := horovod_build.in_progress()):
        print(f"({progress}, in the background: until it is finished, measured times may be too long.)")
