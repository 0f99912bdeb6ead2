"""A stamped link delivers what was sent, not before a link of its bandwidth and latency would have."""

import numpy as np
import pytest

from workshop_utils.comm import threads
from workshop_utils.comm.central import central_all_reduce
from workshop_utils.comm.communicator import CommunicationError, Mismatch, PeerDied
from workshop_utils.comm.halving_doubling import halving_doubling_all_reduce
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.shape import Shape
from workshop_utils.comm.simulated import simulate
from workshop_utils.comm.stamped import StampedCommunicator
from workshop_utils.comm.topology import Link
from workshop_utils.comm.tree import tree_all_reduce

ALL_REDUCES = (ring_all_reduce, central_all_reduce, tree_all_reduce, halving_doubling_all_reduce)
FAST = 1e12


def run(size, program):
    """What `program` returns on each rank behind a fast link."""
    return threads.run(size, lambda inner: program(StampedCommunicator(inner, (FAST,) * size)))


def seconds_of(size, program, bandwidths, latency_seconds=0.0):
    """How long `program` takes on each rank, where messages below the stamps take no time at all."""
    return simulate(
        size, lambda inner: program(StampedCommunicator(inner, bandwidths, latency_seconds))
    ).finish_seconds.tolist()


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_every_all_reduce_gives_the_same_result_and_traffic_as_without_a_link(size, all_reduce, dtype):
    def program(communicator):
        array = (np.arange(7) + communicator.rank).astype(dtype)
        all_reduce(communicator, array)
        return (
            array.tolist(),
            communicator.traffic.bytes_sent.tolist(),
            communicator.traffic.messages_sent.tolist(),
        )

    assert run(size, program) == threads.run(size, program)


def test_the_slower_of_two_links_decides():
    def program(communicator):
        array = np.zeros(100_000, np.uint8)
        if communicator.rank == 0:
            communicator.recv(1, array)
            communicator.recv(2, array)
        else:
            communicator.send(0, array)

    seconds = seconds_of(3, program, (1e6, FAST, 0.25e6))
    assert max(seconds) == pytest.approx(0.4)  # rank 2's own link, while rank 0's has room beside it


@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
def test_an_all_reduce_takes_as_long_as_on_the_simulated_clock(all_reduce):
    link = Link(0.005, 2e6)
    expected = simulate(4, lambda c: all_reduce(c, Shape(30_000)), link).seconds
    program = lambda c: all_reduce(c, np.zeros(30_000, np.float32))  # noqa: E731
    assert max(seconds_of(4, program, (2e6,) * 4, 0.005)) == pytest.approx(expected)


def test_another_dtype_is_a_mismatch():
    def dtypes(communicator):
        array = np.zeros(4, np.float32 if communicator.rank else np.int32)
        ring_all_reduce(communicator, array)

    with pytest.raises(Mismatch, match=r"sent (float32|int32) where rank \d expects (float32|int32)"):
        run(2, dtypes)


def all_reduce_a_large_array(communicator, bandwidth):
    """More than any buffer of the transport below holds, in a ring where all send at once."""
    with StampedCommunicator(communicator, (bandwidth,) * communicator.size, 0.001) as stamped:
        array = np.full(300_007, stamped.rank, np.float64)
        ring_all_reduce(stamped, array, "mean")
        return float(array.max()), float(array.min())


def test_it_wraps_the_transport_between_processes(ranks):
    assert ranks.run(3, all_reduce_a_large_array, 100e6) == [(1.0, 1.0)] * 3


def fail_on_rank_1(communicator):
    try:
        with StampedCommunicator(communicator, (FAST,) * communicator.size) as stamped:
            if stamped.rank == 1:
                raise ZeroDivisionError
            ring_all_reduce(stamped, np.zeros(10))
    except (CommunicationError, ZeroDivisionError) as error:
        return type(error), getattr(error, "rank", None)


def test_the_failure_of_a_rank_reaches_the_others_through_the_link(ranks):
    told = ranks.run(3, fail_on_rank_1)
    assert told[0] == told[2] == (PeerDied, 1)
