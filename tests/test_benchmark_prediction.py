"""The bench of predictions: its rows, on made-up runs, and what it says where nothing can be measured."""

import numpy as np
import pandas as pd
import pytest

from workshop_utils import benchmarks
from workshop_utils.benchmarks import prediction
from workshop_utils.benchmarks.comparison import NotMeasured
from workshop_utils.jobs import JobError
from workshop_utils.scaling.cost import Path, all_reduce_seconds
from workshop_utils.scaling.fit import path_terms


def made_up(name, say):
    workers = np.repeat(sorted(prediction.FITTED_WORKERS + prediction.HELD_WORKERS), 4)
    nbytes = np.tile(sorted(prediction.FITTED_NBYTES + prediction.HELD_NBYTES), 4)
    seconds = all_reduce_seconds("ring", workers, nbytes, Path(1e-3, 12e6))
    return pd.DataFrame({"workers": workers, "servers": 0, "nbytes": nbytes, "seconds": seconds})


def test_runs_that_follow_the_model_meet_the_bar_and_others_do_not():
    table = made_up("", print)
    row = prediction.of_own("ring", table, path_terms(prediction._ring))
    assert row.subject == "ring, median of 12 that were left out"
    assert row.is_met
    held = ~(
        table["workers"].isin(prediction.FITTED_WORKERS) & table["nbytes"].isin(prediction.FITTED_NBYTES)
    )
    table.loc[held, "seconds"] *= 1.2
    assert not prediction.of_own("ring", table, path_terms(prediction._ring)).is_met


def test_published_and_hardware_rows_have_one_bar_each():
    for rows in (prediction.of_published(), prediction.of_hardware()):
        assert [row.bar is not None for row in rows] == [False] * (len(rows) - 1) + [True]
        assert rows[-1].is_met


def test_the_whole_table_says_what_was_missed(monkeypatch):
    monkeypatch.setattr(prediction, "own_runs", made_up)
    results = prediction.measure(lambda doing: None)
    assert sum(row.subject.startswith("own") for row in results.rows) == 2
    assert "AmoebaNet-D, 2 stages: measured 1.21, predicted 1.94" in results.notes
    assert "Missed up to 256 MB" in results.notes


def test_where_no_network_can_be_made_slow_the_rows_are_missed(monkeypatch, capsys):
    def refuse(name, say):
        raise JobError("network is slow; this machine cannot emulate it")

    monkeypatch.setattr(prediction, "own_runs", refuse)
    results = prediction.measure(lambda doing: None)
    assert [row.reason for row in results.rows if isinstance(row, NotMeasured)] == [
        "network is slow; this machine cannot emulate it"
    ] * 2
    assert results.missed == 2
    assert benchmarks.run(["made_up"], {"made_up": prediction.measure}) == 1
    assert "Bars missed: 2" in capsys.readouterr().out


def test_a_parameter_server_s_longest_runs_are_left_out():
    assert prediction._sizes_of_runs(6, servers=True) == [500_000, 1_000_000]
    assert prediction._sizes_of_runs(2, servers=True) == [500_000, 1_000_000, 2_000_000, 4_000_000]
    assert prediction._sizes_of_runs(6, servers=False) == ["500000,1000000,2000000,4000000"]


def test_it_can_be_asked_for_by_name():
    assert benchmarks.BENCHMARKS["prediction"] is prediction.measure
    with pytest.raises(benchmarks.BenchmarkError, match="prediction"):
        benchmarks.run(["predictions"])
