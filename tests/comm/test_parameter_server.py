"""The parameter server: consistency, staleness, backup workers; in simulated time where it matters who is late."""

import numpy as np
import pytest

from workshop_utils.comm import parameter_server, threads
from workshop_utils.comm.parameter_server import Arrangement
from workshop_utils.comm.simulated import Link, simulate

TARGET = np.arange(7.0)


def descend(arrangement, seconds=None, link=None, rate=0.3, **options):
    """Each worker pulls, computes the gradient of |p - target|²/2, pushes. Returns the results of each rank.

    `seconds` are the simulated ones of a gradient, by worker (from 0) and step; without them the ranks are threads.
    """

    def program(communicator):
        parameters = np.zeros(TARGET.size)

        def gradient_of(current, step):
            if seconds:
                communicator.sleep(seconds(communicator.rank - arrangement.servers, step))
            return current - TARGET

        def update(part, gradient):
            part -= rate * gradient

        log = parameter_server.train(communicator, arrangement, parameters, gradient_of, update)
        return parameters, log, communicator.traffic

    if seconds:
        return simulate(arrangement.size, program, link or Link()).results
    return threads.run(arrangement.size, program, **options)


def leads(log, arrangement):
    """By how many pushes each worker was ahead of the slowest when it was let go on."""
    made, ahead = dict.fromkeys(arrangement.worker_ranks, 0), []
    for worker in log.worker:
        ahead.append(made[worker] - min(made.values()))
        made[worker] += 1
    return ahead


def test_backup_workers_let_the_others_go_on_and_drop_what_comes_late():
    arrangement = Arrangement(1, 3, steps=10, backup_workers=1)
    parameters, log, _ = descend(arrangement, lambda worker, _: 0.05 * (worker == 2))[0]
    assert log.version == 10
    assert any(log.dropped)
    assert all(worker == 3 for worker, dropped in zip(log.worker, log.dropped, strict=True) if dropped)
    expected = np.zeros(TARGET.size)
    for _ in range(10):
        expected -= 0.3 * (expected - TARGET)
    np.testing.assert_allclose(parameters, expected, rtol=1e-12)


def test_a_communicator_of_another_size_is_refused():
    with pytest.raises(ValueError, match="3 ranks"):
        threads.run(
            3,
            lambda c: parameter_server.train(
                c, Arrangement(1, 1, 1), np.zeros(3), lambda p, _: p, lambda p, g: None
            ),
        )


def test_the_log_says_when_each_gradient_came():
    arrangement = Arrangement(1, 2, steps=2, consistency="asynchronous")
    # A version takes 1/7 s, parameters and gradients 1 s: worker 1 computes from 8/7, worker 2 from 16/7 s.
    log = descend(arrangement, lambda worker, _: worker + 1, Link(0, 56))[0][1]
    assert log.worker[:2] == [1, 2]
    assert log.seconds[:2] == pytest.approx([8 / 7 + 1 + 1, 16 / 7 + 2 + 1])


@pytest.mark.parametrize(("workers", "bound"), [(2, 0), (2, 1), (2, 3), (4, 2)])
def test_staleness_under_a_bound_has_the_limit_that_lesson_03_derives_and_the_lead_reaches_the_bound(
    workers, bound
):
    arrangement = Arrangement(1, workers, steps=30, consistency="stale_synchronous", bound=bound)
    uneven = np.random.default_rng(0).choice([1.0, 10.0], size=(workers, 30), p=[0.8, 0.2])
    log = descend(arrangement, lambda worker, step: uneven[worker, step], rate=0.1)[0][1]
    assert 0 < max(log.staleness) <= (workers - 1) * (2 * bound + 1)
    assert max(leads(log, arrangement)) == bound


def test_servers_that_drop_different_gradients_end_at_different_times_and_each_makes_all_its_updates():
    arrangement = Arrangement(2, 3, steps=9, backup_workers=1)
    uneven = np.random.default_rng(28).uniform(1, 3, size=(3, 200))  # one of few seeds with such an end
    # A push to one server takes about half a second.
    ended = descend(arrangement, lambda worker, step: uneven[worker, step], Link(0, 56), rate=0.5)
    logs = [log for _, log, _ in ended[:2]]
    assert [log.version for log in logs] == [9, 9]
    dropped = [[each for each, late in zip(log.worker, log.dropped, strict=True) if late] for log in logs]
    assert sorted(dropped[0]) != sorted(dropped[1])
    sent = [traffic.messages_sent[:2] for _, _, traffic in ended[2:]]
    assert any(first != second for first, second in sent)  # one goes on with a server alone
    for parameters, _, _ in ended[2:]:
        np.testing.assert_allclose(parameters, TARGET * (1 - 0.5**9))


def test_an_asynchronous_server_among_equals_sees_gradients_as_stale_as_there_are_others():
    arrangement = Arrangement(1, 5, steps=20, consistency="asynchronous")
    log = descend(arrangement, lambda worker, _: 1.0 + 0.01 * worker)[0][1]
    assert set(log.staleness[10:60]) == {4}


MODES = [
    {"consistency": "synchronous"},
    {"consistency": "synchronous", "backup_workers": 1},
    {"consistency": "synchronous", "backup_workers": 2},
    {"consistency": "stale_synchronous"},
    {"consistency": "stale_synchronous", "bound": 2},
    {"consistency": "asynchronous"},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: " ".join(map(str, mode.values())))
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [3, 5])
def test_no_mode_deadlocks_where_a_send_lasts_until_its_message_is_received(servers, workers, mode):
    arrangement = Arrangement(servers, workers, steps=30, **mode)
    ended = descend(arrangement, rate=0.1, is_buffered=False, timeout_seconds=5)
    logs = [log for _, log, _ in ended[:servers]]
    pushes = 30 if arrangement.consistency == "synchronous" else 30 * workers
    assert [log.version for log in logs] == [pushes] * servers
    for parameters, _, _ in ended[servers:]:
        np.testing.assert_allclose(parameters, TARGET, atol=0.5)
