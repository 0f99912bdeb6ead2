"""Checks of lesson 09, convergence; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workshop_utils.exercises import NotYet, Wrong, exercise, expect, number
from workshop_utils.scaling.convergence import staleness_at_most

scaled_rate = number(0.8, "", "linear scaling: 256 images are 8 times 32, so 8 times 0.1")
steps_at_four_times = number(
    250,
    "steps",
    "S_min (1 + B_crit / B) with B = 4 B_crit is 5/4 of S_min, and at B_crit it is 2 S_min = 400",
)
meetings_of_diloco = number(0.2, "per cent", "one all-reduce in 500 steps instead of 500")
largest_staleness = number(
    staleness_at_most(5, 2),
    "updates",
    "each of the other 4 comes from 2 behind to 2 ahead, and makes one more",
)


@exercise
def outer_step(answer: Callable[..., tuple[np.ndarray, np.ndarray]]) -> str:
    """`answer(shared, workers, momentum, rate, decay)` is DiLoCo's outer step: the new shared weights and momentum."""
    shared, workers = np.array([1.0, 2.0]), [np.array([0.0, 2.0]), np.array([0.5, 1.0])]
    still = np.zeros(2)
    got = answer(shared.copy(), workers, still.copy(), 1.0, 0.0)
    if got is None or got is ...:
        raise NotYet("your function gave nothing: write it, then run this again.")
    if not isinstance(got, tuple) or len(got) != 2:
        raise Wrong(f"it gave {got!r}; it must be two things, the new shared weights and the new momentum.")
    cases = (
        (1.0, 0.0, still, "with rate 1 and no momentum", "it is then the mean of the workers' weights"),
        (0.5, 0.0, still, "with rate 0.5 and no momentum", "it goes half of the way to the mean"),
        (0.7, 0.9, still, "with momentum 0.9 from rest", "Nesterov: the way, and 0.9 times the new momentum"),
        (
            0.7,
            0.9,
            np.array([1.0, -1.0]),
            "with momentum 0.9 from (1, −1)",
            "the old momentum fades to 0.9 of it",
        ),
    )
    for rate, decay, momentum, when, because in cases:
        way = shared - np.mean(workers, axis=0)
        after = decay * momentum + way
        moved, kept = answer(shared.copy(), workers, momentum.copy(), rate, decay)
        expect(kept, after, f"the momentum {when}", "decay · momentum + way, where way = shared − mean")
        expect(moved, shared - rate * (way + decay * after), f"the weights {when}", because)
    return "that is all that DiLoCo adds: with rate 1 and decay 0 it is local SGD."
