"""What a measurement depends on beside its setting: the machine, the modules that a run is made of, the data."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import platform
from pathlib import Path
from typing import Any

from workshop_utils.jobs import StrategyName
from workshop_utils.launchers.source import shipped
from workshop_utils.machine import cores
from workshop_utils.scaling.store import key_of
from workshop_utils.strategies import STRATEGIES

PACKAGE = Path(__file__).parents[1]
# What starts the processes, wires them up and reads what they report; of a folder the modules that lie in it, since
# launchers and processes also start programs, which nobody imports. What the script imports comes to it.
HOST_MODULES = (
    "data.py",
    "jobs.py",
    "launchers",
    "launchers/spark",
    "network.py",
    "processes",
    "quantities.py",
    "runs.py",
    "scaling/communication.py",
    "scaling/experiment.py",
    "scaling/rows.py",
    "strategies.py",
    "wiring.py",
)
FRAMEWORKS = ("numpy", "torch", "tensorflow", "tensorflow-cpu", "horovod", "mpi4py")


@functools.cache
def machine() -> tuple[tuple[str, str], ...]:
    """What of this machine a measurement depends on: processor, cores, kernel, versions."""
    found = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(cores()),
        "python": platform.python_version(),
    }
    for name in FRAMEWORKS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return tuple(found.items())


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return named[0] if named else platform.processor()


@functools.cache
def package(strategy: StrategyName) -> str:
    """A hash of the modules of this package that a run of `strategy` is made of."""
    own = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in host_files()}
    return key_of(shipped(STRATEGIES[strategy]) | own)


def host_files() -> list[Path]:
    """The files of HOST_MODULES."""
    places = [PACKAGE / name for name in HOST_MODULES]
    folders = [sorted(place.glob("*.py")) if place.is_dir() else [place] for place in places]
    return list(itertools.chain.from_iterable(folders))


def state_of(data: str) -> Any:
    """For a folder of data, what can be seen from outside: names, sizes, and when each file was changed."""
    folder = Path(data)
    if not folder.is_dir():
        return data
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
