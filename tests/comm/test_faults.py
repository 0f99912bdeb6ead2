"""A rank that dies, is silent, disagrees or does not belong: every other rank says so, in time, by name."""

import contextlib
import multiprocessing
import os
import re
import secrets
import signal
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from workshop_utils.comm import control, frames, rendezvous, tcp
from workshop_utils.comm.communicator import CommunicationError, FrameError, Mismatch, PeerDied, PeerSilent
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.shape import Shape
from workshop_utils.network.ports import PortReservation

TIMEOUT_SECONDS = 120.0  # of the runs in which a rank dies: the others must not need it


@pytest.fixture
def port():
    with PortReservation(1) as reservation:
        yield reservation.ports[0]


# Programs, which run in processes of their own.


def die_while_reducing(communicator, elements, doomed):
    """The doomed rank is killed by a thread of its own, while the ring is never without a message under way."""
    if communicator.rank == doomed:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    array = np.zeros(elements, np.float32)
    while True:
        ring_all_reduce(communicator, array, "mean")


def outcome_of(rank, size, coordinator, secret, program, args, answers):
    try:
        with tcp.connect(rank, size, coordinator, secret, timeout_seconds=TIMEOUT_SECONDS) as communicator:
            program(communicator, *args)
    except Exception as error:
        answers.put((rank, error, time.monotonic()))


def run_to_the_bitter_end(size, port, program, *args):
    """Each surviving rank's error and how long after the death it came; rank → (error, seconds)."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    run = (size, f"127.0.0.1:{port}", secrets.token_bytes(16), program, args, answers)
    processes = [context.Process(target=outcome_of, args=(rank, *run)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        sentinels = {process.sentinel: rank for rank, process in enumerate(processes)}
        multiprocessing.connection.wait(sentinels, timeout=TIMEOUT_SECONDS)
        died = time.monotonic()
        outcomes = {}
        for _ in range(size - 1):
            rank, error, when = answers.get(timeout=TIMEOUT_SECONDS)
            outcomes[rank] = (error, when - died)
        return outcomes
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("size", "elements"), [(5, 1), (4, 3_000_001)], ids=["between small messages", "in a large one"]
)
def test_every_rank_names_the_one_that_was_killed_well_before_the_time_out(size, elements, port):
    outcomes = run_to_the_bitter_end(size, port, die_while_reducing, elements, 2)
    assert set(outcomes) == set(range(size)) - {2}  # 0 is no neighbour of 2
    for error, seconds in outcomes.values():
        assert isinstance(error, PeerDied), error
        assert error.rank == 2
        assert "rank 2 has died during ring_all_reduce" in str(error)
        assert seconds < TIMEOUT_SECONDS / 2


# Programs for ranks that stay alive; each returns what its rank saw.


def what_it_raises(communicator, program, timeout_seconds=TIMEOUT_SECONDS):
    communicator.timeout_seconds = timeout_seconds
    try:
        program(communicator)
    except CommunicationError as error:
        return type(error), str(error)
    return None


def of_other_arrays(communicator):
    ring_all_reduce(communicator, np.zeros(12, "float32") if communicator.rank == 1 else np.zeros(9))


def of_other_collectives(communicator):
    if communicator.rank == 1:
        communicator.barrier()
    else:
        ring_all_reduce(communicator, np.zeros(9, np.uint8))


def with_a_silent_rank(communicator):
    if communicator.rank == 1:
        time.sleep(4)
    else:
        ring_all_reduce(communicator, np.zeros(9))


def in_a_circle(communicator):
    communicator.recv((communicator.rank + 1) % communicator.size, np.zeros(1))


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (of_other_arrays, ["3 × float64", "4 × float32", "ring_all_reduce"]),
        (of_other_collectives, ["barrier", "ring_all_reduce"]),
    ],
)
def test_ranks_that_disagree_are_told_about_what(ranks, program, named):
    for kind, text in ranks.run(3, what_it_raises, program):
        assert kind is Mismatch, text
        assert "rank 1" in text
        assert all(name in text for name in named), text


def to_one_that_takes_nothing(communicator):
    if communicator.rank == 1:
        time.sleep(4)
    else:
        communicator.send(1, np.zeros(10_000_000, np.uint8))


@pytest.mark.parametrize(
    ("program", "size", "named"),
    [
        (with_a_silent_rank, 4, "for rank 1 in ring_all_reduce|rank 1 is silent"),
        (to_one_that_takes_nothing, 2, "rank 0 waited 1 s for rank 1 in send or recv"),
        (in_a_circle, 3, "they wait for each other"),
    ],
)
def test_every_rank_that_waits_says_for_whom(ranks, program, size, named):
    outcomes = ranks.run(size, what_it_raises, program, 1.0)
    for kind, text in outcomes if program is in_a_circle else [*outcomes[:1], *outcomes[2:]]:
        assert kind is PeerSilent
        assert re.search(named, text), text


# Who does not belong to the run.


def in_threads(size, rank_main):
    """What `rank_main(rank)` returned or raised, on a thread each."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(size)]
        return [future.exception(60) or future.result() for future in futures]


def connected_sum(rank, size, port):
    with tcp.connect(rank, size, f"127.0.0.1:{port}", b"secret", timeout_seconds=30) as communicator:
        array = np.full(5, rank + 1.0)
        ring_all_reduce(communicator, array)
        return array.tolist()


def test_strangers_are_refused_and_the_run_goes_on(port):
    """Garbage, silence, and somebody with another secret call at the coordinator's while the run comes together."""

    def main(rank):
        if rank == 0:
            return connected_sum(0, 3, port)
        time.sleep(0.3)
        if rank < 3:
            time.sleep(0.5)
            return connected_sum(rank, 3, port)
        if rank == 3:
            with pytest.raises(FrameError, match="does not know this run's secret"):
                tcp.connect(1, 3, f"127.0.0.1:{port}", b"guessed", timeout_seconds=30)
            return "refused"
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall([b"GET / HTTP/1.1\r\n\r\n" + b"x" * 5000, b"", rendezvous._MAGIC][rank - 4])
        return stranger

    results = in_threads(7, main)
    assert results[:4] == [[6.0] * 5] * 3 + ["refused"]
    for stranger in results[4:]:
        stranger.settimeout(10)
        received = 0
        try:
            while part := stranger.recv(100):  # a nonce and a proof at most, then the end
                received += len(part)
        except ConnectionResetError:
            pass
        assert received <= rendezvous._NONCE + rendezvous._PROOF
        stranger.close()


def test_an_answer_to_a_challenge_cannot_be_used_again(port):
    """Who sends the called side's own proof back at it is not let in."""
    own = rendezvous.Membership(10, 0, 2, b"secret", None)
    with contextlib.closing(rendezvous.Listener(own, f"127.0.0.1:{port}")):
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(rendezvous._MAGIC + bytes(rendezvous._NONCE))
        answer = rendezvous.receive(stranger, rendezvous._NONCE + rendezvous._PROOF, own.deadline)
        claim = rendezvous._CLAIM.pack(1, 2, b"join", b"127.0.0.1:1")
        stranger.sendall(claim + answer[rendezvous._NONCE :])
        assert stranger.recv(1) == b""
        stranger.close()


def test_two_processes_cannot_be_the_same_rank_and_sizes_must_agree(port):
    def main(index):
        rank, size = [(0, 3), (1, 3), (1, 3), (1, 4), (2, 3)][index]
        time.sleep(0.2 * index)
        return connected_sum(rank, size, port)

    results = in_threads(5, main)
    assert results[0] == results[1] == results[4] == [6.0] * 5
    assert "another process has joined as this rank" in str(results[2])
    assert "do not agree on how many they are" in str(results[3])


def test_a_rank_that_never_joins_is_named(port):
    with pytest.raises(PeerSilent, match="for rank 1, 2 to join"):
        tcp.connect(0, 3, f"127.0.0.1:{port}", b"secret", timeout_seconds=0.5)
    with pytest.raises(PeerSilent, match="has rank 0 been started"):
        tcp.connect(1, 3, f"127.0.0.1:{port}", b"secret", timeout_seconds=0.5)


@pytest.mark.parametrize(
    ("coordinator", "subnet", "named"),
    [
        ("0.0.0.0:4000", None, "must be on loopback"),
        ("10.1.3.7:4000", "10.0.0.0/16", "must be on loopback"),
        ("10.0.3.7:4000", "8.8.0.0/16", "must be private"),
        ("10.0.3.7:4000", "here", "must be a subnet"),
        ("nowhere", None, "address and a port"),
        ("127.0.0.1:http", None, "address and a port"),
    ],
)
def test_a_coordinator_that_others_could_reach_is_refused(coordinator, subnet, named):
    with pytest.raises(ValueError, match=named):
        tcp.connect(0, 2, coordinator, b"secret", subnet=subnet)


# Frames that are none.


def pair():
    """A communicator of rank 0 of 2, and the other ends of its links."""
    (control, control_end), (data, data_end) = socket.socketpair(), socket.socketpair()
    return tcp.TcpCommunicator(0, 2, {1: control}, {1: data}, 5.0), control_end, data_end


GOOD = frames.message("", 1, np.empty(10, np.float32))


def test_garbage_or_a_header_with_one_corrupt_byte_is_an_error_wherever_it_is():
    for at in range(len(GOOD) + 1):
        corrupt = bytes(byte ^ (0x55 if index == at else 0) for index, byte in enumerate(GOOD))
        if at == len(GOOD):
            corrupt = b"HTTP/1.1 200 OK\r\n\r\n" * 9
        communicator, _, data = pair()
        with communicator:
            data.sendall(corrupt + bytes(40))
            with pytest.raises((FrameError, Mismatch), match="rank 1"):
                communicator.recv(1, np.empty(10, np.float32))


def test_a_claim_of_a_huge_message_allocates_nothing():
    communicator, _, data = pair()
    with communicator:
        data.sendall(frames.message("", 1, Shape(2**58)) + bytes(1000))
        into = np.empty(10, np.float32)
        tracemalloc.start()
        with pytest.raises(Mismatch, match="rank 1 sent"):
            communicator.recv(1, into)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "garbage",
    [control._FRAME.pack(control._ABORT, 1, 99, 0), os.urandom(frames.HEADER.size)],
    ids=["no such error", "random"],
)
def test_garbage_on_a_control_link_is_an_error(garbage):
    communicator, link, _ = pair()
    with communicator:
        link.sendall(garbage)
        with pytest.raises(FrameError):
            communicator.recv(1, np.empty(10, np.float32))


# Nothing is left.


def test_a_communicator_leaves_no_open_files_and_no_threads():
    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0

    before = descriptors()
    with PortReservation(1) as reservation:
        assert in_threads(3, lambda rank: connected_sum(rank, 3, reservation.ports[0])) == [[6.0] * 5] * 3
    assert descriptors() <= before
    assert not [thread for thread in threading.enumerate() if thread.name == "workshop-listener"]
