"""Parameters in shared memory: what a lock guarantees, and what must hold without one."""

import os
import threading

import numpy as np
import psutil
import pytest

from workshop_utils.comm import hogwild, threads
from workshop_utils.comm.communicator import CommunicationError, PeerSilent
from workshop_utils.comm.hogwild import SharedPart
from workshop_utils.comm.parameter_server import Arrangement

ELEMENTS = 1003


def add_ones(communicator, arrangement, locking):
    """Every push adds one to every element: the rank's parameters at the end, its log, its open descriptors."""
    parameters = np.zeros(ELEMENTS, np.float32)
    ones = np.ones_like(parameters)

    def update(part, gradient):
        part += gradient

    before = psutil.Process().num_fds()
    log = hogwild.train(communicator, arrangement, parameters, lambda *_: ones, update, locking)
    return parameters, log, psutil.Process().num_fds() - before


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("locking", ["lock", "none"])
def test_with_a_lock_every_update_counts_and_without_one_no_more_than_was_added(ranks, locking, servers):
    arrangement = Arrangement(servers, 3, 1000, "asynchronous")
    results = ranks.run(arrangement.size, add_ones, arrangement, locking)
    least = 3000 if locking == "lock" else 1
    for server, (parameters, log, _) in enumerate(results[:servers]):
        part = arrangement.part(parameters, server)
        assert least <= part.min() <= part.max() <= 3000
        assert log.version == 3000  # counters of their own, which cannot be lost
        assert [log.worker.count(rank) for rank in arrangement.worker_ranks] == [1000] * 3
        assert log.seconds == sorted(log.seconds)
        assert 0 <= min(log.staleness) <= max(log.staleness) <= 2000
        assert locking == "none" or not any(log.overlapped)
    for parameters, _, _ in results[servers:]:
        # On workers too, whoever was ready first.
        assert least <= parameters.min() <= parameters.max() <= 3000


def test_nothing_stays_open_and_no_memory_has_a_name(ranks):
    blocks = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names are all that is asked
    for _, _, left_open in ranks.run(3, add_ones, Arrangement(1, 2, 5, "asynchronous"), "none"):
        assert left_open == 0
    assert not {name for name in set(os.listdir("/dev/shm")) - blocks if "workshop" in name}  # noqa: PTH208


def test_an_overlapped_pull_is_seen_and_staleness_counts_the_others_updates():
    arrangement = Arrangement(1, 2, 1, "asynchronous")

    def program(communicator):
        part = np.zeros(5)
        if communicator.rank == 0:
            shared = SharedPart(communicator, arrangement, 0, part, "none")
            communicator.barrier()
            shared.close()
            return None
        shared = SharedPart(communicator, arrangement, 0, part, "none")
        communicator.barrier()
        seen = None
        if communicator.rank == 1:
            before, calm = shared.pull(part)
            during = []

            def update(parameters, gradient):
                during.append(shared.pull(part))  # as another worker might, in the middle
                parameters += gradient

            shared.push(1, np.ones(5), update, 0)
            seen = before, calm, shared.push(0, np.ones(5), update, before), during[0][1]
        shared.close()
        return seen

    assert threads.run(3, program)[1] == (0, False, 1, True)


def test_a_worker_does_not_wait_for_ever_for_one_that_makes_no_update():
    arrangement = Arrangement(1, 2, 1, "asynchronous")
    released = threading.Event()

    def program(communicator):
        def gradient_of(parameters, _):
            if communicator.rank == 2:
                released.wait(20)
            return parameters

        communicator.timeout_seconds = 20.0 if communicator.rank == 0 else 0.2
        try:
            hogwild.train(communicator, arrangement, np.zeros(3), gradient_of, lambda *_: None, "none")
        finally:
            released.set()

    with pytest.raises(PeerSilent, match=r"1 of 2 updates came, and none in 0\.2 s"):
        threads.run(3, program)


@pytest.mark.parametrize("consistency", ["synchronous", "stale_synchronous"])
def test_only_asynchronous_workers_share_memory(consistency):
    with pytest.raises(ValueError, match=f"consistency is '{consistency}'"):
        threads.run(2, lambda c: add_ones(c, Arrangement(1, 1, 1, consistency), "none"))


@pytest.mark.parametrize("place", ["/nowhere", "another"])
def test_memory_that_is_not_the_servers_is_refused_by_name(place, monkeypatch):
    arrangement = Arrangement(1, 1, 1, "asynchronous")
    other = os.memfd_create("other")
    if place == "another":  # as large as the server's, with other contents
        os.ftruncate(other, 3 * 64 + 4 * ELEMENTS)

    def program(communicator):
        part = np.zeros(ELEMENTS, np.float32)
        if communicator.rank == 0:
            descriptor = other if place == "another" else 10**6
            communicator.send(1, np.array([os.getpid(), descriptor, 12345], np.int64))
        else:
            SharedPart(communicator, arrangement, 0, part, "none").close()

    try:
        with pytest.raises(CommunicationError, match=r"the memory of server 0 cannot be mapped .*same user"):
            threads.run(2, program)
    finally:
        os.close(other)
