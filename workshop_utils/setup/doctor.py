"""What this machine has, and what that means for the lessons.

    for finding in examine():
        print(finding)

Nothing here imports a framework, so the answer comes at once.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import psutil

from workshop_utils import network, optional
from workshop_utils.setup import horovod_build, install
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


# What each extra brings, and for which lessons.
PURPOSES = {
    "torch": "PyTorch, for most lessons",
    "lessons": "figures and widgets, for every lesson",
    "lab": "JupyterLab, and lessons in batch",
    "tensorflow": "TensorFlow and JAX, for lessons 06, 11 and 12",
    "mpi": "Open MPI, for lesson 12",
    "horovod": "for lesson 05, which shows its recorded results without it, and for jobs of 11",
    "transformers": "BERT, for lesson 13",
    "aws": "AWS's SDKs, that of SageMaker too, for lesson 11",
    "kubernetes": "the cluster's client, for lessons 06 and 12",
    "spmd": "types of placement, for lesson 17",
    "spark": "Spark, for lesson 14",
}
REQUIRED = ("torch", "lessons")
# Brought by the lessons that need them.
BROUGHT = ("tensorflow", "mpi", "transformers", "aws", "kubernetes", "spmd", "spark")
NOT_LINUX = (
    "not tried. Bytes of frameworks are not counted (05, 07, 08), ranks start cold, so each call takes seconds longer, "
    "and what a rank has started in a session of its own may go on after the run"
)


def examine() -> list[Finding]:
    """Look at everything that some lesson needs. It starts no lasting process and changes nothing."""
    memory, gpus = psutil.virtual_memory().total, len(visible_gpus())
    return [
        _system(),
        _check("cores", cores() >= 2, f"{cores()}", "1: workers take turns, so more of them are no faster", ""),
        _check("memory", memory >= ENOUGH_MEMORY_NBYTES, f"{memory / GIB:.0f} GiB",
               f"{memory / GIB:.0f} GiB; four TensorFlow workers want 6", "run with `-p workers=2`"),
        Finding("GPUs", "good", f"{gpus} from NVIDIA; `workshop launch --gpus 1` gives each worker one" if gpus else
                "no NVIDIA GPU; no lesson needs one"),
        _slow_networks(),
        *map(_extra, PURPOSES),
    ]  # fmt: skip


def show(findings: Iterable[Finding]) -> None:
    """Print the findings, one to a line, and a conclusion."""
    states = []
    for finding in findings:
        print(finding)
        states.append(finding.state)
    if count := states.count("missing"):
        print(f"\n{count} to mend before all lessons can run here.")
    else:
        limits = ", but for what is marked –" if "limited" in states else ""
        print(f"\nAll lessons can run here{limits}.")


def _system() -> Finding:
    system = f"{platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("system", "limited", f"{system}: {NOT_LINUX}")
    if "microsoft" in platform.release().lower():  # WSL2's kernel
        return Finding(
            "system", "limited", f"{system} in WSL2: not tried. What its kernel lacks stands below"
        )
    return Finding("system", "good", system)


def _slow_networks() -> Finding:
    namespaces = network.availability()
    if namespaces != "none":
        no_latency = "; no netem: only the workshop's own ring and parameter server feel latency"
        text = f"network namespaces, as {namespaces}{'' if network.has_netem() else no_latency}"
        return Finding("slow networks", "good", text)
    text = "no network namespaces: frameworks feel no `network=` and there are no racks (parts of 04, 05, 07)"
    programs = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if platform.system() != "Linux":
        remedy = ""
    elif programs:
        remedy = f"no {', '.join(programs)}: apt-get install iproute2 util-linux"
    else:
        remedy = "they take root or user namespaces; in a container, --cap-add=SYS_ADMIN"
    return Finding("slow networks", "limited", text, remedy)


def _check(subject: str, good: bool, text: str, bad: str, remedy: str) -> Finding:
    return Finding(subject, "good", text) if good else Finding(subject, "limited", bad, remedy)


def _extra(name: str) -> Finding:
    """Whether the packages of an extra are installed, and the version of the first."""
    remedy = f"`workshop install {name}`"
    if name in BROUGHT and install.is_own_environment():
        remedy += ", or run a lesson that needs it"
    if lacking := horovod_build.missing_build_tools() if name == "horovod" else []:
        remedy = f"{horovod_build.install_command(lacking)}, then {remedy}"
    if is_installed(name):
        return Finding(name, "good", f"{_version(optional.MODULES[name][0])}: {PURPOSES[name]}")
    state: Condition = "missing" if name in REQUIRED else "limited"
    return Finding(name, state, f"not installed: {PURPOSES[name]}", remedy)


def is_installed(name: str) -> bool:
    """Whether an extra's packages are there; Horovod must have been built for these frameworks."""
    return not optional.missing(name) and (name != "horovod" or horovod_build.has_horovod())


def _version(package: str) -> str:
    for distribution in (package, f"{package}-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{distribution} {version(distribution)}"
    return "installed"
