"""The all-reduces made for speed equal NumPy's reduction over every transport, bit by bit the same on every rank."""

import math

import numpy as np
import pytest

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import chunk
from workshop_utils.comm.direct import direct_all_reduce, direct_bytes_sent
from workshop_utils.comm.one_sided import BLOCK, one_sided_all_reduce
from workshop_utils.comm.ring import ring_all_reduce, ring_bytes_sent
from workshop_utils.comm.tuned import DIRECT_UP_TO, DIRECT_UP_TO_IN_WINDOWS, tuned_all_reduce

ALGORITHMS = (direct_all_reduce, one_sided_all_reduce, tuned_all_reduce)
REDUCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def cases(has_windows):
    """(elements, dtype, operation)."""
    for size in (0, 1, 2, 7, 10, 1003):
        yield size, "float32", "sum"
    yield DIRECT_UP_TO // 4 + 1, "float32", "mean"
    if not has_windows:
        return  # what sends messages has been tested with the ring
    for operation in REDUCTIONS:
        yield 1000, "float64", operation
    for dtype in ("float16", "int8", "complex64"):
        yield 11, dtype, "sum"
    yield DIRECT_UP_TO_IN_WINDOWS // 4 + 1, "float32", "mean"
    yield 300_007, "float32", "max"  # more than the board has room for, or a block of a chunk


def contribution(rank, size, dtype):
    """Small whole numbers, so that sums are exact in every dtype and order."""
    return ((np.arange(size) * 7 + rank * 3) % 11).astype(dtype)


def in_memory_of_both_kinds(communicator, contents):
    """The same contents in an ordinary array, and in one that the transport prefers."""
    preferred = communicator.allocate(contents.size, contents.dtype)
    preferred[:] = contents
    return contents.copy(), preferred


def everything_wrong(communicator):
    """What came out otherwise than NumPy says; empty if all is well."""
    wrong = []
    for algorithm in ALGORITHMS:
        for size, dtype, operation in cases(communicator.has_windows):
            contributions = [contribution(rank, size, dtype) for rank in range(communicator.size)]
            expected = REDUCTIONS[operation](contributions, axis=0)
            for array in in_memory_of_both_kinds(communicator, contributions[communicator.rank]):
                algorithm(communicator, array, operation)
                if array.dtype != dtype or not np.allclose(
                    array, expected, rtol=1e-3 if dtype == "float16" else 1e-6
                ):
                    wrong.append((algorithm.__name__, size, dtype, operation))
    return wrong


@pytest.mark.parametrize("size", range(1, 10))
def test_they_equal_numpy_on_threads(size):
    assert threads.run(size, everything_wrong) == [[]] * size


@pytest.mark.parametrize("size", range(1, 10))
def test_they_equal_numpy_in_shared_memory(ranks, size):
    assert ranks.run("shared memory", size, everything_wrong) == [[]] * size


@pytest.mark.parametrize("transport", ["tcp", "unix", "plain tcp", "shared memory with tokens"])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_they_equal_numpy_in_messages_between_processes(ranks, transport, size):
    assert ranks.run(transport, size, everything_wrong) == [[]] * size


def sums_of_fractions(communicator):
    """The bytes of sums that depend on the order in which they are made."""
    results = []
    for algorithm in ALGORITHMS:
        for size in (1003, DIRECT_UP_TO_IN_WINDOWS // 4 + 1):
            array = np.random.default_rng(communicator.rank).standard_normal(size, np.float32)
            algorithm(communicator, array)
            results.append(array.tobytes())
    return results


@pytest.mark.parametrize("transport", ["unix", "shared memory"])
def test_every_rank_has_the_same_sum_to_the_last_bit(ranks, transport):
    first, *others = ranks.run(transport, 5, sums_of_fractions)
    assert others == [first] * 4


def traffic_of(communicator, algorithm, size):
    """Bytes sent and received, and messages sent, by peer."""
    seen = []
    for array in in_memory_of_both_kinds(communicator, np.ones(size, np.float32)):
        communicator.traffic.reset()
        algorithm(communicator, array)
        traffic = communicator.traffic
        counters = (
            traffic.bytes_sent,
            traffic.bytes_received,
            traffic.messages_sent,
            traffic.messages_received,
        )
        seen.append([counter.tolist() for counter in counters])
    assert seen[0] == seen[1]
    return seen[0]


@pytest.mark.parametrize("transport", ["tcp", "shared memory", "shared memory with tokens"])
def test_direct_sends_all_to_every_other_rank_in_one_message(ranks, transport):
    for rank, (sent, received, messages, _) in enumerate(
        ranks.run(transport, 4, traffic_of, direct_all_reduce, 1003)
    ):
        assert sum(sent) == direct_bytes_sent(4, 4 * 1003)
        assert sent == received == [0 if peer == rank else 4 * 1003 for peer in range(4)]
        assert messages == [0 if peer == rank else 1 for peer in range(4)]


@pytest.mark.parametrize("size", [3 * 1000, 3 * 300_000])
def test_one_sided_reads_what_a_ring_sends_and_counts_it_on_both_sides(ranks, size):
    seen = ranks.run("shared memory", 3, traffic_of, one_sided_all_reduce, size)
    blocks = math.ceil(4 * size / 3 / BLOCK)
    for rank, (sent, received, messages, messages_received) in enumerate(seen):
        assert sum(sent) == sum(received) == ring_bytes_sent(3, 4 * size)
        assert sent == received == [0 if peer == rank else 2 * 4 * size // 3 for peer in range(3)]
        assert messages == messages_received == [0 if peer == rank else 2 * blocks for peer in range(3)]


def test_one_sided_on_chunks_of_different_sizes_counts_what_each_rank_was_asked_for(ranks):
    array = np.empty(1003, np.float32)
    own = [chunk(array, rank, 4).nbytes for rank in range(4)]
    for rank, (sent, received, _, _) in enumerate(
        ranks.run("shared memory", 4, traffic_of, one_sided_all_reduce, 1003)
    ):
        assert sent == received == [0 if peer == rank else own[peer] + own[rank] for peer in range(4)]


def in_several_windows(communicator):
    """Arrays larger than `segment_bytes`: ordinary on all ranks, on one, on none."""
    ordinary, preferred = in_memory_of_both_kinds(
        communicator, contribution(communicator.rank, 1003, "int64")
    )
    contents, results = ordinary.copy(), []
    for array in (ordinary if communicator.rank == 0 else preferred, ordinary, preferred):
        array[:] = contents
        one_sided_all_reduce(communicator, array, segment_bytes=80)
        results.append(array.tolist())
    return results


def test_what_cannot_be_read_where_it_lies_is_reduced_in_several_windows_by_all(ranks):
    expected = sum(contribution(rank, 1003, "int64") for rank in range(3)).tolist()
    assert ranks.run("shared memory", 3, in_several_windows) == [[expected] * 3] * 3


def many_in_a_row(communicator):
    """Now small, now large, with messages in between: what is shown by turns is never overwritten too early."""
    wrong = 0
    shared = np.random.default_rng(3)  # the same numbers on every rank
    for step in range(300):
        algorithm = (direct_all_reduce, direct_all_reduce, one_sided_all_reduce, ring_all_reduce)[
            shared.integers(4)
        ]
        array = np.full(shared.choice([1, 100, 3000]), communicator.rank + step, np.int64)
        algorithm(communicator, array)
        wrong += not (array == sum(rank + step for rank in range(communicator.size))).all()
    return wrong


@pytest.mark.parametrize("size", [2, 5])
def test_calls_in_a_row_do_not_disturb_each_other(ranks, size):
    assert ranks.run("shared memory", size, many_in_a_row) == [0] * size
