"""Sets up the workshop on a fresh machine: checks, virtual environment, packages, Horovod.

`make` runs it before every target; `python3 -m workshop_utils.setup.bootstrap` does the same by hand. It needs the
standard library alone and may be started by any Python 3.9 or later: where that is not a supported one, uv finds or
downloads one.

With `--without-horovod` it stops once the packages are there, which is all that JupyterLab needs: `workshop lab`
compiles Horovod behind it.

Each of the two parts leaves a stamp in `.venv`, a hash of all that it depends on; while the hash is current, running
it again does nothing. An interrupted set-up is simply run again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from workshop_utils.setup import horovod_build, packages
from workshop_utils.setup.logged_command import (
    SetupError,
    duration,
    exit_code,
    only_one_at_a_time,
    say,
)

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ".packages"
READY = ".ready"


def is_current(root: Path, stamp: str) -> bool:
    """Whether the part of the set-up that leaves `stamp` is complete in the checkout at `root`."""
    venv = root / ".venv"
    is_there = (venv / stamp).is_file() and (venv / "bin" / "python").exists()  # the system's Python may go
    return is_there and (venv / stamp).read_text() == _digest(root, stamp)


def _digest(root: Path, stamp: str) -> str:
    """Hash of all that the stamp's part depends on, the folder too: a virtual environment cannot be moved."""
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
    """Raises `SetupError` that names everything missing on this machine at once, and how to install it."""
    missing = horovod_build.missing_build_tools()
    if (
        sys.version_info[1] not in supported_python(root)[1]
    ):  # another Python is taken, with headers of its own
        missing = [name for name in missing if name != horovod_build.PYTHON_HEADERS]
    if importlib.util.find_spec("ensurepip") is None:
        missing.append(horovod_build.VENV_MODULE)
    horovod_build.require(missing)


def make_venv(root: Path) -> None:
    """Makes `.venv` with this Python, where it is a supported one, or else with one that uv finds or downloads."""
    requires, minors = supported_python(root)
    venv = root / ".venv"
    if is_usable(venv, minors):
        return
    shutil.rmtree(venv, ignore_errors=True)
    # Not sys.executable: under an activated environment that is .venv's own, which may have to be made again.
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    running = Path(sys.base_prefix) / "bin" / name
    if sys.version_info[1] in minors:
        packages.run([str(running), "-m", "venv", str(venv)])
        return
    with tempfile.TemporaryDirectory() as folder:  # uv's own, for this step
        packages.run([str(running), "-m", "venv", folder])
        pip = Path(folder) / "bin" / "python"
        try:
            packages.run_uv(pip, "venv", "--seed", "--python", requires, str(venv))
        except SetupError as error:
            raise SetupError(
                f"Python {requires} is needed; found: {name}, and uv can bring no other. Where the system offers "
                f"none, conda or mamba does: mamba env create -f environment.yml (see README).\n{error}"
            ) from None


def is_usable(venv: Path, minors: range) -> bool:
    """Whether the environment works, lies where it was made, and has one of these versions of Python 3."""
    try:
        answer = subprocess.run([str(venv / "bin" / "pip"), "--version"], capture_output=True, text=True)
    except OSError:  # there is none, or its Python is gone
        return False
    pattern = rf"pip \S+ from {re.escape(str(venv))}/.*\(python 3\.(\d+)\)"
    match = re.match(pattern, answer.stdout)
    return match is not None and int(match[1]) in minors


def install_packages(root: Path) -> None:
    """Installs the package, editable, with everything that pyproject.toml names, the tests' needs included."""
    python = root / ".venv" / "bin" / "python"
    # Compiled, as pip does: else the first imports, perhaps in a measurement, would do it.
    install = ["pip", "install", "--compile-bytecode", "--python", str(python), "--editable", f"{root}[test]"]
    packages.run_uv(python, *install, *packages.pytorch_arguments(python))


def set_up(root: Path, *, with_horovod: bool = True, quiet: bool = False) -> None:
    """Makes the environment of the checkout at `root` complete; does nothing where it is so already.

    Raises `SetupError`; what was done until then is kept, and the next run uses it.
    """
    wanted = READY if with_horovod else PACKAGES
    if is_current(root, wanted):
        if not quiet:
            say("The set-up is complete and current (.venv).")
        return
    start = time.monotonic()
    # pyproject.toml is a file that is there anyway.
    with only_one_at_a_time(
        root / "pyproject.toml", "Another set-up of this folder is running: waiting for it."
    ):
        if is_current(root, wanted):
            return
        say("Setting up the workshop, once.")
        if not is_current(root, PACKAGES):
            check_machine(root)
            say("[virtual environment .venv]")
            make_venv(root)
            say("[packages, a minute or two]")
            install_packages(root)
            (root / ".venv" / PACKAGES).write_text(_digest(root, PACKAGES))
        if with_horovod:
            if sys.prefix != str(
                root / ".venv"
            ):  # Horovod is for the new environment's Python, which goes on here
                python = str(root / ".venv" / "bin" / "python")
                os.execv(python, [python, "-m", "workshop_utils.setup.bootstrap"])
            say("[Horovod, some minutes where it is still to be compiled]")
            horovod_build.install()
            (root / ".venv" / READY).write_text(_digest(root, READY))
    say(f"Set-up complete in {duration(time.monotonic() - start)}.\n")


def conda_environment(root: Path) -> str:
    """Returns the text of environment.yml with pyproject.toml's requirements; what stands above them stays."""
    import tomllib  # of Python 3.11

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["test"], "-e ."]
    above = (root / "environment.yml").read_text().partition('      - "')[0]
    return above + "".join(f"      - {json.dumps(need)}\n" for need in needs)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: returns the exit code, 1 with the reason on standard error where it failed."""
    parser = argparse.ArgumentParser(description="Set up the workshop in .venv.")
    parser.add_argument("--quiet", action="store_true", help="say nothing where all is done already")
    parser.add_argument("--without-horovod", action="store_true", help="stop once the packages are there")
    parser.add_argument("--environment-yml", action="store_true", help="only print environment.yml")
    options = parser.parse_args(arguments)
    if options.environment_yml:
        print(conda_environment(ROOT), end="")
        return 0
    work = partial(set_up, ROOT, with_horovod=not options.without_horovod, quiet=options.quiet)
    return exit_code(work, "\nThe set-up stopped")


if __name__ == "__main__":
    sys.exit(main())
