"""Shared memory: arrays from `allocate` are read where they lie, others go through the slots."""

import time

import numpy as np
import pytest

from workshop_utils.comm import shared_memory
from workshop_utils.comm.mailbox import PIECE

TRANSPORTS = ("shared memory", "shared memory with tokens")
LENGTH = 5 * PIECE + 7


def pieces_taken(communicator):
    """How many pieces it takes to receive the same bytes: ordinary, allocated, a view of allocated, and small."""
    peer = 1 - communicator.rank
    allocated = communicator.allocate((3, LENGTH), np.uint8)
    allocated[:] = communicator.rank + 1
    taken = []
    for outgoing in (
        np.full(LENGTH, communicator.rank + 1, np.uint8),
        allocated[1],
        allocated[2, 5:-1],
        allocated[0, :9],
    ):
        incoming = np.zeros_like(outgoing)
        before = communicator._incoming[peer].number
        communicator.send_recv(peer, outgoing, peer, incoming)
        assert (incoming == peer + 1).all()
        taken.append(communicator._incoming[peer].number - before)
    return taken


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_allocated_arrays_and_their_views_are_read_where_they_lie(ranks, transport):
    assert ranks.run(transport, 2, pieces_taken) == [[6, 1, 1, 1]] * 2


def overwrite_after_sending(communicator):
    for array in (communicator.allocate(LENGTH), np.zeros(LENGTH, np.float32), communicator.allocate(3)):
        for step in range(20):
            if communicator.rank == 0:
                array[:] = step
                communicator.send(1, array)
                array[:] = -1
            else:
                into = np.empty_like(array)
                communicator.recv(0, into)
                if not (into == step).all():
                    return f"{array.size} at step {step}"
    return ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_array_may_be_changed_as_soon_as_send_has_returned(ranks, transport):
    assert ranks.run(transport, 2, overwrite_after_sending) == ["", ""]


def ping_after_naps(communicator):
    """The longest that a message took to a receiver that had fallen asleep, in seconds."""
    peer, longest = 1 - communicator.rank, 0.0
    token = np.zeros(1)
    for _ in range(5):
        if communicator.rank == 0:
            time.sleep(0.1)
            started = time.monotonic()
            communicator.send(peer, token)
            communicator.recv(peer, token)
            longest = max(longest, time.monotonic() - started)
        else:
            communicator.recv(peer, token)
            communicator.send(peer, token)
    return longest


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sleeping_receiver_is_woken(ranks, transport):
    assert ranks.run(transport, 2, ping_after_naps)[0] < 5.0


def many_segments(communicator):
    peer = 1 - communicator.rank
    arrays = [communicator.allocate(20_000, np.int32) for _ in range(50)]
    for number, array in enumerate(arrays):
        array[:] = number
    incoming = np.empty(20_000, np.int32)
    for number in [*range(49, -1, -1), 7, 7]:
        communicator.send_recv(peer, arrays[number], peer, incoming)
        if not (incoming == number).all():
            return number
    return None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_is_shown_to_a_peer_when_it_is_first_used(ranks, transport):
    assert ranks.run(transport, 2, many_segments) == [None, None]


def test_allocated_arrays_are_zeros_of_the_shape_and_dtype_and_outlive_the_communicator():
    with shared_memory.connect(0, 1, "127.0.0.1:4000", b"secret") as communicator:
        array = communicator.allocate((3, 5), np.float16)
        none = communicator.allocate(0)
        number = communicator.allocate(())
    assert array.shape == (3, 5)
    assert array.dtype == np.float16
    assert not array.any()
    array += 1
    assert none.size == 0
    assert number.shape == ()
