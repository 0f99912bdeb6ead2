"""What a process may use of its machine. It needs the standard library alone, as `horovod_build` does."""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import takewhile
from pathlib import Path

NVIDIA_TOOL = "/usr/lib/wsl/lib/nvidia-smi"  # below WSL2, where it is not on the PATH
NVIDIA_SECONDS = 20.0  # at most, for its answer


def cores() -> int:
    """How many processor cores this process may use: all of the machine's, or fewer if it is bound to some."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def nvidia_gpus() -> int:
    """How many NVIDIA GPUs this machine, or this container, has.

    Their device files are counted. Where there are none, NVIDIA's own tool is asked, if there is one: WSL2 has no such
    files, and some servers make them when a GPU is first used.
    """
    if count := sum(1 for _ in Path("/dev").glob("nvidia[0-9]*")):
        return count
    tool = shutil.which("nvidia-smi") or shutil.which(NVIDIA_TOOL)
    if tool is None:
        return 0
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=NVIDIA_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: by number, or by identifier.

    All of the machine's, or those that the variable lists. As in CUDA, the list ends before the first entry that does
    not exist, and a repeated entry empties it.
    """
    count, listed = nvidia_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(number) for number in range(count)]

    def exists(name: str) -> bool:
        return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count)

    visible = list(takewhile(exists, map(str.strip, listed.split(",")))) if count else []
    return visible if len(visible) == len(set(visible)) else []
