"""What a process may use of its machine. It needs the standard library alone, as `horovod_build` does."""

from __future__ import annotations

import os


def cores() -> int:
    """How many processor cores this process may use: all of the machine's, or fewer if it is bound to some."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
