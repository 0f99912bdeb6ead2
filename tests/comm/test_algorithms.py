"""Every collective on threads, for what the guards leave out: dtypes, operations, shapes, roots, segments, subsets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from workshop_utils.comm import threads
from workshop_utils.comm.central import central_all_reduce
from workshop_utils.comm.communicator import Array, Communicator, Operation
from workshop_utils.comm.direct import direct_all_reduce
from workshop_utils.comm.double_tree import double_tree_all_reduce, edges, schedule
from workshop_utils.comm.halving_doubling import halving_doubling_all_reduce
from workshop_utils.comm.hierarchical import hierarchical_all_reduce
from workshop_utils.comm.ring import pipelined_ring_all_reduce, ring_all_reduce
from workshop_utils.comm.subset import Subset
from workshop_utils.comm.tree import (
    chain_broadcast,
    chain_reduce,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)

RANKS = range(1, 10)
ELEMENTS = (0, 1, 2, 3, 7, 1003)
CASES: tuple[tuple[type, Operation], ...] = (
    (np.float64, "sum"),
    (np.float32, "mean"),
    (np.int32, "max"),
    (np.int64, "min"),
    (np.float16, "max"),
    (np.complex64, "sum"),
    (np.uint8, "sum"),
)

AllReduce = Callable[[Communicator, Array, Operation], None]

ALL_REDUCES: dict[str, AllReduce] = {
    "ring": ring_all_reduce,
    "pipelined_ring": functools.partial(pipelined_ring_all_reduce, chunk_bytes=80),
    "central": central_all_reduce,
    "direct": direct_all_reduce,
    "tree": tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
    "double_tree": double_tree_all_reduce,
} | {
    f"hierarchical_in_groups_of_{group_size}": functools.partial(
        hierarchical_all_reduce, group_size=group_size
    )
    for group_size in (1, 3)
}


def arrays_of(size: int, elements: int, dtype: type) -> list[np.ndarray]:
    """One array a rank, of small whole numbers, so that sums are exact in every order and dtype."""
    random = np.random.default_rng(size * 10_000 + elements)
    return [random.integers(0, 9, elements).astype(dtype) for _ in range(size)]


def reduced(arrays: list[np.ndarray], operation: Operation) -> np.ndarray:
    """NumPy's own answer."""
    if operation == "mean":
        return (np.sum(arrays, axis=0, dtype=arrays[0].dtype) / len(arrays)).astype(arrays[0].dtype)
    reduction: Any = {"sum": np.add, "max": np.maximum, "min": np.minimum}[operation].reduce
    return reduction(np.stack(arrays))


def run_matrix(size: int, reduce: AllReduce) -> list[list[np.ndarray]]:
    """For each rank, its array afterwards for each of ELEMENTS and CASES."""

    def program(communicator: Communicator) -> list[np.ndarray]:
        arrays = []
        for elements in ELEMENTS:
            for dtype, operation in CASES:
                array = arrays_of(size, elements, dtype)[communicator.rank]
                reduce(communicator, array, operation)
                arrays.append(array)
        return arrays

    return threads.run(size, program)


def assert_reduced(size: int, arrays: list[np.ndarray]) -> None:
    cases = ((elements, *case) for elements in ELEMENTS for case in CASES)
    for array, (elements, dtype, operation) in zip(arrays, cases, strict=True):
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, reduced(arrays_of(size, elements, dtype), operation))


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("size", RANKS)
def test_an_all_reduce_gives_numpys_result_on_every_rank(name: str, size: int) -> None:
    for arrays in run_matrix(size, ALL_REDUCES[name]):
        assert_reduced(size, arrays)


@pytest.mark.parametrize("reduce", [tree_reduce, chain_reduce])
@pytest.mark.parametrize("size", RANKS)
def test_a_reduce_leaves_numpys_result_on_any_root(reduce: Callable[..., None], size: int) -> None:
    root = size // 2
    assert_reduced(size, run_matrix(size, functools.partial(reduce, root=root))[root])


@pytest.mark.parametrize("broadcast", [tree_broadcast, chain_broadcast])
@pytest.mark.parametrize("size", RANKS)
def test_a_broadcast_gives_every_rank_the_array_of_any_root(
    broadcast: Callable[..., None], size: int
) -> None:
    root = size // 2
    for array in threads.run(size, lambda communicator: broadcast_once(communicator, broadcast, root)):
        np.testing.assert_array_equal(array, arrays_of(size, 1003, np.float32)[root])


def broadcast_once(communicator: Communicator, broadcast: Callable[..., None], root: int) -> np.ndarray:
    array = arrays_of(communicator.size, 1003, np.float32)[communicator.rank]
    broadcast(communicator, array, root)
    return array


@pytest.mark.parametrize("segments", [1, 2, 3, 20])
def test_a_pipelined_collective_does_not_care_into_how_many_segments_it_is_cut(segments: int) -> None:
    def program(communicator: Communicator) -> tuple[np.ndarray, ...]:
        mine = arrays_of(5, 7, np.float64)[communicator.rank]
        all_reduced, at_root, from_root = mine.copy(), mine.copy(), mine.copy()
        double_tree_all_reduce(communicator, all_reduced, segments=segments)
        chain_reduce(communicator, at_root, segments=segments)
        chain_broadcast(communicator, from_root, segments=segments)
        return all_reduced, at_root, from_root

    arrays = arrays_of(5, 7, np.float64)
    results = threads.run(5, program)
    for all_reduced, _, from_root in results:
        np.testing.assert_array_equal(all_reduced, np.sum(arrays, axis=0))
        np.testing.assert_array_equal(from_root, arrays[0])
    np.testing.assert_array_equal(results[0][1], np.sum(arrays, axis=0))


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_an_array_of_several_dimensions_is_reduced_in_place(name: str) -> None:
    def program(communicator: Communicator) -> np.ndarray:
        array = np.full((2, 3, 5), communicator.rank + 1.0)
        ALL_REDUCES[name](communicator, array, "mean")
        return array

    for array in threads.run(3, program):
        np.testing.assert_array_equal(array, np.full((2, 3, 5), 2.0))


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_an_array_that_is_not_contiguous_is_refused_with_the_way_out(name: str) -> None:
    def program(communicator: Communicator) -> None:
        ALL_REDUCES[name](communicator, np.zeros((4, 4))[:, ::2], "sum")

    with pytest.raises(ValueError, match="ascontiguousarray"):
        threads.run(2, program)


@pytest.mark.parametrize("size", [*RANKS, 16, 31, 100])
def test_in_a_double_tree_both_trees_reach_every_rank_once(size: int) -> None:
    for tree in (0, 1):
        children = [edge.child for edge in edges(size) if edge.tree == tree]
        assert len(set(children)) == len(children) == size - 1


@pytest.mark.parametrize("size", [2, 4, 6, 8, 16, 100])
def test_with_an_even_number_of_ranks_nobody_has_children_in_both_trees(size: int) -> None:
    parents = [{edge.parent for edge in edges(size) if edge.tree == tree} for tree in (0, 1)]
    assert not parents[0] & parents[1]


@pytest.mark.parametrize("size", [*RANKS, 16, 31, 100])
def test_in_a_double_tree_nobody_sends_twice_or_receives_twice_in_one_step(size: int) -> None:
    segments = 3
    for turns in schedule(size, segments):
        received = [turn.received for turn in turns if turn.parent is not None]
        assert len(set(received)) == len(received)  # no piece comes twice, so none was overwritten by another
    sent = sum(turn.child is not None for turns in schedule(size, segments) for turn in turns)
    assert sent == 2 * segments * (size - 1)


def test_a_group_of_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size is 0; it must be at least 1"):
        threads.run(2, lambda communicator: hierarchical_all_reduce(communicator, np.zeros(1), "sum", 0))


def test_a_subset_counts_in_its_own_numbers_and_sends_to_the_right_ranks() -> None:
    def program(communicator: Communicator) -> list[float]:
        if communicator.rank == 2:
            return []
        subset = Subset(communicator, [4, 0, 1, 3])
        assert subset.size == 4
        array = np.array([float(subset.rank)])
        tree_broadcast(subset, array, root=1)
        tree_all_reduce(subset, mean := np.array([float(communicator.rank)]), "mean")
        return [array[0], mean[0]]

    results = threads.run(5, program)
    assert results[2] == []
    assert [results[rank] for rank in (0, 1, 3, 4)] == [[1.0, 2.0]] * 4


def test_a_subset_without_this_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 1 itself must be among them"):
        threads.run(2, lambda communicator: Subset(communicator, [0]) and None)
