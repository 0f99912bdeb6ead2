"""Sets up the workshop on a fresh machine: checks, virtual environment, packages, Horovod.

`make` runs it before every target; `python3 -m workshop_utils.bootstrap` and `python3
workshop_utils/bootstrap.py` do the same by hand. It needs the standard library alone and may be started by
any Python 3.9 or later: it looks for one of the supported versions itself.

With `--without-horovod` it stops once the packages are there, which is all that JupyterLab needs: `workshop lab`
compiles Horovod behind it.

Each of the two parts leaves a stamp in `.venv`, a hash of all that it depends on; while the hash is current, running
it again does nothing. An interrupted set-up is simply run again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # started as a plain script: its own folder must not shadow the standard library
    HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(HERE.parent), *(folder for folder in sys.path if Path(folder).resolve() != HERE)]

from workshop_utils import horovod_build, packages
from workshop_utils.horovod_build import HorovodBuildError, Tool
from workshop_utils.logged_command import CommandFailed, duration, end_on_signals, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
PYTHON_VERSIONS = ((3, 11), (3, 12))
"""The versions that pyproject.toml's requires-python allows; a test keeps the two equal."""

VENV_MODULE = Tool(
    "the Python modules venv and ensurepip",
    {"apt-get": "python3-venv", "dnf": "python3-pip", "brew": "python@3.11"},
)

_PROBE = """
import importlib.util, json, sys, sysconfig
print(json.dumps({
    "version": list(sys.version_info[:3]),
    "has_venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
    "include": sysconfig.get_path("include"),
}))
"""


class SetupError(RuntimeError):
    """The set-up cannot go on; the message says why, and what to do."""


@dataclass(frozen=True)
class Stamp:
    """A file in `.venv` that says for which requirements a part of the set-up is complete."""

    name: str
    with_horovod: bool

    def digest(self, root: Path) -> str:
        """Hash of all that this part of the checkout at `root` depends on.

        The folder is part of it, since a virtual environment does not survive being moved.
        """
        content = hashlib.sha256(str(root).encode())
        content.update((root / "pyproject.toml").read_bytes())
        if self.with_horovod:
            content.update(horovod_build.build_digest().encode())
        return content.hexdigest()

    def is_current(self, root: Path) -> bool:
        """Whether this part of the checkout at `root` is complete."""
        file = root / ".venv" / self.name
        return (
            file.is_file()
            and file.read_text() == self.digest(root)
            and (root / ".venv" / "bin" / "python").exists()  # its target goes when the system's Python does
        )

    def write(self, root: Path) -> None:
        """Note that this part is complete now."""
        unfinished = root / ".venv" / f"{self.name}.new"
        unfinished.write_text(self.digest(root))
        unfinished.replace(root / ".venv" / self.name)


PACKAGES = Stamp(".packages", with_horovod=False)
READY = Stamp(".ready", with_horovod=True)


# What the machine must have


def check_machine() -> Path:
    """Returns the Python to build the environment with.

    Raises `SetupError` that names everything missing on this machine at once, and how to install it.
    """
    problems = []
    missing: list[Tool] = []
    python, found = find_python()
    if python is None:
        allowed = " or ".join(f"{major}.{minor}" for major, minor in PYTHON_VERSIONS)
        problems.append(
            f"Python {allowed} is needed; found: {'; '.join(found)}. Where the system offers neither, conda or "
            "mamba brings one: mamba env create -f environment.yml (see README)."
        )
        missing = horovod_build.missing_build_tools()
        missing = [tool for tool in missing if tool is not horovod_build.PYTHON_HEADERS]
    else:
        facts = _probe(python)
        missing = horovod_build.missing_build_tools(Path(facts["include"]))
        if not facts["has_venv"]:
            missing.append(VENV_MODULE)
    if missing:
        problems.append(horovod_build.describe_missing(missing))
    if python is None or problems:
        raise SetupError("\n".join(problems))
    return python


def find_python() -> tuple[Path | None, list[str]]:
    """Returns the first supported Python, and every one that was looked at with its version.

    The running interpreter comes first, then python3.11 and python3.12 on the PATH.
    """
    # Not sys.executable: under an activated environment that is .venv's own, which may have to be made anew.
    running = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    names = [str(running), *(f"python{major}.{minor}" for major, minor in PYTHON_VERSIONS)]
    found: list[str] = []
    for name in names:
        path = shutil.which(name)
        facts = _probe(Path(path)) if path else {}
        if path is None or not facts:
            continue
        if tuple(facts["version"][:2]) in PYTHON_VERSIONS:
            return Path(path), found
        found.append(f"{'.'.join(map(str, facts['version']))} ({path})")
    return None, found


def _probe(python: Path) -> dict[str, Any]:
    """Facts about an interpreter; empty where it does not run, as a version manager's placeholder does not."""
    answer = subprocess.run(
        [str(python), "-I", "-c", _PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    facts: dict[str, Any] = json.loads(answer.stdout) if answer.returncode == 0 else {}
    return facts


# The steps


def create_venv(root: Path, python: Path) -> None:
    """Creates `.venv`; one that works and lies where it was made is kept, any other is made anew."""
    venv = root / ".venv"
    own = venv / "bin" / "python"
    pip_script = venv / "bin" / "pip"
    usable = own.exists() and tuple(_probe(own).get("version", ())[:2]) in PYTHON_VERSIONS
    in_place = pip_script.is_file() and f"{venv}/bin/python" in pip_script.read_text()
    if usable and in_place:
        return
    command = [str(python), "-m", "venv", "--clear", str(venv)]
    answer = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if answer.returncode != 0:
        raise SetupError(f"{' '.join(command)} failed:\n{(answer.stdout + answer.stderr).strip()}")


def install_packages(root: Path) -> None:
    """Installs the package, editable, with everything that pyproject.toml names, the tests' needs included."""
    log = root / ".venv" / "setup.log"
    log.write_text("")
    python = root / ".venv" / "bin" / "python"
    arguments = ["--editable", f"{root}[test]"]
    packages.install(python, arguments, log, pip=python, label="Packages", without_cuda=True)


def install_horovod(root: Path) -> None:
    """Builds Horovod, or takes the kept wheel, in a process of the new environment."""
    command = [str(root / ".venv" / "bin" / "python"), "-m", "workshop_utils.horovod_build"]
    # A session of its own: a Ctrl-C reaches this process alone, which then lets that one end its compilers.
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.returncode != 0:
        raise SetupError("The set-up stopped at Horovod (see above). Run it again once that is mended.")


def set_up(root: Path, *, with_horovod: bool = True, quiet: bool = False) -> None:
    """Makes the environment of the checkout at `root` complete; does nothing where it is so already.

    Raises `SetupError`, `HorovodBuildError` or `CommandFailed`; what was done until then is kept, and the next run
    uses it.
    """
    wanted = READY if with_horovod else PACKAGES
    if wanted.is_current(root):
        if not quiet:
            say("The set-up is complete and current (.venv).")
        return
    start = time.monotonic()
    with _only_one_at_a_time(root):
        if wanted.is_current(root):  # another set-up, which this one waited for
            return
        say("Setting up the workshop, once.")
        with _step("checking this machine"):
            python = check_machine()
        if not PACKAGES.is_current(root):
            with _step("virtual environment .venv"):
                create_venv(root, python)
            with _step("packages, a minute or two"):
                install_packages(root)
            PACKAGES.write(root)
        if with_horovod:
            with _step("Horovod, some minutes where it is still to be compiled"):
                install_horovod(root)
            READY.write(root)
    say(f"Set-up complete in {duration(time.monotonic() - start)}.\n")


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    say(f"[{name}]")
    start = time.monotonic()
    yield
    say(f"[{name}: {duration(time.monotonic() - start)}]")


@contextlib.contextmanager
def _only_one_at_a_time(root: Path) -> Iterator[None]:
    import fcntl  # Unix only, as Horovod is

    with (root / "pyproject.toml").open() as lock:  # a file that is there anyway
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another set-up of this folder is running: waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# The same environment for conda


def conda_environment(root: Path) -> str:
    """Returns the text of environment.yml, made from pyproject.toml (Python 3.11 or later reads that)."""
    import tomllib

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    oldest_python = project["requires-python"].removeprefix(">=").split(",")[0]
    lines = [
        "# Written by `make environment.yml` from pyproject.toml: change it there.",
        "#   mamba env create -f environment.yml",
        "#   mamba activate workshop",
        "#   workshop install-horovod",
        "# With an NVIDIA GPU, leave out the line that takes PyTorch's CPU build.",
        f"# Horovod {horovod_build.HOROVOD_VERSION} belongs to this environment too, but its source does not",
        "# compile unpatched against the frameworks below, so no index has it: the third command builds it.",
        "name: workshop",
        "channels:",
        "  - conda-forge",
        "  - nodefaults",
        "dependencies:",
        f"  - python={oldest_python}",
        "  - pip",
        "  - pip:",
        f"      - --extra-index-url {packages.PYTORCH_CPU_INDEX}",
        *(f"      - {json.dumps(need)}" for need in project["dependencies"]),
        "      # For the tests.",
        *(f"      - {json.dumps(need)}" for need in project["optional-dependencies"]["test"]),
        "      # This package itself, with the command `workshop`.",
        '      - "-e ."',
    ]
    return "\n".join(lines) + "\n"


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
    end_on_signals()
    try:
        set_up(ROOT, with_horovod=not options.without_horovod, quiet=options.quiet)
    except (SetupError, HorovodBuildError, CommandFailed) as error:
        print(f"\nThe set-up stopped. {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nThe set-up was interrupted. Run it again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
