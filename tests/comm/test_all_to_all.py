"""All-to-all: results, messages and bytes on every transport, and times in virtual time."""

import sys
from functools import partial

import numpy as np
import pytest

from workshop_utils import count_bytes, on_ranks
from workshop_utils.comm import threads
from workshop_utils.comm.all_to_all import (
    all_to_all_bytes_sent,
    all_to_all_seconds,
    direct_all_to_all,
    uneven_all_to_all_seconds,
)
from workshop_utils.comm.communicator import Mismatch
from workshop_utils.comm.simulated import Link, Shape, simulate
from workshop_utils.comm.stamped import StampedCommunicator
from workshop_utils.comm.subset import Subset

LATENCY, BANDWIDTH = 50e-6, 125e6
LINK = Link(LATENCY, BANDWIDTH)


def rows(size):
    """How many rows rank r sends rank s: every number from 0 on, once."""
    return np.arange(size * size).reshape(size, size)


def exchange(communicator):
    """What a rank has received from each other one, and its messages and bytes; contents tell from whom to whom."""
    rank, sizes = communicator.rank, rows(communicator.size)
    outgoing = [np.full((count, 2), 100 * rank + to, np.float32) for to, count in enumerate(sizes[rank])]
    incoming = [np.empty((count, 2), np.float32) for count in sizes[:, rank]]
    direct_all_to_all(communicator, outgoing, incoming)
    traffic = communicator.traffic
    return (
        [each.ravel().tolist() for each in incoming],
        traffic.messages_sent.tolist(),
        traffic.bytes_sent.tolist(),
    )


def exchanged(size):
    """What `exchange` must return on each rank."""
    return [
        (
            [[100.0 * source + rank] * (2 * int(count)) for source, count in enumerate(rows(size)[:, rank])],
            [int(to != rank) for to in range(size)],
            [8 * int(count) * (to != rank) for to, count in enumerate(rows(size)[rank])],
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", range(1, 8))
def test_each_rank_has_what_each_other_one_sent_it_and_nothing_is_sent_twice(size):
    assert threads.run(size, exchange) == exchanged(size)
    assert threads.run(size, exchange, is_buffered=False) == exchanged(size)
    assert simulate(size, exchange, LINK).results == exchanged(size)
    behind_links = simulate(size, lambda inner: exchange(StampedCommunicator(inner, (BANDWIDTH,) * size)))
    assert behind_links.results == exchanged(size)


def test_a_group_of_some_ranks_exchanges_beside_another_group():
    groups = [4, 0, 2], [1, 3]

    def program(communicator):
        ranks = next(each for each in groups if communicator.rank in each)
        return exchange(Subset(communicator, ranks))

    results = threads.run(5, program)
    for ranks in groups:
        assert [results[rank] for rank in ranks] == exchanged(len(ranks))


@pytest.mark.processes
def test_processes_exchange_what_threads_do(ranks):
    assert ranks.run(3, exchange) == exchanged(3)


def over_gloo(dist):
    from workshop_utils.comm.over_torch import TorchCommunicator

    return exchange(TorchCommunicator())


@pytest.mark.processes
def test_over_pytorchs_group_too():
    results = on_ranks(3, over_gloo, framework="torch")
    assert results.values == exchanged(3)


def counted(communicator, nbytes):
    """The bytes that the kernel has seen leave, and those that the rank's counters say."""
    rank = communicator.rank
    outgoing, incoming = (
        [np.zeros(each, np.uint8) for each in part] for part in (nbytes[rank], nbytes[:, rank])
    )
    with count_bytes(communicator.barrier) as kernel:
        communicator.traffic.reset()
        direct_all_to_all(communicator, outgoing, incoming)
        sent = communicator.traffic.bytes_sent.sum()
    return kernel.sent, int(sent)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters are Linux's")
def test_the_kernel_counts_the_bytes_of_the_closed_form(ranks):
    nbytes = np.arange(9).reshape(3, 3) * 10_001 + 100_003
    sent = nbytes.sum(1) - nbytes.diagonal()
    for (by_kernel, by_counters), expected in zip(ranks.run(3, counted, nbytes), sent, strict=True):
        assert by_counters == expected
        assert expected <= by_kernel <= 1.02 * expected


def program_of(nbytes):
    """The exchange of `nbytes[r][s]` bytes from rank r to rank s, where only the time matters."""

    def program(communicator):
        rank = communicator.rank
        direct_all_to_all(
            communicator,
            *([Shape(int(each), np.uint8) for each in part] for part in (nbytes[rank], nbytes[:, rank])),
        )
        return communicator.traffic.bytes_sent.sum()

    return program


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 64])
def test_equal_parts_take_their_closed_form(size):
    nbytes = np.full((size, size), 10_000)
    simulation = simulate(size, program_of(nbytes), LINK)
    total = 10_000 * size
    assert set(simulation.results) == {all_to_all_bytes_sent(size, total)}
    seconds = all_to_all_seconds(size, total, LATENCY, BANDWIDTH)
    assert simulation.seconds == pytest.approx(seconds, rel=1e-9, abs=1e-15)
    assert uneven_all_to_all_seconds(nbytes, LATENCY, BANDWIDTH) == pytest.approx(
        seconds, rel=1e-9, abs=1e-15
    )


@pytest.mark.parametrize("latency", [0, LATENCY, 10 * LATENCY])
@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_where_all_send_one_rank_the_most_its_link_decides(size, latency):
    nbytes = np.full((size, size), 100_000)
    nbytes[:, 1] *= 10
    busiest = (size - 1) * 1_000_000 / BANDWIDTH
    simulation = simulate(size, program_of(nbytes), Link(latency, BANDWIDTH))
    expected = uneven_all_to_all_seconds(nbytes, latency, BANDWIDTH)
    assert simulation.seconds == pytest.approx(expected) == pytest.approx(busiest + latency)


@pytest.mark.parametrize("seed", range(5))
def test_four_ranks_with_parts_of_any_size_take_what_the_formula_says(seed):
    nbytes = np.random.default_rng(seed).integers(0, 1_000_000, (4, 4))
    simulation = simulate(4, program_of(nbytes), LINK)
    expected = uneven_all_to_all_seconds(nbytes, LATENCY, BANDWIDTH)
    assert simulation.seconds == pytest.approx(expected)
    others = nbytes * (1 - np.eye(4))
    assert expected >= LATENCY + max(others.sum(0).max(), others.sum(1).max()) / BANDWIDTH


ZEROS = [np.zeros(2), np.zeros(2)]


@pytest.mark.parametrize(
    ("outgoing", "incoming", "message"),
    [
        (
            ZEROS[:1],
            np.zeros((2, 2)),
            "outgoing has 1 arrays and incoming 2; both must have 2, one for each rank",
        ),
        (ZEROS, np.zeros((3, 2)), "outgoing has 2 arrays and incoming 3; both must have 2"),
        (np.zeros((2, 2)), np.zeros((2, 2), np.int32), "has 2 × float64; it must have the 2 × int32"),
        (ZEROS, [np.zeros(2), np.zeros(4)[::2]], r"incoming\[1\] is not contiguous"),
        (ZEROS, [np.zeros(4)[::2], np.zeros(2)], r"incoming\[0\] is not contiguous"),
        (ZEROS, ZEROS, r"incoming\[0\] shares memory with outgoing\[0\]"),
        (ZEROS, ZEROS[::-1], r"incoming\[0\] shares memory with outgoing\[1\]"),
        (ZEROS, [np.zeros(2)] * 2, r"incoming\[0\] shares memory with incoming\[1\]"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_before_anything_is_sent(outgoing, incoming, message):
    def program(communicator):
        with pytest.raises(ValueError, match=message):
            direct_all_to_all(communicator, iter(outgoing), incoming)
        assert not communicator.traffic.bytes_sent.any()

    threads.run(2, program)


def test_parts_that_do_not_fit_are_refused_before_or_when_they_come():
    def program(communicator, own, others):
        parts = [np.zeros(own if rank == communicator.rank else others) for rank in range(2)]
        direct_all_to_all(communicator, parts, [np.zeros(3), np.zeros(3)])

    with pytest.raises(ValueError, match=r"outgoing\[\d\] has 2 × float64; it must have the 3 × float64 of"):
        threads.run(2, partial(program, own=2, others=3))
    with pytest.raises(Mismatch, match=r"sent 2 × float64 where rank . expects 3 × float64, in all_to_all"):
        threads.run(2, partial(program, own=3, others=2))
