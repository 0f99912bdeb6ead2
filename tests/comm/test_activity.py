"""The chess clock of a rank: what it computed, sent, and waited for adds up to the time that has passed."""

import time

import numpy as np
import pytest

from workshop_utils.comm import activity
from workshop_utils.comm.activity import Activity
from workshop_utils.comm.ring import ring_all_reduce

LATE_SECONDS = 0.5


class Waiter:
    waited_seconds = 0.0


def test_each_second_goes_to_one_activity_and_what_is_read_is_counted_anew(monkeypatch):
    now = 100.0
    monkeypatch.setattr(activity.time, "perf_counter", lambda: now)
    communicator = Waiter()
    clock = Activity(communicator)
    now = 103.0
    clock.communicates()
    now, communicator.waited_seconds = 108.0, 4.0
    clock.computes()
    now = 110.0
    assert clock.seconds() == {"compute_seconds": 5.0, "send_seconds": 1.0, "wait_seconds": 4.0}
    now = 111.0
    assert clock.seconds() == {"compute_seconds": 1.0, "send_seconds": 0.0, "wait_seconds": 0.0}


def one_comes_late(communicator):
    """What each rank did from when both were there, and how long that was; rank 1 computes for longer."""
    communicator.barrier()
    clock, start = Activity(communicator), time.perf_counter()
    if communicator.rank == 1:
        time.sleep(LATE_SECONDS)
    clock.communicates()
    ring_all_reduce(communicator, np.ones(100_000, np.float32))
    clock.computes()
    spent = clock.seconds()
    return spent, time.perf_counter() - start


def test_who_is_early_waits_for_who_is_late_and_the_parts_are_the_whole(ranks):
    (early, whole), (late, _) = ranks.run("tcp", 2, one_comes_late)
    assert early["wait_seconds"] > 0.5 * LATE_SECONDS
    assert early["send_seconds"] < early["wait_seconds"]
    assert late["compute_seconds"] >= LATE_SECONDS
    assert min(*early.values(), *late.values()) >= 0
    assert sum(early.values()) == pytest.approx(whole, abs=0.1)


def first_message(communicator):
    communicator.barrier()
    if communicator.rank == 1:
        time.sleep(LATE_SECONDS)
        communicator.send(0, np.ones(1))
        return 0.0
    before = communicator.waited_seconds
    communicator.recv(communicator.wait_any([1]), np.empty(1))
    return communicator.waited_seconds - before


def test_a_server_waits_for_whoever_comes_first(ranks):
    assert ranks.run("tcp", 2, first_message)[0] > 0.5 * LATE_SECONDS
