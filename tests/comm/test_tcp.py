"""Sockets: messages of every size and dtype arrive whole and in order."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from messages import random_exchanges

from workshop_utils.comm import tcp
from workshop_utils.comm.communicator import CommunicationError


@pytest.mark.parametrize("size", [2, 5])
def test_random_messages_arrive_whole_and_in_order(ranks, size):
    assert ranks.run(size, random_exchanges) == [0] * size


def three_each(communicator):
    """Ranks 1 to 3 have sent three messages each before rank 0, told so by rank 4, hears the first: in which order."""
    word = np.zeros(1)
    if communicator.rank == 4:
        for source in (1, 2, 3):
            communicator.recv(source, word)
        communicator.send(0, word)
        return None
    if communicator.rank:
        for to in (0, 0, 0, 4):
            communicator.send(to, word)
        return None
    communicator.recv(4, word)
    heard = []
    while to_come := [source for source in (1, 2, 3) if heard.count(source) < 3]:
        heard.append(communicator.recv(to_come, word))
    return heard


def test_no_high_rank_starves_behind_low_ones_that_send_again_and_again(ranks):
    heard = ranks.run(5, three_each)[0]
    assert [sorted(heard[turn : turn + 3]) for turn in (0, 3, 6)] == [[1, 2, 3]] * 3


def send_to_one_that_leaves(communicator):
    """Rank 0 has sent more than any buffer holds, to a rank that leaves; what it raises."""
    if communicator.rank == 1:
        return None
    with pytest.raises(CommunicationError) as raised:
        communicator.send(1, np.zeros(100_000_000, np.uint8))
    return str(raised.value)


def test_a_large_message_to_a_rank_that_leaves_ends_with_its_name(ranks):
    assert "rank 1 has already left" in ranks.run(2, send_to_one_that_leaves)[0]


def send_once_and_leave(communicator):
    """Rank 0 receives from whoever comes first, as often as there are others; rank 2 sends when rank 1 has left."""
    number = np.zeros(1)
    if communicator.rank:
        time.sleep(0.3 * (communicator.rank - 1))
        communicator.send(0, number)
        return None
    return [communicator.recv([1, 2], number) for _ in range(2)]


def test_a_rank_that_has_sent_its_last_message_and_left_is_no_reason_not_to_wait_for_the_others(ranks):
    assert ranks.run(3, send_once_and_leave)[0] == [1, 2]


def leave_with_an_unread_message(communicator):
    """Rank 1 leaves right after it has sent, without having read what rank 0 sent."""
    numbers = np.zeros(20_000)
    if communicator.rank == 1:
        time.sleep(0.2)
        communicator.send(0, numbers + 1)
        return None
    communicator.send(1, np.zeros(10))
    time.sleep(0.5)
    communicator.recv(1, numbers)
    return float(numbers.sum())


def test_what_a_rank_has_sent_arrives_though_it_left_something_unread(ranks):
    assert ranks.run(2, leave_with_an_unread_message)[0] == 20_000


def close_while_a_thread_receives(communicator):
    """Rank 0 closes while a thread of its own waits for rank 1; what the thread raises, well before the time-out."""
    if communicator.rank == 1:
        with contextlib.suppress(CommunicationError):
            communicator.recv(0, np.zeros(1))
        return None
    with ThreadPoolExecutor() as pool:
        received = pool.submit(communicator.recv, 1, np.zeros(1))
        time.sleep(0.3)  # until it waits
        communicator.close()
        return str(received.exception(10))


def test_who_closes_keeps_no_thread_waiting(ranks):
    assert ranks.run(2, close_while_a_thread_receives)[0] == "rank 0 has closed its communicator"


@pytest.mark.parametrize(
    ("rank", "size", "secret", "named"),
    [(2, 2, b"s", "rank is 2"), (-1, 2, b"s", "rank"), (0, 1, b"", "secret")],
)
def test_a_rank_that_cannot_be_is_refused(rank, size, secret, named):
    with pytest.raises(ValueError, match=named):
        tcp.connect(rank, size, "127.0.0.1:4000", secret)


def test_one_rank_needs_nobody():
    with tcp.connect(0, 1, "127.0.0.1:4000", b"secret") as communicator:
        communicator.barrier()
