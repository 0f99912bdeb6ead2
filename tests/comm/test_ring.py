"""The ring over every transport equals NumPy's reduction, and sends exactly the bytes that the formula says."""

import numpy as np
import pytest

from workshop_utils.comm import threads
from workshop_utils.comm.ring import (
    chunk,
    pipelined_ring_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_bytes_sent,
    ring_reduce_scatter,
)

SIZES = (0, 1, 2, 3, 7, 10, 1000, 1003)
LARGE = 300_007  # more than a slot, a socket's buffer, or a block holds
DTYPES = ("float16", "float64", "int8", "int64", "complex64")
REDUCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
PROCESSES = ("tcp", "unix", "plain tcp", "shared memory", "shared memory with tokens")


def contribution(rank, size, dtype):
    """Small whole numbers, so that sums are exact in every dtype; different on every rank and at every place."""
    return ((np.arange(size) * 7 + rank * 3) % 11).astype(dtype)


def cases():
    for size in SIZES:
        for operation in REDUCTIONS:
            yield size, "float32", operation
        for dtype in DTYPES:
            yield size, dtype, "sum"
    for dtype in DTYPES:
        yield 10, dtype, "min"
    yield LARGE, "float32", "mean"
    yield LARGE, "float64", "max"


def arrays_of(communicator, size, dtype):
    """The same contents in an ordinary array and in one that the transport prefers."""
    contents = contribution(communicator.rank, size, dtype)
    preferred = communicator.allocate(size, dtype)
    preferred[:] = contents
    return contents, preferred


def everything_wrong(communicator):
    """What came out otherwise than NumPy and the formula say; empty if all is well."""
    wrong = []
    ranks = range(communicator.size)
    for size, dtype, operation in cases():
        contributions = [contribution(rank, size, dtype) for rank in ranks]
        expected = REDUCTIONS[operation](contributions, axis=0)
        for array in arrays_of(communicator, size, dtype):
            communicator.traffic.reset()
            ring_all_reduce(communicator, array, operation)
            if array.dtype != dtype or not np.allclose(
                array, expected, rtol=1e-3 if dtype == "float16" else 1e-6
            ):
                wrong.append((size, dtype, operation, "result"))
            # Every chunk but one in each half: rank r does not send chunk r + 1, then not chunk r + 2.
            left_out = [chunk(array, communicator.rank + i, communicator.size).nbytes for i in (1, 2)]
            sent = 2 * array.nbytes - sum(left_out) if communicator.size > 1 else 0
            traffic = communicator.traffic
            if traffic.bytes_sent.sum() != sent or traffic.messages_sent.sum() != 2 * (communicator.size - 1):
                wrong.append((size, dtype, operation, "traffic"))
            if size % communicator.size == 0 and sent != ring_bytes_sent(communicator.size, array.nbytes):
                wrong.append((size, dtype, operation, "formula"))
    array = contribution(communicator.rank, 1003, "int64").reshape(17, 59)
    pipelined_ring_all_reduce(communicator, array, chunk_bytes=80)
    if not np.array_equal(
        array.ravel(), np.sum([contribution(rank, 1003, "int64") for rank in ranks], axis=0)
    ):
        wrong.append("pipelined")
    return wrong


@pytest.mark.parametrize("size", range(1, 10))
def test_ring_on_threads_equals_numpy_and_the_formula(size):
    assert threads.run(size, everything_wrong) == [[]] * size


@pytest.mark.parametrize("transport", PROCESSES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])  # all others on threads, above: the algorithm is the same text
def test_ring_between_processes_equals_numpy_and_the_formula(ranks, transport, size):
    assert ranks.run(transport, size, everything_wrong) == [[]] * size


@pytest.mark.parametrize("size", range(1, 10))
def test_ring_sends_at_most_twice_the_array_whatever_the_number_of_ranks(size):
    assert ring_bytes_sent(size, 1000) < 2000
    assert ring_bytes_sent(size + 1, 1000) > ring_bytes_sent(size, 1000)


def test_reduce_scatter_leaves_each_rank_one_chunk_and_all_gather_completes_it():
    def program(communicator):
        array = contribution(communicator.rank, 10, "float64")
        part = ring_reduce_scatter(communicator, array, "mean").copy()
        ring_all_gather(communicator, array)
        return part, array

    expected = np.mean([contribution(rank, 10, "float64") for rank in range(3)], axis=0)
    for rank, (part, array) in enumerate(threads.run(3, program)):
        np.testing.assert_allclose(part, chunk(expected, rank + 1, 3))
        np.testing.assert_allclose(array, expected)
