"""Which sums come out the same to the last bit: floating-point addition depends on its order."""

import time

import numpy as np
import pytest

from workshop_utils.comm import parameter_server, threads
from workshop_utils.comm.halving_doubling import halving_doubling_all_reduce
from workshop_utils.comm.parameter_server import Arrangement
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.tree import tree_all_reduce

ALGORITHMS = [ring_all_reduce, tree_all_reduce, halving_doubling_all_reduce]


def summed(algorithm, late: int | None = None) -> bytes:
    """The sum of what four ranks have, of which one comes late."""

    def program(communicator):
        array = np.random.default_rng(communicator.rank).normal(size=1001).astype(np.float32)
        if communicator.rank == late:
            time.sleep(0.05)
        algorithm(communicator, array)
        return array.tobytes()

    results = threads.run(4, program)
    assert len(set(results)) == 1
    return results[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.__name__)
def test_an_all_reduce_gives_the_same_bits_whoever_is_late(algorithm) -> None:
    assert summed(algorithm) == summed(algorithm, late=0) == summed(algorithm, late=3)


def test_another_algorithm_gives_other_bits_and_the_same_sum_up_to_rounding() -> None:
    by_ring, by_tree = (np.frombuffer(summed(algorithm), np.float32) for algorithm in ALGORITHMS[:2])
    assert not np.array_equal(by_ring, by_tree)
    np.testing.assert_allclose(by_ring, by_tree, rtol=0, atol=2e-6)


def asynchronous(first: int) -> float:
    """A parameter after one push of each of two workers, of which `first` comes first."""
    arrangement = Arrangement(servers=1, workers=2, steps=1, consistency="asynchronous")

    def update(parameters, gradient):
        parameters *= 0.5  # as weight decay does, so that the order matters
        parameters -= gradient

    def program(communicator):
        def gradient_of(_, step):
            time.sleep(0 if communicator.rank == first else 0.3)
            return np.full(1, float(communicator.rank))

        parameters = np.zeros(1)
        parameter_server.train(communicator, arrangement, parameters, gradient_of, update)
        return float(parameters[0])

    return threads.run(3, program)[0]


def test_what_an_asynchronous_server_ends_with_depends_on_who_comes_first() -> None:
    assert asynchronous(first=1) == -0.5 - 2.0
    assert asynchronous(first=2) == -1.0 - 1.0
