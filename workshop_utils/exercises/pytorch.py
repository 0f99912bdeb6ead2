"""Checks of lesson 07, PyTorch; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.exercises import (
    NotYet,
    Wrong,
    exercise,
    expect,
    is_missing,
    number,
)
from workshop_utils.scaling.memory import zero_memory


@exercise
def buckets(answer: Callable[[list[int], int], list[list[int]]]) -> str:
    """`answer(nbytes, limit)`: the parameters of each bucket, by their numbers, where parameter i has `nbytes[i]`."""
    cases: tuple[tuple[list[int], int, list[list[int]]], ...] = (
        ([10, 10, 10], 100, [[2, 1, 0]]),
        ([10, 10, 10], 20, [[2, 1], [0]]),
        ([10, 10, 10], 10, [[2], [1], [0]]),
        ([30, 5, 5, 50, 5], 20, [[4], [3], [2, 1], [0]]),
        ([], 10, []),
    )
    for nbytes, limit, expected in cases:
        got = answer(list(nbytes), limit)
        if is_missing(got):
            raise NotYet("your function gave nothing: write it, then run this again.")
        found = [list(bucket) for bucket in got]
        if found == expected:
            continue
        of = f"parameters of {nbytes} bytes in buckets of {limit}"
        if sorted(number for bucket in found for number in bucket) != list(range(len(nbytes))):
            raise Wrong(f"{of}: you gave {found}; every parameter must be in one bucket, once.")
        if [number for bucket in found for number in bucket] == list(range(len(nbytes))):
            raise Wrong(
                f"{of}: you gave {found}; the last parameter's gradient comes first, so begin with it."
            )
        raise Wrong(
            f"{of}: you gave {found}; it must be {expected}: a bucket is closed before it would pass the limit, and a "
            "larger parameter has one of its own."
        )
    return "that is how `buckets_of` fills them."


@exercise
def bytes_of_a_rank(answer: Callable[[float, int, int], float]) -> str:
    """`answer(parameters, workers, stage)`: bytes of a rank with float32, Adam and ZeRO's stage 0, 1, 2 or 3."""
    expect(answer(1e6, 1, 0), 16e6, "a million parameters without sharding", "four numbers of 4 bytes each")
    what = ("nothing", "Adam's two numbers", "these and the gradient", "all four numbers")
    for workers, parameters in ((4, 1e6), (8, 7e9)):
        for stage, sharded in enumerate(what):
            expected = zero_memory(parameters, workers, stage).total
            of = f"stage {stage} with {workers} workers and {parameters:g} parameters"
            expect(answer(parameters, workers, stage), expected, of, f"it shards {sharded}")
    return "a rank of stage 3 holds an N-th of everything."


accumulated_megabytes = number(
    ring_bytes_sent(8, 400_000_000) / 1e6,
    "MB",
    "with no_sync, three of the four backward passes send nothing, so it is one all-reduce: 2 · 7/8 · 400 MB",
)
fully_sharded_megabytes = number(
    1.5 * ring_bytes_sent(8, 400_000_000) / 1e6,
    "MB",
    "two all-gathers and a reduce-scatter, each 7/8 · 400 MB, where data parallelism has one of each",
)
workers_for_a_gpu = number(
    2, "workers", "112 GB / N has to be less than 80 GB: model states alone, without activations"
)
