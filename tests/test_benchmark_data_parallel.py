"""The benches of data parallel steps and of memory, on made-up numbers: rows, bars, what fails."""

import pytest

from workshop_utils.benchmarks import data_parallel, memory_per_rank
from workshop_utils.benchmarks.comparison import BenchmarkError
from workshop_utils.scaling.memory import zero_memory

WAYS = ("PyTorch", "overlapped", "bucketed", "naive", "overlapped, shared memory")


def test_only_the_overlapped_way_over_sockets_has_a_bar():
    rows = data_parallel.comparisons(2, "made up", dict.fromkeys(WAYS, (1.2, 1.2)) | {"PyTorch": (1.0, 1.0)})
    assert [row.bar is not None for row in rows] == [True, False, False, False]
    assert not rows[0].is_met
    assert rows[0].ratio.median == pytest.approx(1.2)


def megabytes_of(factor, missing=()):
    def megabytes(job, workers, **arguments):
        by = arguments.get("by")
        stage = arguments.get("stage", {"ddp": 0, "zero": 1, "fsdp": 3}.get(by))
        if stage in missing:
            raise BenchmarkError("made up")
        times = factor if job == "digits_sharded" else 1.0
        return (times * zero_memory(1e6, workers, stage).total / 1e6,) * workers, 1_000_000

    return megabytes


def test_what_equals_the_formula_meets_every_bar_and_a_fifth_more_meets_none(monkeypatch):
    for factor, met in ((1.0, True), (1.2, False)):
        monkeypatch.setattr(memory_per_rank, "megabytes", megabytes_of(factor))
        rows = memory_per_rank.measure(lambda _: None).rows
        assert len(rows) == len(memory_per_rank.WORKERS) * 7
        assert {row.is_met for row in rows} == {met}


def test_a_stage_that_cannot_be_measured_is_missed_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(memory_per_rank, "megabytes", megabytes_of(1.0, missing=(2,)))
    results = memory_per_rank.measure(lambda _: None)
    assert results.missed == len(memory_per_rank.WORKERS)
