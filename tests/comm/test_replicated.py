"""Replicated parameter servers: whenever one of them is killed, the result is that of an undisturbed run."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from workshop_utils.comm import replicated
from workshop_utils.comm.replicated import Server
from workshop_utils.ranks import RanksFailed, on_ranks

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]

SERVERS, WORKERS, VALUES, STEPS, CRASH = 3, 2, 5, 8, 4  # CRASH: the version during whose update one is killed
TARGETS = np.random.default_rng(0).normal(size=(WORKERS, SERVERS, VALUES))
# What a server has just done for its own range when it is killed.
MOMENTS = ("nothing", "update", "copy", "answer", "second answer")


def apply(row, gradient):
    row -= 0.1 * gradient


class Doomed(Server):
    """It is killed when it has done `moment`, where its range was at `version`."""

    def __init__(self, moment, version, *arguments):
        super().__init__(*arguments)
        self.moment, self.version, self.answers = moment, version, 0

    def _did(self, what, r, version):
        if r == self.communicator.rank and version == self.version and what == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def update(self, r):
        self._did("nothing", r, self.versions[r])
        super().update(r)
        self._did("update", r, self.versions[r] - 1)

    def copy(self, r):
        super().copy(r)
        self._did("copy", r, self.versions[r] - 1)

    def answer(self, worker, r):
        super().answer(worker, r)
        self.answers += r == self.communicator.rank and self.versions[r] == self.version + 1
        self._did({1: "answer", 2: "second answer"}.get(self.answers), r, self.versions[r] - 1)


def program(communicator, moments, push=replicated.push, times=1):
    """`moments`: by server, when it is killed; `times`: how often each range's values are repeated.

    Servers return versions and bytes, workers their parameters.
    """
    parameters, rank = np.zeros((SERVERS, VALUES * times)), communicator.rank
    if rank < SERVERS:
        server = Doomed(*moments.get(rank, ("never", 0)), communicator, parameters, apply)
        replicated.serve(server, push, replicated.keep)
        return server.versions, communicator.traffic.bytes_sent.tolist()
    target = np.tile(TARGETS[rank - SERVERS], times)
    replicated.work(communicator, parameters, lambda now: now**3 + now - target, STEPS)
    return parameters


def undisturbed():
    parameters = np.zeros((SERVERS, VALUES))
    for _ in range(STEPS):
        apply(parameters, np.mean([parameters**3 + parameters - target for target in TARGETS], axis=0))
    return parameters


def without_replica(server, worker, r, version, gradient):
    server.pushed[r][worker] = gradient
    if len(server.pushed[r]) == WORKERS:
        server.update(r)
        for each in server.workers:
            server.answer(each, r)


def run(moments, **options):
    arguments = {"moments": moments} | options
    return on_ranks(SERVERS + WORKERS, program, arguments, may_die=[*moments])


def test_without_a_crash_each_update_goes_once_to_the_next_server():
    (versions, sent), *_, parameters = run({}).values
    np.testing.assert_allclose(parameters, undisturbed(), rtol=1e-12)
    message = 8 * (2 + VALUES)
    assert versions == [STEPS, 0, STEPS]  # its own range, none, and the copy of its predecessor's
    assert sent == [0, STEPS * message, 0, STEPS * message, STEPS * message]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_is_killed_and_nothing_is_lost_or_counted_twice(moment):
    results = run({1: (moment, CRASH)})
    assert results.died == (1,)
    assert results[1].value is None
    for worker in (3, 4):
        np.testing.assert_allclose(results[worker].value, undisturbed(), rtol=1e-12)
    # Each of the two has all ranges: the successor has taken over range 1, and the ring is two servers long.
    assert [results[server].value[0] for server in (0, 2)] == [[STEPS] * 3] * 2


@pytest.mark.parametrize("moment", ["answer", "second answer"])
def test_a_server_that_is_killed_in_the_last_update_does_not_hear_that_workers_are_done(moment):
    times = 80_000  # 3.2 MB a range, more than a send to a dead server leaves in buffers
    results = run({1: (moment, STEPS - 1)}, times=times)
    assert results.died == (1,)
    for worker in (3, 4):
        np.testing.assert_allclose(results[worker].value, np.tile(undisturbed(), times), rtol=1e-12)


def test_two_servers_are_killed_one_after_the_other():
    results = run({1: ("copy", CRASH), 2: ("answer", CRASH + 1)})
    np.testing.assert_allclose(results[4].value, undisturbed(), rtol=1e-12)
    assert set(results.died) == {1, 2}
    assert results[0].value[0] == [STEPS] * 3


def test_two_neighbours_that_are_killed_at_once_take_a_range_with_them():
    with pytest.raises(RanksFailed, match="range 1 is lost: its server and the one with its copy"):
        run({1: ("update", CRASH), 2: ("update", CRASH - 1)})


def test_without_a_replica_what_the_range_had_learned_is_lost():
    results = run({1: ("update", CRASH)}, push=without_replica)
    parameters, right = results[3].value, undisturbed()
    np.testing.assert_allclose(parameters[[0, 2]], right[[0, 2]], rtol=1e-12)
    assert results[2].value[0][1] == STEPS - CRASH
    assert np.abs(parameters[1] - right[1]).max() > 0.01


class Recorder(Server):
    """It notes whom it answers, and talks to nobody."""

    def answer(self, worker, r):
        self.answered = [*getattr(self, "answered", []), (worker, r)]


def test_a_worker_whose_push_comes_before_the_copy_that_contains_it_is_answered_and_counts_once():
    server = Recorder(SimpleNamespace(rank=2, size=SERVERS + WORKERS), np.zeros((SERVERS, VALUES)), apply)
    replicated.keep(server, 1, 6, np.ones(VALUES))
    replicated.push(server, 3, 1, 6, np.ones(VALUES))
    replicated.keep(server, 1, 7, np.full(VALUES, 2.0))
    assert server.answered == [(3, 1)]
    assert (server.versions[1], server.pushed[1]) == (7, {})
    assert (server.ranges[1] == 2).all()


def test_a_copy_that_comes_after_its_update_has_been_made_here_changes_nothing():
    server = Recorder(SimpleNamespace(rank=2, size=SERVERS + WORKERS), np.zeros((SERVERS, VALUES)), apply)
    server.versions[1], server.pushed[1] = 7, {3: np.ones(VALUES)}
    replicated.keep(server, 1, 7, np.ones(VALUES))
    assert (server.versions[1], [*server.pushed[1]]) == (7, [3])
    assert not server.ranges.any()
