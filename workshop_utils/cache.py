"""Where this package keeps its files on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """For what could be made or fetched again: WORKSHOP_CACHE, or the user's cache folder of this system."""
    named = os.environ.get("WORKSHOP_CACHE") or platformdirs.user_cache_dir("workshop-utils")
    return Path(named).expanduser().absolute()


def unwritable(error: OSError) -> str:
    """What to say where `error` came from writing into the cache folder."""
    reason = f"the cache folder {cache_folder()} cannot be written ({error.strerror})"
    return f"{reason}; set WORKSHOP_CACHE to a folder that can"


def state_folder() -> Path:
    """For the logs of runs: WORKSHOP_STATE, or the user's state folder of this system."""
    named = os.environ.get("WORKSHOP_STATE") or platformdirs.user_state_dir("workshop-utils")
    return Path(named).expanduser().absolute()
