"""Measurements that are kept: whole or not at all, and readable as one table."""

import pandas as pd
import pytest

from workshop_utils.scaling.experiment import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "measurements")


def test_a_damaged_file_counts_as_missing(store):
    store.put("a", pd.DataFrame({"workers": [1]}))
    path = store.folder / "a.parquet"
    path.write_bytes(path.read_bytes()[:20])
    assert store.get("a") is None


def test_an_interrupt_while_writing_leaves_what_was_there_and_nothing_else(store, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    store.put("a", pd.DataFrame({"workers": [1]}))
    monkeypatch.setattr(pd.DataFrame, "to_parquet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put("a", pd.DataFrame({"workers": [2]}))
    assert store.get("a")["workers"].tolist() == [1]
    assert [path.name for path in store.folder.iterdir()] == ["a.parquet"]
