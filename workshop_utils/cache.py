"""Where this package keeps its files on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """For what could be made or fetched again: WORKSHOP_CACHE, or the user's cache folder of this system."""
    return _folder("WORKSHOP_CACHE", platformdirs.user_cache_dir)


def unwritable(error: OSError) -> str:
    """What to say where `error` came from writing into the cache folder."""
    reason = f"the cache folder {cache_folder()} cannot be written ({error.strerror})"
    return f"{reason}; set WORKSHOP_CACHE to a folder that can"


def state_folder() -> Path:
    """For the logs of runs: WORKSHOP_STATE, or the user's state folder of this system."""
    return _folder("WORKSHOP_STATE", platformdirs.user_state_dir)


def _folder(variable: str, default: Callable[[str], str]) -> Path:
    try:
        return Path(os.environ.get(variable) or default("workshop-utils")).expanduser().absolute()
    except RuntimeError:
        raise OSError(
            f"this user has no home folder: set HOME or {variable} to a folder that can be written"
        ) from None
