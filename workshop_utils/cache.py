"""Where this package keeps what it has made or fetched, and could make or fetch again."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """WORKSHOP_CACHE, or the user's cache folder of this system."""
    named = os.environ.get("WORKSHOP_CACHE") or platformdirs.user_cache_dir("workshop-utils")
    return Path(named).expanduser().absolute()
