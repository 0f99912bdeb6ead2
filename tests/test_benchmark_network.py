"""The bench of the emulated network, on made-up numbers: theory, bars and rows."""

import pytest

from workshop_utils.benchmarks import network
from workshop_utils.benchmarks.network import CONTESTS, WORKERS, rows_of
from workshop_utils.comm import central, ring
from workshop_utils.runs import Run

CONTEST = {contest.subject: contest for contest in CONTESTS}


def test_theory_grows_as_the_lesson_says():
    growth = {
        name: contest.seconds(WORKERS[-1], 1e6) / contest.seconds(WORKERS[0], 1e6)
        for name, contest in CONTEST.items()
    }
    rings = dict.fromkeys(("ring", "gloo", "horovod", "mpi"), 1.75)
    expected = {**rings, "central all-reduce": 7.0, "parameter server": 4.0}
    assert growth == pytest.approx(expected)


def test_theory_is_that_of_the_algorithms():
    assert CONTEST["ring"].seconds(8, 1e6) == pytest.approx(ring.ring_bytes_sent(8, 4_000_000) / 1e6)
    assert CONTEST["central all-reduce"].seconds(4, 1e6) == pytest.approx(2 * 3 * 2.0)
    assert CONTEST["central all-reduce"].seconds(4, 1e6) == central.central_seconds(4, 2_000_000, 0.0, 1e6)
    assert CONTEST["parameter server"].seconds(4, 1e6) == pytest.approx(2 * 4 * 2.0)


def test_what_equals_theory_meets_every_bar_and_a_tenth_more_does_not():
    bandwidth = network.goodput(network.NETWORK)
    for contest in CONTESTS:
        exact = [[contest.seconds(workers, bandwidth)] * 3 for workers in WORKERS]
        assert all(row.is_met for row in rows_of(contest, exact))
        late = [[1.11 * seconds for seconds in measured] for measured in exact]
        assert [row.is_met for row in rows_of(contest, late)] == [contest.bar is None] * len(WORKERS) + [True]


def test_growth_is_of_the_most_workers_over_the_fewest():
    rows = rows_of(CONTEST["ring"], [[1.0], [1.0], [1.0], [1.0], [2.1]])
    assert rows[-1].ratio.median == pytest.approx(2.1)
    assert not rows[-1].is_met


def test_a_repeat_lasts_as_long_as_its_slowest_rank_and_the_first_does_not_count(monkeypatch):
    class MadeUp(Run):
        def __init__(self, records):
            super().__init__("made up", ())
            self._records = [{"workshop": "metric", **record} for record in records]

        def _request_stop(self):
            self._finish("succeeded")

        def wait(self, timeout_seconds=None):
            return self

    class Local:
        def __init__(self, **_):
            pass

        def launch(self, job):
            return MadeUp(records)

    monkeypatch.setattr(network, "Local", Local)
    records = [
        {"step": step, "all_reduce_seconds": seconds}
        for rank in (1.0, 2.0)
        for step, seconds in enumerate((9.0, rank, 3.0 * rank, 2.0 * rank))
    ]
    assert network.seconds_of_repeats(CONTEST["ring"], 2) == [2.0, 6.0, 4.0]
    del records[3], records[6]
    with pytest.raises(network.BenchmarkError, match="3 of 4 repeats"):
        network.seconds_of_repeats(CONTEST["ring"], 2)


def test_what_fails_is_a_row_that_is_missed_and_the_others_are_measured(monkeypatch):
    def seconds_of_repeats(contest, workers):
        if contest.subject == "gloo":
            raise network.BenchmarkError("made up")
        return [contest.seconds(workers, network.goodput(network.NETWORK))]

    monkeypatch.setattr(network, "seconds_of_repeats", seconds_of_repeats)
    results = network.measure(lambda _: None)
    assert results.missed == 1
    assert len(results.rows) == (len(CONTESTS) - 1) * (len(WORKERS) + 1) + 1
