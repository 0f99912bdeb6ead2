"""The frameworks beside each other: what is measured, in which order, and what is said of what fails."""

import pytest

from workshop_utils import benchmarks
from workshop_utils.benchmarks import frameworks
from workshop_utils.benchmarks.comparison import Comparison, NotMeasured
from workshop_utils.runs import RunFailed


@pytest.fixture
def measured(monkeypatch):
    """The jobs in the order in which they are measured; the speed is a hundred a worker, or what `speeds` says."""
    jobs, speeds = [], {}

    def speed(job):
        jobs.append((job.strategy, job.workers))
        answer = speeds.get((job.strategy, job.workers), 100.0 * job.workers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(frameworks, "samples_per_second", speed)
    monkeypatch.setattr(frameworks, "MOST_ROUNDS", 1)
    return jobs, speeds


def test_it_is_one_of_the_benchmarks():
    assert benchmarks.BENCHMARKS["frameworks"] is frameworks.measure


def test_every_way_is_measured_straight_after_horovod_with_every_number_of_workers_that_it_can_have(measured):
    jobs, speeds = measured
    speeds["torch_ddp", 2] = 50.0
    results = frameworks.measure(lambda words: None)
    assert jobs == [
        ("horovod", 1), ("torch_ddp", 1), ("multi_worker_mirrored", 1),
        ("horovod", 2), ("torch_ddp", 2), ("multi_worker_mirrored", 2), ("parameter_server", 2),
        ("horovod", 4), ("torch_ddp", 4), ("multi_worker_mirrored", 4), ("parameter_server", 4),
    ]  # fmt: skip
    assert results.missed == 0
    assert len(results.rows) == 8
    rows = {row.subject: row for row in results.rows}
    row = rows["2 workers: horovod, beside torch_ddp"]
    assert isinstance(row, Comparison)
    assert (row.ours, row.theirs, row.ratio.median) == ((200.0,), (50.0,), 4.0)
    assert "1 worker: horovod, beside parameter_server" not in rows


def test_all_train_the_same_network_with_the_same_batch():
    batches = {
        job.arguments["batch-size"]
        for job in (frameworks.job_of(name, 2) for name in ("horovod", *frameworks.OTHERS))
    }
    assert batches == {frameworks.BATCH}


def test_what_fails_is_a_row_of_its_own_and_the_others_are_measured_all_the_same(measured):
    jobs, speeds = measured
    speeds["multi_worker_mirrored", 2] = RunFailed("worker-1 was killed")
    speeds["horovod", 4] = RunFailed("there is no Horovod")
    results = frameworks.measure(lambda words: None)
    missed = {row.subject: row.reason for row in results.rows if isinstance(row, NotMeasured)}
    assert missed == {
        "2 workers: horovod, beside multi_worker_mirrored": "worker-1 was killed",
        **{
            f"4 workers: horovod, beside {other}": "there is no Horovod"
            for other in ("torch_ddp", "multi_worker_mirrored", "parameter_server")
        },
    }
    assert ("torch_ddp", 4) not in jobs
