"""Checks of lesson 14, Spark; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import NotYet, Wrong, exercise, explain, is_missing, questions, result_of

__getattr__ = questions(__name__)

ROWS = ((7, 4), (5, 5, 3), (10,), (1, 30, 2))  # in each partition


def partial_sums(partitions: int, depth: int) -> int:
    """How many sums reach the driver from `treeAggregate(depth=depth)` over so many partitions.

    Source: PySpark 3.5, pyspark/rdd.py, `RDD.treeAggregate`.

    Raises:
        ValueError: if there is no partition, or the depth is less than 1.
    """
    if partitions < 1 or depth < 1:
        raise ValueError(f"partitions is {partitions} and depth {depth}; both must be at least 1")
    scale = max(math.ceil(partitions ** (1 / depth)), 2)
    left = float(partitions)
    while left > scale + left / scale:
        left /= scale
    return int(left)


@exercise
def mean_of_partitions(answer: tuple[Any, Any, Any]) -> str:
    """`answer` is (zero, add, finish): the mean of numbers in partitions, by sums that can be added in any order."""
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise Wrong("give three things: (zero, add, finish).")
    zero, add, finish = answer
    if any(is_missing(part) for part in answer):
        raise NotYet("write zero, add and finish, then run this again.")
    for sizes in ROWS:
        generator = np.random.default_rng(len(sizes))
        parts = [generator.normal(size=size) for size in sizes]
        sums = [reduce(add, [(float(value), 1) for value in part], zero) for part in parts]
        if any(is_missing(each) for each in sums):
            raise NotYet("`add` gave nothing: write it, then run this again.")
        for order in (sums, sums[::-1]):
            mean, right = finish(reduce(add, order, zero)), float(np.concatenate(parts).mean())
            if is_missing(mean):
                raise NotYet("`finish` gave nothing: write it, then run this again.")
            result = f"with partitions of {sizes} numbers it gave {mean:.4f}, not {right:.4f}"
            if abs(mean - right) > 1e-9:
                of_means = "the mean of the partitions' means counts a small partition as much as a large one"
                explain(mean, {f"{result}: {of_means}.": np.mean([part.mean() for part in parts])})
                raise Wrong(f"{result}.")
    return "sums and counts add up in any order, so the tree may have any shape; only at the end is there a division."


@exercise
def steps_of_all(answer: Callable[[Sequence[int], int, int], int]) -> str:
    """`answer(rows, workers, batch_size)` is how many steps all ranks can take; row group i is rank i % workers'."""
    batch_size = 32
    for rows, workers in (((300, 300, 300, 300), 2), ((300, 299, 10), 2), ((64, 64, 63), 3), ((31, 100), 2)):
        shares = [sum(rows[rank::workers]) for rank in range(workers)]
        right = min(shares) // batch_size
        steps = result_of(answer, list(rows), workers, batch_size)
        if steps != right:
            fewest = int(np.argmin(shares))
            why = f"rank {fewest} has {shares[fewest]} rows, which are {right} whole batches"
            if steps > right:
                why += f": in step {right + 1} the others would wait for it for ever"
            case = f"with row groups of {rows} rows, {workers} workers and batches of {batch_size}"
            raise Wrong(f"{case} it gave {steps}; {why}.")
    return "the rank with the fewest rows decides, since every step needs every rank."
