"""Checks of lesson 05, Horovod; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workshop_utils.lessons.checks import compare, exercise, mistakes, questions, recognise
from workshop_utils.parallel import adasum

__getattr__ = questions(__name__)


def _scaled(first: np.ndarray, second: np.ndarray, by_first: float, by_second: float) -> np.ndarray:
    """Adasum's sum, with the dot product divided by these numbers, of which right ones are 2 ‖a‖² and 2 ‖b‖²."""
    both = first @ second
    return (1 - both / by_first) * first + (1 - both / by_second) * second


@exercise
def warm_up(answer: Callable[[float, int, int, int], float]) -> str:
    """`answer(learning_rate, workers, step, warmup_steps)` is the learning rate of `step`, counted from 0."""
    recognise(answer, [(0.1, 8, 0, 10), (0.2, 4, 7, 10), (0.1, 8, 99, 10)], mistakes(__name__, "warm_up"))
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
    others = mistakes(__name__, "adasum_of_two", scaled=_scaled)
    recognise(answer, [(east, 3 * north), (east, slanted), (slanted, east + north)], others)
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
