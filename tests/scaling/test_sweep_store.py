"""Measurements that are kept: whole or not at all, and readable as one table."""

import pandas as pd
import pytest

from workshop_utils.scaling import store as stores
from workshop_utils.scaling.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "measurements")


def test_rows_come_back_as_they_were_put(store):
    rows = [
        {"workers": 2, "seconds": 0.5, "strategy": "ring"},
        {"workers": 4, "seconds": None, "strategy": "ring"},
    ]
    table = store.put("a", rows)
    pd.testing.assert_frame_equal(store.get("a"), table)
    assert table["seconds"].isna().tolist() == [False, True]
    assert store.get("b") is None
    assert store.keys() == {"a"}


def test_the_folder_is_one_table_for_whoever_reads_parquet(store):
    store.put("a", [{"workers": 1}])
    store.put("b", [{"workers": 2}, {"workers": 3}])
    assert sorted(pd.read_parquet(store.folder)["workers"]) == [1, 2, 3]


def test_a_damaged_file_counts_as_missing(store):
    store.put("a", [{"workers": 1}])
    path = store.folder / "a.parquet"
    path.write_bytes(path.read_bytes()[:20])
    assert store.get("a") is None
    store.put("a", [{"workers": 2}])
    assert store.get("a")["workers"].tolist() == [2]


def test_an_interrupt_while_writing_leaves_what_was_there_and_nothing_else(store, monkeypatch):
    store.put("a", [{"workers": 1}])

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pd.DataFrame, "to_parquet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put("a", [{"workers": 2}])
    assert store.get("a")["workers"].tolist() == [1]
    assert [path.name for path in store.folder.iterdir()] == ["a.parquet"]


def test_the_default_is_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path))
    assert Store.default().folder == tmp_path / stores.FOLDER
