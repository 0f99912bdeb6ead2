"""Links, clusters and servers that cannot be are refused by name."""

import threading

import numpy as np
import pytest

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import CommunicationError
from workshop_utils.comm.parameter_server import Arrangement
from workshop_utils.comm.simulated import simulate
from workshop_utils.comm.topology import Link, Topology
from workshop_utils.scaling import cost


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Link(-1), "latency_seconds is -1"),
        (lambda: Link(float("nan")), "latency_seconds is nan"),
        (lambda: Link(0, 0), "bandwidth_bytes_per_second is 0; it must be more than 0"),
        (lambda: Link.of("1GB"), "a rate in bits"),
        (lambda: Topology(Link(), ranks_per_machine=0), "ranks_per_machine is 0"),
        (lambda: simulate(0, print), "size is 0"),
        (lambda: cost.all_reduce_seconds("rings", 2, 1, Link(0, 1)), "is 'rings'; it must be one of ring"),
        (lambda: cost.hierarchical_seconds(12, 1, Topology(Link(), 8)), "is 12; it must be a multiple"),
        (lambda: Arrangement(0, 2, 1), "servers"),
        (lambda: Arrangement(1, 0, 1), "workers"),
        (lambda: Arrangement(1, 2, 1, backup_workers=2), "backup_workers"),
        (lambda: Arrangement(1, 2, 1, bound=-1), "bound"),
    ],
)
def test_numbers_that_cannot_be_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("peer", [0, 3, -1])
def test_a_message_to_a_rank_that_there_is_not_names_those_that_there_are(peer):
    said = f"^peer is {peer}; rank 0 of 3 can reach others only, of 0 to 2"
    with pytest.raises(ValueError, match=said):
        simulate(3, lambda communicator: communicator.rank or communicator.send(peer, np.ones(1)))


@pytest.mark.parametrize("run", [simulate, threads.run])
def test_receiving_from_nobody_or_into_nothing_is_refused_at_once(run):
    with pytest.raises(
        CommunicationError, match="rank 0 would wait for ever: it receives from the first of no ranks"
    ):
        run(1, lambda communicator: communicator.recv({}))
    with pytest.raises(ValueError, match="rank 0 receives from rank 1 into nothing; give recv an array"):
        run(2, lambda communicator: communicator.rank == 0 and communicator.recv(1))


@pytest.mark.parametrize("run", [simulate, threads.run])
@pytest.mark.parametrize("into", [np.zeros((3, 2)).T, np.zeros(6)[::-1], np.zeros((6, 2))[:, 0]])
def test_an_array_to_receive_into_that_is_not_contiguous_is_refused(run, into):
    def program(communicator):
        if communicator.rank == 0:
            communicator.recv(1, into)
        else:
            communicator.send(0, np.ones(6))

    with pytest.raises(ValueError, match="is not contiguous; receive into"):
        run(2, program)


@pytest.mark.parametrize("run", [simulate, threads.run])
@pytest.mark.parametrize("message", [5, [1.0], None])
def test_what_is_no_array_is_refused(run, message):
    with pytest.raises(
        TypeError, match=r"messages are NumPy arrays, such as np.array\(\[1.0\]\), and this is"
    ):
        run(2, lambda communicator: communicator.send(1 - communicator.rank, message))


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("leaves", [True, False])
def test_threads_that_can_only_wait_for_each_other_are_refused_before_their_time_is_over(is_buffered, leaves):
    def program(communicator):
        if communicator.rank or not leaves:
            communicator.recv(1 - communicator.rank, np.zeros(1))

    with pytest.raises(CommunicationError, match=r"waits for ever for rank \d in recv"):
        threads.run(2, program, timeout_seconds=3600, is_buffered=is_buffered)


@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_rank_may_send_in_a_thread_of_its_own_also_once_a_thread_of_nobody_has_ended(is_buffered):
    ends = threading.Event()
    foreign = threading.Thread(target=ends.wait)
    foreign.start()

    def program(communicator):
        values = np.ones(1)
        if communicator.rank:
            ends.set()
            foreign.join()
            sender = threading.Timer(0.2, communicator.send, (0, values))
            sender.start()
            communicator.recv(0, values)
            sender.join()
        else:
            communicator.recv(1, np.zeros(1))
            communicator.send(1, 2 * values)
        return values[0]

    assert threads.run(2, program, timeout_seconds=60, is_buffered=is_buffered) == [1, 2]
