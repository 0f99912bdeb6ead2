"""Sets up the workshop on a fresh machine: checks, virtual environment, packages, Horovod.

`make` runs it before every target; `python3 -m workshop_utils.setup.bootstrap` does the same by hand. It needs the
standard library alone and runs with Python 3.9 or later; if that version is not a supported one, uv finds or downloads
one that is.

With `--without-horovod` it stops after the packages, which are all that JupyterLab needs: `workshop lab` then compiles
Horovod in the background.

Each of the two parts leaves a stamp in `.venv`, a hash of everything that it depends on; while the hash is current,
another run does nothing. After an interruption, simply run set-up again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from workshop_utils.setup import horovod_build
from workshop_utils.setup.logged_command import SetupError, announce, exit_code, only_one_at_a_time
from workshop_utils.setup.packages import pytorch_arguments, run_command, run_uv

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ".packages"
READY = ".ready"


def is_current(root: Path, stamp: str) -> bool:
    """Whether the part of the set-up that leaves `stamp` is complete in the checkout at `root`."""
    venv = root / ".venv"
    exists = (venv / stamp).is_file() and (venv / "bin" / "python").exists()  # the system's may be gone
    return exists and (venv / stamp).read_text() == _digest(root, stamp)


def _digest(root: Path, stamp: str) -> str:
    """Hash of everything that the stamp's part depends on, including the folder: a virtual environment cannot move."""
    horovod = horovod_build.build_digest() if stamp == READY else ""
    content = str(root).encode() + (root / "pyproject.toml").read_bytes() + horovod.encode()
    return hashlib.sha256(content).hexdigest()


def supported_python(root: Path) -> tuple[str, range]:
    """What pyproject.toml requires, such as `>=3.11,<3.13`, and the minor versions of Python 3 that this allows."""
    requires = re.findall(r'^requires-python = "(.+)"', (root / "pyproject.toml").read_text(), re.MULTILINE)
    first, after_last = map(int, re.findall(r"3\.(\d+)", requires[0]))
    return requires[0], range(first, after_last)


# The steps


def check_machine(root: Path) -> None:
    """Raise `SetupError` with everything that this machine lacks, and the command that installs it."""
    missing = horovod_build.missing_build_tools()
    if sys.version_info[1] not in supported_python(root)[1]:  # uv's Python brings its own headers
        missing = [name for name in missing if name != horovod_build.PYTHON_HEADERS]
    if importlib.util.find_spec("ensurepip") is None:
        missing.append(horovod_build.VENV_MODULE)
    horovod_build.require(missing)


def make_venv(root: Path) -> None:
    """Create `.venv` with this Python if it is supported, otherwise with one that uv finds or downloads."""
    requires, minors = supported_python(root)
    venv = root / ".venv"
    if is_usable(venv, minors):
        return
    shutil.rmtree(venv, ignore_errors=True)
    # Not sys.executable, which in an activated environment is .venv's own, just removed.
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    running = str(Path(sys.base_prefix) / "bin" / name)
    if sys.version_info[1] in minors:
        run_command([running, "-m", "venv", str(venv)])
        return
    with tempfile.TemporaryDirectory() as folder:  # for a uv that this step alone needs
        run_command([running, "-m", "venv", folder])
        try:
            run_uv(Path(folder, "bin", "python"), "venv", "--seed", "--python", requires, str(venv))
        except SetupError as error:
            raise SetupError(
                f"Python {requires} is needed; found: {name}, and uv can provide no other. If the system has "
                f"none, conda or mamba does: mamba env create -f environment.yml (see README).\n{error}"
            ) from None


def is_usable(venv: Path, minors: range) -> bool:
    """Whether the environment works, has not been moved, and has one of these versions of Python 3."""
    try:
        answer = subprocess.run([str(venv / "bin" / "pip"), "--version"], capture_output=True, text=True)
    except OSError:  # there is none, or its Python is gone
        return False
    match = re.match(rf"pip \S+ from {re.escape(str(venv))}/.*\(python 3\.(\d+)\)", answer.stdout)
    return match is not None and int(match[1]) in minors


def install_packages(root: Path) -> None:
    """Install this package, editable, with everything that pyproject.toml names, including what the tests need."""
    python = root / ".venv" / "bin" / "python"
    # Compiled, as pip does; otherwise the first imports would compile it, perhaps during a measurement.
    install = ["pip", "install", "--compile-bytecode", "--python", str(python), "--project", str(root)]
    run_uv(python, *install, "--editable", f"{root}[test]", *pytorch_arguments(python))


def set_up(root: Path, *, with_horovod: bool = True, quiet: bool = False) -> None:
    """Complete the environment of the checkout at `root`; do nothing if it is complete.

    Raises:
        SetupError: if a step fails. Finished steps are kept for the next run.
    """
    wanted = READY if with_horovod else PACKAGES
    if is_current(root, wanted):
        if not quiet:
            announce("The set-up is complete and current (.venv).")
        return
    # The lock is on pyproject.toml because that file always exists.
    waiting = "Another set-up of this folder is running: waiting for it."
    with only_one_at_a_time(root / "pyproject.toml", waiting):
        if is_current(root, wanted):
            return
        if not is_current(root, PACKAGES):
            announce("Setting up the workshop, once.")
            check_machine(root)
            announce("[virtual environment .venv]")
            make_venv(root)
            announce("[packages, a minute or two]")
            install_packages(root)
            (root / ".venv" / PACKAGES).write_text(_digest(root, PACKAGES))
        if with_horovod:
            if sys.prefix != str(root / ".venv"):  # continue in the environment that Horovod is compiled for
                python = str(root / ".venv" / "bin" / "python")
                os.execv(python, [python, "-m", "workshop_utils.setup.bootstrap"])
            announce("[Horovod, some minutes if it has to be compiled]")
            horovod_build.install()
            (root / ".venv" / READY).write_text(_digest(root, READY))
    announce("Set-up complete.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 1, with the reason on standard error, if set-up failed."""
    parser = argparse.ArgumentParser(description="Set up the workshop in .venv.")
    parser.add_argument("--quiet", action="store_true", help="print nothing if set-up is complete")
    parser.add_argument("--without-horovod", action="store_true", help="stop after the packages")
    options = parser.parse_args(arguments)
    work = partial(set_up, ROOT, with_horovod=not options.without_horovod, quiet=options.quiet)
    return exit_code(work, "\nThe set-up stopped")


if __name__ == "__main__":
    sys.exit(main())
