"""Checks of lesson 09, convergence; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import Wrong, exercise, expect, questions, recognise, result_of

__getattr__ = questions(__name__)


Arrays = tuple[np.ndarray, np.ndarray]


def _step(
    shared: np.ndarray,
    way: np.ndarray,
    momentum: np.ndarray,
    rate: float,
    decay: float,
    look_ahead: bool = True,
) -> Arrays:
    """DiLoCo's outer step along `way`; Nesterov's looks ahead, plain momentum does not."""
    after = decay * momentum + way
    return shared - rate * (way + decay * after if look_ahead else after), after


def _way(shared: np.ndarray, workers: list[np.ndarray]) -> np.ndarray:
    return shared - np.mean(workers, axis=0)


def _outer_step(shared: np.ndarray, workers: list[np.ndarray], *rest: Any, **options: Any) -> Arrays:
    return _step(shared, _way(shared, workers), *rest, **options)


# `rest` is the momentum, the rate and the decay.
_MISTAKES: dict[str, Callable[..., Arrays]] = {
    "it goes the wrong way: the way gone is shared − mean, and it is subtracted, as a gradient is; yours leads away "
    "from where the workers went.": lambda shared, workers, *rest: _step(
        shared, -_way(shared, workers), *rest
    ),
    "you sum what the workers have come to; take their mean.": (
        lambda shared, workers, *rest: _step(shared, shared - np.sum(workers, axis=0), *rest)
    ),
    "you sum the workers' ways; take their mean, or the step grows with the number of workers.": (
        lambda shared, workers, *rest: _step(shared, len(workers) * _way(shared, workers), *rest)
    ),
    "only worker 0's weights count in it; take the mean of all workers.": (
        lambda shared, workers, *rest: _step(shared, shared - workers[0], *rest)
    ),
    "only the last worker's weights count in it; take the mean of all workers.": (
        lambda shared, workers, *rest: _step(shared, shared - workers[-1], *rest)
    ),
    "that is plain momentum; Nesterov looks ahead: the weights go by way + decay · momentum, with the new momentum.": (
        partial(_outer_step, look_ahead=False)
    ),
    "the two are in the wrong order: first the new shared weights, then the new momentum.": (
        lambda *case: _outer_step(*case)[::-1]
    ),
    "the old momentum does not fade: multiply it by decay before the way is added.": (
        lambda shared, workers, momentum, rate, decay: _outer_step(
            shared, workers, momentum / decay, rate, decay
        )
    ),
    "the momentum is handed back as it came; hand back the new one, decay · momentum + way.": (
        lambda shared, workers, momentum, *rest: (_outer_step(shared, workers, momentum, *rest)[0], momentum)
    ),
}


@exercise
def outer_step(answer: Callable[..., Arrays]) -> str:
    """`answer(shared, workers, momentum, rate, decay)` is DiLoCo's outer step: the new shared weights and momentum."""
    shared, workers = np.array([1.0, 2.0]), [np.array([0.0, 2.0]), np.array([0.5, 1.0])]
    still, moving = np.zeros(2), np.array([1.0, -1.0])
    got = result_of(answer, *copy.deepcopy((shared, workers, still)), 1.0, 0.0)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Wrong(f"it gave {got!r}; it must be two things, the new shared weights and the new momentum.")
    recognise(answer, [(shared, workers, momentum, 0.7, 0.9) for momentum in (still, moving)], _MISTAKES)
    cases = (
        (1.0, 0.0, still, "with rate 1 and no momentum", "it is then the mean of the workers' weights"),
        (0.5, 0.0, still, "with rate 0.5 and no momentum", "it goes half of the way to the mean"),
        (0.7, 0.9, still, "with momentum 0.9 from rest", "Nesterov: the way, and 0.9 times the new momentum"),
        (0.7, 0.9, moving, "with momentum 0.9 from (1, −1)", "the old momentum fades to 0.9 of it"),
    )
    for rate, decay, momentum, when, because in cases:
        weights, after = _outer_step(shared, workers, momentum, rate, decay)
        moved, new_momentum = answer(*copy.deepcopy((shared, workers, momentum)), rate, decay)
        expect(new_momentum, after, f"the momentum {when}", "decay · momentum + way; way = shared − mean")
        expect(moved, weights, f"the weights {when}", because)
    return "that is all that DiLoCo adds: with rate 1 and decay 0 it is local SGD."
