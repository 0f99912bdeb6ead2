"""Checks of lesson 09, convergence; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np

from workshop_utils.lessons.checks import Wrong, exercise, expect, mistakes, questions, recognise, result_of

__getattr__ = questions(__name__)


Array = np.ndarray
Arrays = tuple[Array, Array]


def _outer_step(shared: Array, mean: Array, momentum: Array, rate: float, decay: float) -> Arrays:
    """DiLoCo's outer step to where the workers are in the `mean`, by Nesterov's momentum."""
    way = shared - mean
    after = decay * momentum + way
    return shared - rate * (way + decay * after), after


def _mean(workers: list[Array]) -> Array:
    return np.mean(workers, axis=0)


@exercise
def outer_step(answer: Callable[..., Arrays]) -> str:
    """`answer(shared, workers, momentum, rate, decay)` is DiLoCo's outer step: the new shared weights and momentum."""
    shared, workers = np.array([1.0, 2.0]), [np.array([0.0, 2.0]), np.array([0.5, 1.0])]
    still, moving = np.zeros(2), np.array([1.0, -1.0])
    got = result_of(answer, *copy.deepcopy((shared, workers, still)), 1.0, 0.0)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Wrong(f"it gave {got!r}; it must be two things, the new shared weights and the new momentum.")
    case = (shared, workers, moving, 0.7, 0.9)
    recognise(answer, [case], mistakes(__name__, "outer_step", step=_outer_step, mean=_mean))
    cases = (
        (1.0, 0.0, still, "with rate 1 and no momentum", "it is then the mean of the workers' weights"),
        (0.5, 0.0, still, "with rate 0.5 and no momentum", "it goes half of the way to the mean"),
        (0.7, 0.9, still, "with momentum 0.9 from rest", "Nesterov: the way, and 0.9 times the new momentum"),
        (0.7, 0.9, moving, "with momentum 0.9 from (1, −1)", "the old momentum fades to 0.9 of it"),
    )
    for rate, decay, momentum, when, because in cases:
        weights, after = _outer_step(shared, _mean(workers), momentum, rate, decay)
        moved, new_momentum = answer(*copy.deepcopy((shared, workers, momentum)), rate, decay)
        expect(new_momentum, after, f"the momentum {when}", "decay · momentum + way; way = shared − mean")
        expect(moved, weights, f"the weights {when}", because)
    return "that is all that DiLoCo adds: with rate 1 and decay 0 it is local SGD."
