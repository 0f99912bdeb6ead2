"""Checks of lesson 05, Horovod; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workshop_utils.lessons.checks import compare, exercise, questions, recognise
from workshop_utils.parallel import adasum

__getattr__ = questions(__name__)


def _scaled(first: np.ndarray, second: np.ndarray, by_first: float, by_second: float) -> np.ndarray:
    """Adasum's sum, with the dot product divided by these numbers, of which right ones are 2 ‖a‖² and 2 ‖b‖²."""
    both = first @ second
    return (1 - both / by_first) * first + (1 - both / by_second) * second


_OTHER_SCHEDULES = {
    "it begins at 0; a warm-up begins at one worker's rate, which it must have at step 0.": (
        lambda rate, workers, step, steps: rate * workers * min(1, step / steps)
    ),
    "it is one step ahead: `step` counts from 0, so at step 0 nothing has been added yet.": (
        lambda rate, workers, step, steps: rate * (1 + (workers - 1) * min(1, (step + 1) / steps))
    ),
    "it adds N times the rate to that of one worker, and ends at N + 1 times; add N − 1 times.": (
        lambda rate, workers, step, steps: rate * (1 + workers * min(1, step / steps))
    ),
    "it ends at one worker's rate; after the warm-up it must be N times that.": (
        lambda rate, workers, step, steps: rate * min(1, step / steps)  # noqa: ARG005
    ),
    "it never stops growing: after the warm-up it grows no further, so take at most 1 for step / warmup_steps.": (
        lambda rate, workers, step, steps: rate * (1 + (workers - 1) * step / steps)
    ),
}
_OTHER_SUMS = {
    "that is the mean: it halves even what only one of them says; two orthogonal gradients, which have "
    "nothing in common, both count in full.": lambda first, second: (first + second) / 2,
    "that is the sum: of two equal gradients, which say the same, so it counts once, it makes twice as "
    "much.": lambda first, second: first + second,
    "half is missing: take *half* of the projection away from each, or equal gradients cancel.": (
        lambda first, second: _scaled(first, second, first @ first, second @ second)
    ),
    "the norms are swapped: the factor of a gradient is divided by its *own* squared length.": (
        lambda first, second: _scaled(first, second, 2 * second @ second, 2 * first @ first)
    ),
    "the lengths are not squared: divide the dot product by 2 ‖a‖², that is `2 * (first @ first)`.": (
        lambda first, second: _scaled(first, second, 2 * (first @ first) ** 0.5, 2 * (second @ second) ** 0.5)
    ),
}


@exercise
def warm_up(answer: Callable[[float, int, int, int], float]) -> str:
    """`answer(learning_rate, workers, step, warmup_steps)` is the learning rate of `step`, counted from 0."""
    recognise(answer, [(0.1, 8, 0, 10), (0.2, 4, 7, 10), (0.1, 8, 99, 10)], _OTHER_SCHEDULES)
    later = "the learning rate of {1} workers at step {2} of {3}"
    cases = [
        ("one worker's learning rate at its first step", "one worker needs no warm-up", 0.1, 1, 0, 10),
        ("the first learning rate of 8 workers", "it begins at that of one worker", 0.1, 8, 0, 10),
        ("the learning rate of 8 workers after the warm-up", "8 times that of one", 0.1, 8, 10, 10),
        ("the learning rate half-way", "it grows by the same amount in every step", 0.1, 8, 5, 10),
        ("the learning rate long after the warm-up", "it grows no further", 0.1, 8, 99, 10),
        *((later, "", 0.2, workers, step, 10) for workers, step in ((2, 3), (4, 7), (16, 1))),
    ]
    compare(answer, lambda rate, n, step, steps: rate * (1 + (n - 1) * min(1, step / steps)), cases)
    return "from that of one worker to N times it, and no further."


@exercise
def adasum_of_two(answer: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> str:
    """`answer(first, second)` combines two gradients as Adasum does."""
    east, north = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    slanted = np.array([2.0, 1.0])
    recognise(answer, [(east, 3 * north), (east, slanted), (slanted, east + north)], _OTHER_SUMS)
    generator = np.random.default_rng(0)
    cases = (
        ("two orthogonal gradients", "they have nothing in common, so both count in full", east, north),
        ("two equal gradients", "they say the same, so it counts once", east, east),
        ("two opposite gradients", "they cancel", east, -east),
        ("gradients of lengths 1 and 3 in one direction", "the mean of both", east, 3 * east),
        ("gradients at 45°", "each loses half of the other's projection on it", east, east + north),
        ("two gradients of 7 numbers", "", generator.normal(size=7), generator.normal(size=7)),
    )
    compare(answer, adasum.combine, [(f"Adasum of {what}", *rest) for what, *rest in cases])
    return "what both say counts once, what only one says counts in full."
