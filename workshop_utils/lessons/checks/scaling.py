"""Checks of lesson 15, from a few workers to a thousand; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from workshop_utils.comm.topology import Link
from workshop_utils.lessons.checks import Wrong, exercise, explain, mistakes, questions, result_of
from workshop_utils.scaling.cost import all_reduce_seconds

__getattr__ = questions(__name__)


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
                others = mistakes(__name__, "weak_efficiency")
                words = {"result": result, "first": next(iter(seconds))}
                found = {why.format(**words): of(seconds, count, right[count]) for why, of in others.items()}
                explain(got[count], found)
                raise Wrong(f"{result}, the step with {fewest} over the step with {count}.")
    return "the step of the fewest workers over that of many: 1 where nobody waits, whatever the number of workers."


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
            others = mistakes(__name__, "largest_ring", largest=largest_ring_of, Link=Link, busy=_busy_rings)
            words = {"result": result, "more": right + 1, "least": f"{least:.0%}"}
            given = right, compute, nbytes, path, least
            explain(got, {why.format(**words): of(*given) for why, of in others.items()})
            raise Wrong(f"{result}: the largest N with compute/(compute + 2(N − 1)(α + K/(NB))) ≥ {least:g}.")
    return "each worker more costs two latencies; so a ring that is long enough loses against any tree."


def largest_ring_of(compute: float, nbytes: float, path: Link, least: float, form: str = "ring") -> int:
    """The most workers with which a step, computing and then an all-reduce, keeps at least this efficiency."""
    workers = np.arange(1, 100_001)
    seconds = compute + np.asarray(all_reduce_seconds(form, workers, nbytes, path))
    return int(workers[compute / seconds >= least].max())


def _busy_rings(compute: float, nbytes: float, path: Link, least: float) -> int:
    """The most workers whose ring takes no more than the rest of `least` of the time that they compute."""
    seconds = np.asarray(all_reduce_seconds("ring", np.arange(1, 100_001), nbytes, path))
    return int((seconds <= (1 - least) * compute).sum())
