"""Every collective on threads, for what the guards leave out: dtypes, operations, shapes, roots, subsets, rounding."""

import functools
import time

import numpy as np
import pytest

from workshop_utils.comm import threads
from workshop_utils.comm.central import central_all_reduce
from workshop_utils.comm.double_tree import double_tree_all_reduce
from workshop_utils.comm.halving_doubling import halving_doubling_all_reduce
from workshop_utils.comm.hierarchical import hierarchical_all_reduce
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.subset import Subset
from workshop_utils.comm.tree import tree_all_reduce

ALL_REDUCES = {
    "ring": ring_all_reduce,
    "central": central_all_reduce,
    "tree": tree_all_reduce,
    "double_tree": double_tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
    "hierarchical": functools.partial(hierarchical_all_reduce, group_size=3),
}
CASES = (
    (np.float32, "mean"),
    (np.int64, "min"),
    (np.float16, "max"),
    (np.complex64, "sum"),
    (np.uint8, "sum"),
)
REDUCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def arrays_of(size, dtype):
    """One array of several dimensions a rank, of small whole numbers, so that sums are exact in every order."""
    random = np.random.default_rng(size)
    return [random.integers(0, 9, (3, 1, 7)).astype(dtype) for _ in range(size)]


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("size", range(1, 10))
def test_an_all_reduce_is_numpys_for_every_dtype_and_operation(name, size):
    def program(communicator):
        arrays = [arrays_of(size, dtype)[communicator.rank] for dtype, _ in CASES]
        for array, (_, operation) in zip(arrays, CASES, strict=True):
            ALL_REDUCES[name](communicator, array, operation)
        return arrays

    for arrays in threads.run(size, program):
        for array, (dtype, operation) in zip(arrays, CASES, strict=True):
            assert array.dtype == dtype
            expected = REDUCTIONS[operation](arrays_of(size, dtype), axis=0)
            np.testing.assert_allclose(array, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_an_array_that_is_not_contiguous_is_refused_with_the_way_out(name):
    def program(communicator):
        ALL_REDUCES[name](communicator, np.zeros((4, 4))[:, ::2], "sum")

    with pytest.raises(ValueError, match="ascontiguousarray"):
        threads.run(2, program)


def test_a_group_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match="group_size is 0; it must be at least 1"):
        threads.run(2, lambda communicator: hierarchical_all_reduce(communicator, np.zeros(1), "sum", 0))


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_rounding_does_not_depend_on_who_is_late(name):
    def program(communicator, late):
        array = np.random.default_rng(communicator.rank).normal(size=101).astype(np.float32)
        if communicator.rank == late:
            time.sleep(0.02)
        ALL_REDUCES[name](communicator, array, "sum")
        return array.tobytes()

    results = [threads.run(4, functools.partial(program, late=late)) for late in (0, 3)]
    assert len({bits for ranks in results for bits in ranks}) == 1


def test_a_subset_without_this_rank_is_refused():
    with pytest.raises(ValueError, match="rank 1 itself must be among them"):
        threads.run(2, lambda communicator: Subset(communicator, [0]) and None)


@pytest.mark.parametrize("ranks", [[0, 1, 1], [0, 1, 7]])
def test_a_subset_with_a_rank_twice_or_with_one_that_is_not_there_is_refused(ranks):
    with pytest.raises(ValueError, match="it must have some of the 2 ranks from 0 to 1, each once"):
        threads.run(2, lambda communicator: Subset(communicator, ranks) and None)
