"""Sets up the workshop in a clone: a virtual environment, its packages, Horovod.

`make` runs it before every target; `python3 -m workshop_utils.setup.bootstrap` does the same by hand. It needs the
standard library alone and runs with Python 3.9 or later; if that version is not a supported one, uv finds or downloads
one that is.

With `--lab` it stops after what JupyterLab and cells on ranks need: lessons bring the rest when they are opened.
Otherwise it installs everything, and Horovod if this machine can compile it.

What is complete stands in `.venv/.workshop`, with a hash of all that it depends on; while that is current, another run
does nothing. After an interruption, simply run set-up again.
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

from workshop_utils.optional import UNFINISHED
from workshop_utils.setup import horovod_build
from workshop_utils.setup.logged_command import SetupError, announce, exit_code, only_one_at_a_time
from workshop_utils.setup.packages import MARKER, pinned, pytorch_arguments, run_command, run_uv

ROOT = Path(__file__).resolve().parents[2]
# The parts of the set-up; a later one includes those before it.
LAB, ALL, HOROVOD = PARTS = ("lab", "all", "horovod")
EXTRAS = {LAB: "lab", ALL: "all,test,tf-keras,horovod"}  # of "horovod" what compiles it


def is_current(root: Path, part: str) -> bool:
    """Whether this part of the set-up, or a later one, is complete in the checkout at `root`."""
    venv = root / ".venv"
    if not (venv / MARKER).is_file() or not (venv / "bin" / "python").exists():  # the system's may be gone
        return False
    done = (venv / MARKER).read_text().splitlines()
    return any(f"{name} {_digest(root, name)}" in done for name in PARTS[PARTS.index(part) :])


def _digest(root: Path, part: str) -> str:
    """Hash of everything that the part depends on, including the folder: a virtual environment cannot move."""
    files = [root / "pyproject.toml", *sorted(Path(__file__).with_name("requirements").glob("python3.*.txt"))]
    content = b"".join([str(root).encode(), *(file.read_bytes() for file in files)])
    if part == HOROVOD:
        content += horovod_build.build_digest().encode()
    return hashlib.sha256(content).hexdigest()


def supported_python(root: Path) -> tuple[str, range]:
    """What pyproject.toml requires, such as `>=3.11,<3.14`, and the minor versions of Python 3 that this allows."""
    requires = re.findall(r'^requires-python = "(.+)"', (root / "pyproject.toml").read_text(), re.MULTILINE)
    first, after_last = map(int, re.findall(r"3\.(\d+)", requires[0]))
    return requires[0], range(first, after_last)


# The steps


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
    if importlib.util.find_spec("ensurepip") is None:
        horovod_build.require([horovod_build.VENV_MODULE])
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


def install_packages(root: Path, part: str) -> None:
    """Install this package, editable, with the extras of `part`, in the versions that were tested."""
    python = root / ".venv" / "bin" / "python"
    minor = int(run_command([str(python), "-c", "import sys; print(sys.version_info[1])"]))
    install = ["pip", "install", "--python", str(python), "--project", str(root), *pinned((3, minor))]
    if part == ALL:
        # As pip does; otherwise the first imports would compile modules, perhaps during a measurement.
        install.append("--compile-bytecode")
    run_uv(python, *install, "--editable", f"{root}[{EXTRAS[part]}]", *pytorch_arguments(python))


def install_horovod(*, quiet: bool) -> bool:
    """Install Horovod into this environment; False if this machine lacks what compiles it."""
    if missing := horovod_build.missing_build_tools():
        if not quiet:
            announce(
                f"Horovod is left out, since there is no {', no '.join(missing)}: lessons show what it printed. "
                f"To have it, run this, then set-up again:\n    {horovod_build.install_command(missing)}"
            )
        return False
    announce("[Horovod, some minutes if it has to be compiled]")
    horovod_build.install()
    return True


def set_up(root: Path, part: str, *, quiet: bool = False) -> None:
    """Complete the environment of the checkout at `root` up to `part`; do nothing if it is complete.

    Raises:
        SetupError: if a step fails. Finished steps are kept for the next run.
    """
    if is_current(root, part):
        if not quiet:
            announce("The set-up is complete and current (.venv).")
        return
    # The lock is on pyproject.toml because that file always exists.
    waiting = "Another set-up of this folder is running: waiting for it."
    with only_one_at_a_time(root / "pyproject.toml", waiting):
        marker = root / ".venv" / MARKER
        had_all = marker.is_file() and f"{ALL} " in marker.read_text()  # which stays together
        packages = LAB if part == LAB and not had_all else ALL
        if is_new := not is_current(root, packages):
            announce("Setting up the workshop, once.\n[virtual environment .venv]")
            make_venv(root)
            announce("[packages, a minute or two without a cache]")
            install_packages(root, packages)
            marker.write_text(f"{packages} {_digest(root, packages)}\n")
            (root / ".venv" / UNFINISHED.name).unlink(missing_ok=True)
        if part == HOROVOD and not is_current(root, HOROVOD):
            if sys.prefix != str(root / ".venv"):  # continue in the environment that Horovod is compiled for
                python = str(root / ".venv" / "bin" / "python")
                options = ["--quiet"] * (quiet and not is_new)
                os.execv(python, [python, "-m", "workshop_utils.setup.bootstrap", *options])
            if install_horovod(quiet=quiet):
                done = "".join(f"{each} {_digest(root, each)}\n" for each in (ALL, HOROVOD))
                marker.write_text(done)
    if not quiet or is_new:
        announce("Set-up complete.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 1, with the reason on standard error, if set-up failed."""
    parser = argparse.ArgumentParser(description="Set up the workshop in .venv.")
    parser.add_argument("--quiet", action="store_true", help="print nothing if set-up is complete")
    parser.add_argument("--lab", action="store_true", help="only what JupyterLab and cells on ranks need")
    parser.add_argument("--without-horovod", action="store_true", help="all packages, but no Horovod")
    options = parser.parse_args(arguments)
    part = LAB if options.lab else ALL if options.without_horovod else HOROVOD
    return exit_code(partial(set_up, ROOT, part, quiet=options.quiet), "\nThe set-up stopped")


if __name__ == "__main__":
    sys.exit(main())
