"""The chess clock of a rank: what it computed, sent, and waited for adds up to the time that has passed."""

import time

import numpy as np

from workshop_utils.comm.activity import Activity
from workshop_utils.comm.ring import ring_all_reduce

LATE_SECONDS = 0.5


def one_comes_late(communicator):
    """What each rank did from when both were there, and how long that was, at least and at most; rank 1 comes late."""
    communicator.barrier()
    before = time.perf_counter()
    clock, start = Activity(communicator), time.perf_counter()
    if communicator.rank == 1:
        time.sleep(LATE_SECONDS)
    clock.communicates()
    ring_all_reduce(communicator, np.ones(100_000, np.float32))
    clock.computes()
    least = time.perf_counter() - start
    return clock.seconds(), least, time.perf_counter() - before


def test_who_is_early_waits_for_who_is_late_and_the_parts_are_the_whole(ranks):
    (early, *whole), (late, *_) = ranks.run(2, one_comes_late)
    assert early["wait_seconds"] > 0.5 * LATE_SECONDS
    assert early["send_seconds"] < early["wait_seconds"]
    assert late["compute_seconds"] >= LATE_SECONDS
    assert min(*early.values(), *late.values()) >= 0
    assert whole[0] <= sum(early.values()) <= whole[1]


def first_message(communicator):
    communicator.barrier()
    if communicator.rank == 1:
        time.sleep(LATE_SECONDS)
        communicator.send(0, np.ones(1))
        return 0.0
    before = communicator.traffic.waited_seconds
    communicator.recv([1], np.empty(1))
    return communicator.traffic.waited_seconds - before


def test_a_server_waits_for_whoever_comes_first(ranks):
    assert ranks.run(2, first_message)[0] > 0.5 * LATE_SECONDS
