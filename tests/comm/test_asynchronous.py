"""The event kernel of asynchronous servers: that it says what the servers' own text says on the simulated clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workshop_utils.comm import asynchronous, parameter_server
from workshop_utils.comm.asynchronous import (
    Pushes,
    compute_times,
    simulate_pushes,
    updates_per_second_at_most,
)
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.parameter_server import Arrangement, ServerLog
from workshop_utils.comm.simulated import Cluster, Link, Shape, SimulatedCommunicator, simulate

SLOW = Link(latency_seconds=1e-3, bandwidth_bytes_per_second=12.5e6, overhead_seconds=1e-4)
FAST = Link(latency_seconds=2e-3, bandwidth_bytes_per_second=125e6, overhead_seconds=5e-5)


def by_own_text(
    arrangement: Arrangement, nbytes: int, times: np.ndarray, link: Link | Cluster, update_seconds: float
) -> list[ServerLog]:
    """The servers' logs of `parameter_server.train` on the simulated clock."""

    def program(communicator: Communicator) -> ServerLog | None:
        assert isinstance(communicator, SimulatedCommunicator)

        def gradient_of(parameters: Any, step: int) -> Any:
            communicator.compute(times[communicator.rank - arrangement.servers, step])
            return parameters

        def update(*_: Any) -> None:
            communicator.compute(update_seconds)

        return parameter_server.train(communicator, arrangement, Shape(nbytes // 4), gradient_of, update)

    logs = simulate(arrangement.size, program, link).results[: arrangement.servers]
    return [log for log in logs if log is not None]


def assert_equal_to_own_text(
    pushes: Pushes, logs: list[ServerLog], servers: int, seconds_within: float
) -> None:
    assert len(logs) == len(pushes.worker) == servers
    for index, log in enumerate(logs):
        np.testing.assert_array_equal(pushes.worker[index], np.array(log.worker) - servers)
        np.testing.assert_array_equal(pushes.staleness[index], log.staleness)
        np.testing.assert_allclose(pushes.seconds[index], log.seconds, rtol=seconds_within, atol=0)


@pytest.mark.parametrize("nbytes", [4, 400_000, 4_000_004], ids=["idle", "busy", "choked"])
@pytest.mark.parametrize(
    ("servers", "workers", "consistency", "bound"),
    [
        (1, 16, "asynchronous", 0),
        (1, 1, "asynchronous", 0),
        (3, 16, "asynchronous", 0),
        (1, 16, "stale_synchronous", 2),
        (2, 5, "stale_synchronous", 0),
        (3, 16, "stale_synchronous", 1),
    ],
)
def test_the_heap_gives_exactly_what_the_servers_own_text_gives(
    servers: int, workers: int, consistency: Any, bound: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asynchronous, "BATCHES_FROM", 1000)
    arrangement = Arrangement(servers, workers, 12, consistency, bound)
    times = compute_times(workers, 12, 0.1, jitter=0.3, slowness=np.linspace(1, 3, workers).tolist())
    pushes = simulate_pushes(arrangement, nbytes, times, SLOW, update_seconds=2e-3)
    # Three servers' answers may be added up in another order; otherwise the additions are the same ones.
    within = 1e-14 if servers > 1 else 0
    logs = by_own_text(arrangement, nbytes, times, SLOW, 2e-3)
    assert_equal_to_own_text(pushes, logs, servers, within)


@pytest.mark.parametrize("nbytes", [4, 400_000, 4_000_004], ids=["idle", "busy", "choked"])
@pytest.mark.parametrize(("workers", "slowest"), [(16, 1.0), (16, 5.0), (60, 1.5)])
def test_batches_give_what_the_servers_own_text_gives_to_rounding(
    workers: int, slowest: float, nbytes: int
) -> None:
    assert workers >= asynchronous.BATCHES_FROM
    arrangement = Arrangement(1, workers, 12, "asynchronous")
    times = compute_times(workers, 12, 0.1, jitter=0.3, slowness=np.linspace(1, slowest, workers).tolist())
    pushes = simulate_pushes(arrangement, nbytes, times, SLOW, update_seconds=2e-3)
    assert_equal_to_own_text(pushes, by_own_text(arrangement, nbytes, times, SLOW, 2e-3), 1, 1e-11)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_may_have_another_link_than_its_workers(servers: int) -> None:
    arrangement = Arrangement(servers, 6, 12, "asynchronous")
    times = compute_times(6, 12, 0.1, jitter=0.3)
    pushes = simulate_pushes(arrangement, 400_000, times, SLOW, server_link=FAST)
    cluster = Cluster(SLOW, exceptions=dict.fromkeys(range(servers), FAST))
    assert_equal_to_own_text(pushes, by_own_text(arrangement, 400_000, times, cluster, 0.0), servers, 1e-12)


def test_a_thousand_workers_are_the_same_in_batches_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    arrangement, times = Arrangement(1, 1000, 20, "asynchronous"), compute_times(1000, 20, 0.1, jitter=0.3)
    batches = simulate_pushes(arrangement, 100_000, times, FAST)
    monkeypatch.setattr(asynchronous, "BATCHES_FROM", 10_000)
    one_by_one = simulate_pushes(arrangement, 100_000, times, FAST)
    np.testing.assert_array_equal(batches.worker, one_by_one.worker)
    np.testing.assert_array_equal(batches.staleness, one_by_one.staleness)
    np.testing.assert_allclose(batches.seconds, one_by_one.seconds, rtol=1e-11)


@pytest.mark.parametrize("workers", [3, 40])
def test_every_worker_pushes_once_a_step_and_staleness_adds_up(workers: int) -> None:
    pushes = simulate_pushes(
        Arrangement(1, workers, 30, "asynchronous"), 4000, compute_times(workers, 30, 0.1, 0.5), FAST
    )
    np.testing.assert_array_equal(np.bincount(pushes.worker[0]), 30)
    assert (np.diff(pushes.seconds) > 0).all()
    for worker in range(workers):  # what came between a worker's pushes is what made them stale
        own = np.flatnonzero(pushes.worker[0] == worker)
        np.testing.assert_array_equal(np.diff(own) - 1, pushes.staleness[0, own[1:]])


def test_the_bound_keeps_the_fastest_within_it() -> None:
    arrangement = Arrangement(1, 8, 20, "stale_synchronous", bound=2)
    times = compute_times(8, 20, 0.1, slowness=[1, 1, 1, 1, 1, 1, 1, 10])
    made = dict.fromkeys(range(8), 0)
    for worker in simulate_pushes(arrangement, 4000, times, FAST).worker[0].tolist():
        assert made[worker] - min(made.values()) <= 2
        made[worker] += 1


@pytest.mark.parametrize("nbytes", [4, 1_000_000])
@pytest.mark.parametrize("workers", [1, 8, 64, 256])
def test_throughput_stays_below_the_operational_bounds_and_meets_them_far_from_where_they_cross(
    workers: int, nbytes: int
) -> None:
    times = compute_times(workers, 60, 0.1, jitter=0.3)
    pushes = simulate_pushes(Arrangement(1, workers, 60, "asynchronous"), nbytes, times, FAST)
    most = float(updates_per_second_at_most(workers, times.mean(), nbytes, FAST))
    found = pushes.steady().updates_per_second
    assert found <= 1.05 * most  # the mean of the times in the middle is not that of all
    if nbytes == 4 or workers in (1, 256):
        assert found == pytest.approx(most, rel=0.05)


def test_several_servers_have_the_bounds_of_their_links_too() -> None:
    arrangement, times = Arrangement(4, 64, 20, "asynchronous"), compute_times(64, 20, 0.001)
    pushes = simulate_pushes(arrangement, 4_000_000, times, FAST)
    most = float(updates_per_second_at_most(64, 0.001, 4_000_000, FAST, servers=4))
    assert pushes.steady().updates_per_second == pytest.approx(most, rel=0.02)


def test_equals_are_as_stale_as_there_are_others() -> None:
    times = compute_times(200, 30, 0.1, jitter=0.1)
    pushes = simulate_pushes(Arrangement(1, 200, 30, "asynchronous"), 4000, times, FAST)
    assert pushes.steady().staleness.mean() == pytest.approx(199, rel=0.02)


def test_computing_times_have_their_median_their_slowness_and_their_seed() -> None:
    times = compute_times(3, 2001, 0.1, jitter=0.5, slowness=[1, 1, 4], seed=3)
    np.testing.assert_allclose(np.median(times, axis=1), [0.1, 0.1, 0.4], rtol=0.1)
    np.testing.assert_array_equal(times, compute_times(3, 2001, 0.1, 0.5, [1, 1, 4], seed=3))
    np.testing.assert_array_equal(compute_times(2, 3, 0.1), np.full((2, 3), 0.1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arrangement": Arrangement(1, 2, 3)}, "consistency is 'synchronous'"),
        ({"compute_seconds": np.ones((3, 2))}, r"compute_seconds has shape \(3, 2\).*2 workers and 3 steps"),
        ({"compute_seconds": -np.ones((2, 3))}, "compute_seconds and update_seconds must be at least 0"),
        ({"update_seconds": -1.0}, "compute_seconds and update_seconds must be at least 0"),
    ],
)
def test_numbers_that_do_not_go_together_are_named(changes: dict[str, Any], said: str) -> None:
    values: dict[str, Any] = {
        "arrangement": Arrangement(1, 2, 3, "asynchronous"),
        "nbytes": 8,
        "compute_seconds": np.ones((2, 3)),
    }
    with pytest.raises(ValueError, match=said):
        simulate_pushes(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"seconds": -1.0}, "seconds is -1.0"), ({"slowness": [1.0]}, "slowness has 1 entries; .* 2 workers")],
)
def test_computing_times_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compute_times(**({"workers": 2, "steps": 3, "seconds": 0.1} | changes))
