"""Every collective beside the ring, on threads: what it computes, and what each rank sends for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from workshop_utils.comm import threads
from workshop_utils.comm.central import (
    central_all_reduce,
    central_bytes_received_by_root,
    central_bytes_sent,
)
from workshop_utils.comm.communicator import Array, Communicator, Operation
from workshop_utils.comm.direct import direct_all_reduce, direct_bytes_sent
from workshop_utils.comm.double_tree import (
    double_tree_all_reduce,
    double_tree_bytes_sent,
    edges,
    schedule,
)
from workshop_utils.comm.halving_doubling import (
    halving_doubling_all_reduce,
    halving_doubling_bytes_sent,
)
from workshop_utils.comm.hierarchical import hierarchical_all_reduce, hierarchical_bytes_sent
from workshop_utils.comm.subset import Subset
from workshop_utils.comm.tree import (
    chain_broadcast,
    chain_bytes_sent,
    chain_reduce,
    tree_all_reduce,
    tree_all_reduce_bytes_sent,
    tree_broadcast,
    tree_broadcast_bytes_sent,
    tree_reduce,
    tree_reduce_bytes_sent,
)

RANKS = range(1, 10)
ELEMENTS = (0, 1, 2, 3, 7, 10, 1000, 1003)
CASES: tuple[tuple[type, Operation], ...] = (
    (np.float64, "sum"),
    (np.float32, "mean"),
    (np.int32, "max"),
    (np.int64, "min"),
    (np.float16, "max"),
    (np.uint8, "sum"),
)

AllReduce = Callable[[Communicator, Array, Operation], None]
BytesSent = Callable[[int, int, int, int], int]  # (size, nbytes, rank, itemsize)


@dataclass(frozen=True)
class Case:
    """One all-reduce and the function that says what a rank sends for it."""

    all_reduce: AllReduce
    bytes_sent: BytesSent


def hierarchical(group_size: int) -> Case:
    def bytes_sent(size: int, nbytes: int, rank: int, itemsize: int) -> int:
        return sum(hierarchical_bytes_sent(size, nbytes, rank, itemsize, group_size))

    return Case(functools.partial(hierarchical_all_reduce, group_size=group_size), bytes_sent)


ALL_REDUCES: dict[str, Case] = {
    "central": Case(
        central_all_reduce, lambda size, nbytes, rank, itemsize: central_bytes_sent(size, nbytes, rank)
    ),
    "direct": Case(direct_all_reduce, lambda size, nbytes, rank, itemsize: direct_bytes_sent(size, nbytes)),
    "tree": Case(
        tree_all_reduce, lambda size, nbytes, rank, itemsize: tree_all_reduce_bytes_sent(size, nbytes, rank)
    ),
    "halving_doubling": Case(halving_doubling_all_reduce, halving_doubling_bytes_sent),
    "double_tree": Case(double_tree_all_reduce, double_tree_bytes_sent),
    "double_tree_of_one_segment": Case(
        functools.partial(double_tree_all_reduce, segments=1), double_tree_bytes_sent
    ),
} | {f"hierarchical_in_groups_of_{group_size}": hierarchical(group_size) for group_size in (1, 2, 3, 4)}


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


def matrix() -> Iterator[tuple[int, type, Operation]]:
    for elements in ELEMENTS:
        for dtype, operation in CASES:
            yield elements, dtype, operation


def run_matrix(size: int, reduce: Callable[[Communicator, Array, Operation], None]) -> list[list[Any]]:
    """For each rank, for each element of the matrix: its array afterwards and the bytes that it sent."""

    def program(communicator: Communicator) -> list[Any]:
        seen = []
        for elements, dtype, operation in matrix():
            array = arrays_of(size, elements, dtype)[communicator.rank]
            communicator.traffic.reset()
            reduce(communicator, array, operation)
            seen.append((array, int(communicator.traffic.bytes_sent.sum())))
        return seen

    return threads.run(size, program)


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("size", RANKS)
def test_all_reduce_gives_numpys_result_on_every_rank_and_sends_what_its_formula_says(
    name: str, size: int
) -> None:
    case = ALL_REDUCES[name]
    seen = run_matrix(size, case.all_reduce)
    for index, (elements, dtype, operation) in enumerate(matrix()):
        arrays = arrays_of(size, elements, dtype)
        expected = reduced(arrays, operation)
        for rank in range(size):
            array, sent = seen[rank][index]
            assert array.dtype == dtype
            np.testing.assert_array_equal(array, expected, f"{elements} × {dtype.__name__} {operation}")
            assert sent == case.bytes_sent(size, arrays[0].nbytes, rank, arrays[0].itemsize), (rank, elements)


@pytest.mark.parametrize("name", ["tree", "chain"])
@pytest.mark.parametrize("size", RANKS)
def test_reduce_leaves_numpys_result_on_the_root(name: str, size: int) -> None:
    root = size // 2
    reduce = functools.partial({"tree": tree_reduce, "chain": chain_reduce}[name], root=root)
    seen = run_matrix(size, reduce)
    for index, (elements, dtype, operation) in enumerate(matrix()):
        arrays = arrays_of(size, elements, dtype)
        np.testing.assert_array_equal(seen[root][index][0], reduced(arrays, operation))
        for rank in range(size):
            if name == "tree":
                expected = tree_reduce_bytes_sent(arrays[0].nbytes, rank, root)
            else:  # the chain ends at the root
                expected = chain_bytes_sent(size, arrays[0].nbytes, size - 1 - (rank - root) % size)
            assert seen[rank][index][1] == expected


@pytest.mark.parametrize("name", ["tree", "chain"])
@pytest.mark.parametrize("size", RANKS)
def test_broadcast_gives_every_rank_the_roots_array(name: str, size: int) -> None:
    root = size // 2
    broadcast = {"tree": tree_broadcast, "chain": chain_broadcast}[name]
    seen = run_matrix(size, lambda communicator, array, _: broadcast(communicator, array, root))
    for index, (elements, dtype, _) in enumerate(matrix()):
        arrays = arrays_of(size, elements, dtype)
        for rank in range(size):
            np.testing.assert_array_equal(seen[rank][index][0], arrays[root])
            if name == "tree":
                expected = tree_broadcast_bytes_sent(size, arrays[0].nbytes, rank, root)
            else:
                expected = chain_bytes_sent(size, arrays[0].nbytes, (rank - root) % size)
            assert seen[rank][index][1] == expected


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
        ALL_REDUCES[name].all_reduce(communicator, array, "mean")
        return array

    for array in threads.run(3, program):
        np.testing.assert_array_equal(array, np.full((2, 3, 5), 2.0))


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_an_array_that_is_not_contiguous_is_refused_with_the_way_out(name: str) -> None:
    def program(communicator: Communicator) -> None:
        ALL_REDUCES[name].all_reduce(communicator, np.zeros((4, 4))[:, ::2], "sum")

    with pytest.raises(ValueError, match="ascontiguousarray"):
        threads.run(2, program)


def test_the_root_of_a_central_all_reduce_takes_in_an_array_from_every_other_rank() -> None:
    def program(communicator: Communicator) -> int:
        central_all_reduce(communicator, np.zeros(10), root=2)
        return int(communicator.traffic.bytes_received.sum())

    received = threads.run(6, program)
    assert received[2] == central_bytes_received_by_root(6, 80) == 400
    assert received[0] == 80


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


def test_left_over_ranks_of_a_hierarchical_all_reduce_send_their_whole_array_once() -> None:
    # 8 ranks in groups of 3 are two groups; ranks 6 and 7 are left over, and lean on ranks 0 and 1.
    assert hierarchical_bytes_sent(8, 3000, 7, 1, 3) == (0, 3000)
    inside, across = hierarchical_bytes_sent(8, 3000, 1, 1, 3)
    assert (inside, across) == (4000, 1000 + 3000)


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


@pytest.mark.parametrize(
    "algorithm",
    [
        central_all_reduce,
        chain_broadcast,
        chain_reduce,
        double_tree_all_reduce,
        halving_doubling_all_reduce,
        hierarchical_all_reduce,
        tree_all_reduce,
        tree_broadcast,
        tree_reduce,
    ],
)
def test_each_collective_fits_on_a_screen(algorithm: Callable[..., None]) -> None:
    assert len(inspect.getsource(inspect.unwrap(algorithm)).splitlines()) <= 40
