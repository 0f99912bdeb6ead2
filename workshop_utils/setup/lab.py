"""Opens JupyterLab on the lessons; what a lesson needs more than others comes when it is opened (`install`)."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from workshop_utils import optional
from workshop_utils.jobs import JobError
from workshop_utils.setup.environments import Environment


def open_lab(page: Path) -> NoReturn:
    """Become JupyterLab, with the notebook or folder `page` open; it listens on this machine only.

    Raises:
        JobError: as `below_working_folder` does, or if JupyterLab could not write its own files.
    """
    from jupyter_core.paths import jupyter_runtime_dir  # here, since `uvx` has no JupyterLab at first

    try:
        Path(jupyter_runtime_dir()).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=jupyter_runtime_dir()).close()
    except OSError as error:
        raise JobError(
            f"JupyterLab's folder {jupyter_runtime_dir()} cannot be written ({error.strerror}): set another HOME"
        ) from None
    url = quote(below_working_folder(page).as_posix())
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


def move_to_complete_environment(arguments: list[str]) -> None:
    """Where JupyterLab or PyTorch is missing, as under `uvx`: run `workshop ARGUMENTS` in an environment that has both.

    It is made on the first call, in the workshop's cache folder, and gets this same version of the workshop.

    Raises:
        SetupError: if it cannot be made, for example without a network.
    """
    if not optional.missing("lab", "lessons", "torch"):
        return
    here = metadata.distribution("workshop-utils")
    origin = json.loads(here.read_text("direct_url.json") or "{}")
    address = origin.get("url")
    if "vcs_info" in origin:
        address = f"{origin['vcs_info']['vcs']}+{address}@{origin['vcs_info']['commit_id']}"
    wanted = f"workshop-utils[lab] @ {address}" if address else f"workshop-utils[lab]=={here.version}"
    files = hashlib.sha256((here.read_text("RECORD") or "").encode()).hexdigest()[:8]
    program = Environment(f"lab-{files}", "JupyterLab", workshop=wanted).program("workshop")
    os.execv(program, [str(program), *arguments])
