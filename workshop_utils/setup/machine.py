"""What a process may use of its machine. Standard library alone: `horovod_build` also runs where nothing else is."""

from __future__ import annotations

import os


def cores() -> int:
    """How many processor cores this process may run on: those of the machine, or fewer where it is bound to some."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
