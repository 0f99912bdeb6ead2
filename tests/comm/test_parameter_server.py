"""The parameter server: consistency, staleness, backup workers; in simulated time where it matters who is late."""

import numpy as np
import pytest

from workshop_utils.comm import parameter_server, threads
from workshop_utils.comm.parameter_server import Arrangement
from workshop_utils.comm.simulated import Link, simulate

TARGET = np.arange(7.0)


def descend(arrangement, delays=None, rate=0.3, **options):
    """Each worker pulls, computes the gradient of |p - target|²/2, pushes. Returns the results of each rank.

    `delays` are the simulated seconds of each worker's gradient; without them the ranks are threads.
    """

    def program(communicator):
        parameters = np.zeros(TARGET.size)

        def gradient_of(current, step):
            if delays:
                communicator.sleep(delays[communicator.rank - arrangement.servers])
            return current - TARGET

        def update(part, gradient):
            part -= rate * gradient

        log = parameter_server.train(communicator, arrangement, parameters, gradient_of, update)
        return parameters, log, communicator.traffic

    if delays:
        return simulate(arrangement.size, program).results
    return threads.run(arrangement.size, program, **options)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_stale_synchronous_keeps_the_fastest_within_the_bound(bound):
    arrangement = Arrangement(1, 3, steps=12, consistency="stale_synchronous", bound=bound)
    log = descend(arrangement, delays=[0.0, 0.0, 0.005], rate=0.1)[0][1]
    made = dict.fromkeys(arrangement.worker_ranks, 0)
    for worker in log.worker:
        # Whoever pushes had been let go on: it was then at most `bound` ahead of the slowest unfinished worker.
        assert made[worker] - min(made.values()) <= bound
        made[worker] += 1
    assert set(made.values()) == {12}


def test_backup_workers_let_the_others_go_on_and_drop_what_comes_late():
    arrangement = Arrangement(1, 3, steps=10, backup_workers=1)
    parameters, log, _ = descend(arrangement, delays=[0.0, 0.0, 0.05])[0]
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

    def program(communicator):
        def gradient_of(current, step):
            communicator.sleep(communicator.rank)  # worker 1 takes 1 s, worker 2 takes 2 s
            return current

        return parameter_server.train(
            communicator, arrangement, np.zeros(4), gradient_of, lambda part, _: None
        )

    # A version takes 0.25 s, parameters and gradients 1 s: worker 1 computes from 1.25, worker 2 from 2.5 s. The third
    # push is there at 6.5 s, but the server answers worker 2 until 6.75 s.
    log = simulate(3, program, Link(0, 32)).results[0]
    assert (log.worker, log.seconds) == ([1, 2, 1, 2], [3.25, 5.5, 6.75, 9.75])


def test_how_far_a_worker_is_ahead_counts_active_workers_only():
    state = parameter_server.State(range(1, 4))
    state.pushes = {1: 5, 2: 3, 3: 0}
    assert state.ahead(1) == 5
    state.active = {1, 2}
    assert (state.ahead(1), state.ahead(2)) == (2, 0)


@pytest.mark.parametrize(("workers", "bound"), [(2, 0), (2, 1), (2, 3), (4, 2)])
def test_staleness_under_a_bound_has_the_limit_that_lesson_03_derives_and_the_lead_reaches_the_bound(
    workers, bound
):
    arrangement = Arrangement(1, workers, steps=30, consistency="stale_synchronous", bound=bound)
    uneven = np.random.default_rng(0).choice([1.0, 10.0], size=(workers, 30), p=[0.8, 0.2])

    def program(communicator):
        def gradient_of(current, step):
            communicator.sleep(uneven[communicator.rank - 1, step])
            return current - TARGET

        return parameter_server.train(
            communicator,
            arrangement,
            np.zeros(TARGET.size),
            gradient_of,
            lambda p, g: np.subtract(p, 0.1 * g, out=p),
        )

    log = simulate(arrangement.size, program).results[0]
    assert 0 < max(log.staleness) <= (workers - 1) * (2 * bound + 1)
    made, leads = dict.fromkeys(arrangement.worker_ranks, 0), []
    for worker in log.worker:
        leads.append(made[worker] - min(made.values()))  # when it was let go on
        made[worker] += 1
    assert max(leads) == bound


def test_servers_that_drop_different_gradients_end_at_different_times_and_each_makes_all_its_updates():
    arrangement = Arrangement(2, 3, steps=9, backup_workers=1)
    uneven = np.random.default_rng(15).uniform(1, 3, size=(3, 200))  # one of few seeds with such an end

    def program(communicator):
        parameters = np.zeros(40)

        def gradient_of(current, step):
            communicator.sleep(uneven[communicator.rank - 2, step])
            return current - 1

        def update(part, gradient):
            part -= 0.5 * gradient

        log = parameter_server.train(communicator, arrangement, parameters, gradient_of, update)
        return parameters, log, communicator.traffic.messages_sent[:2].tolist()

    ended = simulate(5, program, Link(0, 160)).results  # a push to one server takes a second
    logs = [log for _, log, _ in ended[:2]]
    assert [log.version for log in logs] == [9, 9]
    dropped = [[each for each, late in zip(log.worker, log.dropped, strict=True) if late] for log in logs]
    assert sorted(dropped[0]) != sorted(dropped[1])
    assert any(sent[0] != sent[1] for _, _, sent in ended[2:])  # one goes on with a server alone
    for parameters, _, _ in ended[2:]:
        np.testing.assert_allclose(parameters, 1 - 0.5**9)


def test_an_asynchronous_server_among_equals_sees_gradients_as_stale_as_there_are_others():
    arrangement = Arrangement(1, 5, steps=20, consistency="asynchronous")

    def program(communicator):
        def gradient_of(current, step):
            communicator.sleep(1.0 + 0.01 * communicator.rank)
            return current

        return parameter_server.train(communicator, arrangement, np.zeros(3), gradient_of, lambda *_: None)

    assert set(simulate(6, program).results[0].staleness[10:60]) == {4}


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
