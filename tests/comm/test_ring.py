"""The ring between real processes equals NumPy's reduction, and sends exactly the bytes that the formula says."""

import numpy as np
import pytest

from workshop_utils.comm import threads
from workshop_utils.comm.ring import (
    chunk,
    ring_all_gather,
    ring_all_reduce,
    ring_bytes_sent,
    ring_reduce_scatter,
)

LARGE = 900_007  # more than a socket's buffer holds
CASES = (
    (0, "float32", "sum"),
    (1, "float32", "mean"),
    (7, "int8", "sum"),
    (1003, "float16", "max"),
    (1000, "int64", "min"),
    (LARGE, "float32", "mean"),
    (LARGE, "float64", "max"),
)
REDUCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def contribution(rank, size, dtype):
    """Small whole numbers, so that sums are exact in every dtype; different on every rank and at every place."""
    return ((np.arange(size) * 7 + rank * 3) % 11).astype(dtype)


def everything_wrong(communicator):
    """What came out otherwise than NumPy and the formula say; empty if all is well."""
    wrong = []
    for size, dtype, operation in CASES:
        contributions = [contribution(rank, size, dtype) for rank in range(communicator.size)]
        array = contributions[communicator.rank].copy()
        communicator.traffic.reset()
        ring_all_reduce(communicator, array, operation)
        expected = REDUCTIONS[operation](contributions, axis=0)
        if array.dtype != dtype or not np.allclose(array, expected, rtol=1e-6):
            wrong.append((size, dtype, operation, "result"))
        # Every chunk but one in each half: rank r does not send chunk r + 1, then not chunk r + 2.
        left_out = [chunk(array, communicator.rank + i, communicator.size).nbytes for i in (1, 2)]
        sent = 2 * array.nbytes - sum(left_out) if communicator.size > 1 else 0
        traffic = communicator.traffic
        if traffic.bytes_sent.sum() != sent or traffic.messages_sent.sum() != 2 * (communicator.size - 1):
            wrong.append((size, dtype, operation, "traffic"))
        if size % communicator.size == 0 and sent != ring_bytes_sent(communicator.size, array.nbytes):
            wrong.append((size, dtype, operation, "formula"))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 5])  # all others on threads: the algorithm is the same text
def test_ring_between_processes_equals_numpy_and_the_formula(ranks, size):
    assert ranks.run("tcp", size, everything_wrong) == [[]] * size


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
