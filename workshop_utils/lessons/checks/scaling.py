"""Checks of lesson 15, from a few workers to a thousand; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from workshop_utils.comm.topology import Link
from workshop_utils.lessons.checks import Wrong, exercise, explain, questions, result_of
from workshop_utils.scaling.cost import all_reduce_seconds

__getattr__ = questions(__name__)

Mistakes = dict[str, float]


@exercise
def weak_efficiency(answer: Callable[[Mapping[int, float]], Mapping[int, float]]) -> str:
    """`answer(seconds)` is efficiency by workers, of steps in which every worker keeps its batch."""
    for seconds in ({1: 0.1, 2: 0.125, 4: 0.2}, {8: 0.3, 2: 0.15, 4: 0.2}):
        got = result_of(answer, dict(seconds))
        if not isinstance(got, Mapping) or set(got) != set(seconds):
            raise Wrong(f"it gave {got!r}; it must be a number for each of {sorted(seconds)}, as a dict.")
        fewest = min(seconds)
        right = {count: seconds[fewest] / each for count, each in seconds.items()}
        for count in sorted(seconds):
            if not np.isclose(got[count], right[count], rtol=1e-6):
                result = f"with {count} workers it gave {got[count]:.4g}; it must be {right[count]:.4g}"
                explain(got[count], _efficiency_mistakes(result, seconds, count, right[count]))
                raise Wrong(f"{result}, the step with {fewest} over the step with {count}.")
    return "the step of the fewest workers over that of many: 1 where nobody waits, whatever the number of workers."


def _efficiency_mistakes(result: str, seconds: Mapping[int, float], count: int, right: float) -> Mistakes:
    """What typical mistakes give with `count` workers, by the sentence on each."""
    times, first = count / min(seconds), next(iter(seconds))
    return {
        f"upside down: {result}. A step that takes longer is less efficient.": 1 / right,
        f"that is the speed-up: {result}. Divide by how many times as many workers there are.": right * times,
        f"that is strong scaling: {result}. Here every worker keeps its batch, so a step trains on more; do not divide "
        "by the workers again.": right / times,
        f"measured against {first} workers, which come first: {result}. The baseline is the fewest workers.": (
            seconds[first] / seconds[count]
        ),
    }


@exercise
def largest_ring(answer: Callable[[float, float, Link, float], int]) -> str:
    """`answer(compute, nbytes, path, least)`: the most workers with which a ring's weak efficiency is still `least`."""
    for compute, nbytes, path, least in (
        (0.1, 1e6, Link(1e-3, 1e8), 0.5),
        (0.5, 4e6, Link(2e-4, 1e9), 0.9),
        (0.1, 1e8, Link(1e-4, 1e8), 0.5),
    ):
        got = result_of(answer, compute, nbytes, path, least)
        right = largest_ring_of(compute, nbytes, path, least)
        if got != right:
            case = (
                f"computing {compute:g} s, {nbytes / 1e6:g} MB, α = {path.latency_seconds:g} s, "
                f"B = {path.bandwidth_bytes_per_second:g} B/s, at least {least:.0%}"
            )
            result = f"with {case} it gave {got!r}; it must be {right}"
            explain(got, _ring_mistakes(result, right, compute, nbytes, path, least))
            raise Wrong(f"{result}: the largest N with compute/(compute + 2(N − 1)(α + K/(NB))) ≥ {least:g}.")
    return "each worker more costs two latencies; so a ring that is long enough loses against any tree."


def largest_ring_of(compute: float, nbytes: float, path: Link, least: float, form: str = "ring") -> int:
    """The most workers with which a step, computing and then an all-reduce, keeps at least this efficiency."""
    workers = np.arange(1, 100_001)
    seconds = compute + np.asarray(all_reduce_seconds(form, workers, nbytes, path))
    return int(workers[compute / seconds >= least].max())


def _ring_mistakes(
    result: str, right: int, compute: float, nbytes: float, path: Link, least: float
) -> Mistakes:
    """What typical mistakes give, by the sentence on each."""
    bandwidth = path.bandwidth_bytes_per_second
    without_latency = largest_ring_of(compute, nbytes, Link(0.0, bandwidth), least)
    half = Link(path.latency_seconds / 2, bandwidth)
    seconds = np.asarray(all_reduce_seconds("ring", np.arange(1, 100_001), nbytes, path))
    return {
        f"one too many: {result}. With {right + 1} efficiency is just below {least:.0%}.": right + 1,
        f"latency left out: {result}. 2 (N − 1) messages follow each other, and each costs α.": without_latency,
        f"half a ring: {result}. After N − 1 messages all is added up; as many again pass it on.": (
            largest_ring_of(compute, nbytes / 2, half, least)
        ),
        f"that is a central rank: {result}.": largest_ring_of(compute, nbytes, path, least, "central"),
        f"a share of computing: {result}. Efficiency is computing / (computing + communication).": (
            int((seconds <= (1 - least) * compute).sum())
        ),
    }
