"""Checks of lesson 09, convergence; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import Wrong, exercise, expect, explain, questions, result_of

__getattr__ = questions(__name__)


Array = np.ndarray
Arrays = tuple[Array, Array]


def _outer_step(shared: Array, mean: Array, momentum: Array, rate: float, decay: float) -> Arrays:
    """DiLoCo's outer step to where the workers are in the `mean`, by Nesterov's momentum."""
    way = shared - mean
    after = decay * momentum + way
    return shared - rate * (way + decay * after), after


def _mistakes(shared: np.ndarray, workers: list[np.ndarray], *rest: Any) -> dict[str, Arrays]:
    """What typical mistakes give; `rest` is the momentum, the rate and the decay."""
    mean, total = np.mean(workers, axis=0), np.sum(workers, axis=0)
    momentum, rate, decay = rest
    weights, after = _outer_step(shared, mean, *rest)
    to_one_worker = "only {} weights count in it; take the mean of all workers."
    return {
        "it goes the wrong way: the way gone is shared − mean, and it is subtracted, as a gradient is; yours leads "
        "away from where the workers went.": _outer_step(shared, 2 * shared - mean, *rest),
        "you sum what the workers have come to; take their mean.": _outer_step(shared, total, *rest),
        "you sum the workers' ways; take their mean, or the step grows with the number of workers.": (
            _outer_step(shared, shared - len(workers) * (shared - mean), *rest)
        ),
        to_one_worker.format("worker 0's"): _outer_step(shared, workers[0], *rest),
        to_one_worker.format("the last worker's"): _outer_step(shared, workers[-1], *rest),
        "that is plain momentum; Nesterov looks ahead: the weights go by way + decay · momentum, with the new "
        "momentum.": (shared - rate * after, after),
        "the two are in the wrong order: first the new shared weights, then the momentum.": (after, weights),
        "the old momentum does not fade: multiply it by decay before the way is added.": (
            _outer_step(shared, mean, momentum / decay, rate, decay)
        ),
        "the momentum is handed back as it came; return decay · momentum + way.": (weights, momentum),
    }


@exercise
def outer_step(answer: Callable[..., Arrays]) -> str:
    """`answer(shared, workers, momentum, rate, decay)` is DiLoCo's outer step: the new shared weights and momentum."""
    shared, workers = np.array([1.0, 2.0]), [np.array([0.0, 2.0]), np.array([0.5, 1.0])]
    still, moving = np.zeros(2), np.array([1.0, -1.0])
    got = result_of(answer, *copy.deepcopy((shared, workers, still)), 1.0, 0.0)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Wrong(f"it gave {got!r}; it must be two things, the new shared weights and the new momentum.")
    case = (shared, workers, moving, 0.7, 0.9)
    explain(answer(*copy.deepcopy(case)), _mistakes(*case))
    cases = (
        (1.0, 0.0, still, "with rate 1 and no momentum", "it is then the mean of the workers' weights"),
        (0.5, 0.0, still, "with rate 0.5 and no momentum", "it goes half of the way to the mean"),
        (0.7, 0.9, still, "with momentum 0.9 from rest", "Nesterov: the way, and 0.9 times the new momentum"),
        (0.7, 0.9, moving, "with momentum 0.9 from (1, −1)", "the old momentum fades to 0.9 of it"),
    )
    for rate, decay, momentum, when, because in cases:
        weights, after = _outer_step(shared, np.mean(workers, axis=0), momentum, rate, decay)
        moved, new_momentum = answer(*copy.deepcopy((shared, workers, momentum)), rate, decay)
        expect(new_momentum, after, f"the momentum {when}", "decay · momentum + way; way = shared − mean")
        expect(moved, weights, f"the weights {when}", because)
    return "that is all that DiLoCo adds: with rate 1 and decay 0 it is local SGD."
