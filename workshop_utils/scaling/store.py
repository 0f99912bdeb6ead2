"""Measurements that outlive the session: one Parquet file a run, named by the key of all that the run depends on.

    store = Store.default()
    store.put(key, rows)          # atomic: whoever interrupts it leaves the whole file or none
    store.get(key)                # the rows as a table, or None
    pandas.read_parquet(folder)   # all of them: a folder of Parquet files is one data set

A file a run rather than one for all: a sweep that is interrupted has lost nothing, two sweeps may run at once, and one
measurement is taken back by deleting one file.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from workshop_utils.training.data import cache_folder

FOLDER = "measurements"  # in the cache folder


def key_of(depends_on: Mapping[str, Any]) -> str:
    """A name for all of `depends_on`, which JSON can hold: equal if and only if every part is."""
    text = json.dumps(depends_on, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class Store:
    """Tables by key, in `folder`, which is made when the first one comes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @classmethod
    def default(cls) -> Store:
        """The one in the user's cache folder (WORKSHOP_CACHE names another)."""
        return cls(cache_folder() / FOLDER)

    def get(self, key: str) -> pd.DataFrame | None:
        """The rows that were put under `key`; None where there are none, or only a damaged file."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            return pd.read_parquet(path)
        except (OSError, ValueError):  # pyarrow.ArrowInvalid is a ValueError: not Parquet, or cut short
            return None

    def put(self, key: str, rows: pd.DataFrame) -> pd.DataFrame:
        """Keep `rows` under `key`, in place of what was there, and return them as `get` will."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # A name with a dot in front is none that `read_parquet` of the folder would take for a measurement.
        with tempfile.TemporaryDirectory(prefix=".", dir=self.folder) as folder:
            written = Path(folder) / "rows.parquet"
            rows.to_parquet(written, index=False)
            written.replace(self._path(key))
        return pd.read_parquet(self._path(key))

    def keys(self) -> set[str]:
        """The keys of all that is kept."""
        return {path.stem for path in self.folder.glob("[!.]*.parquet")}

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.parquet"
