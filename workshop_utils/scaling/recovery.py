"""How often to save: what failures cost a run that goes back to its last checkpoint.

Failures come at random, on average one every M seconds: with N workers that each fail once in M₁ seconds, M = M₁ / N.
A run that saves every τ seconds spends δ on each checkpoint; each failure costs a restart of R and the work since the
last checkpoint.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt


def best_interval(save_seconds: float, failure_seconds: float) -> float:
    """Seconds of work between checkpoints that lose the least time: √(2 δ M), for δ much shorter than M.

    Source: Young (1974), "A first order approximation to the optimum checkpoint interval", CACM 17(9).
    """
    return math.sqrt(2 * save_seconds * failure_seconds)


def lost_share(interval: npt.ArrayLike, save: float, failure: float, restart: float = 0.0) -> Any:
    """Which share of the time is not spent on steps that last: 1 − τ / (M e^(R/M) (e^((τ+δ)/M) − 1)).

    Exact for failures that come independently of each other, also during saves and restarts. All are in seconds:
    `interval` is τ, a number or an array, `save` δ, `failure` M, `restart` R.

    Source: Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3).
    """
    wall = failure * np.exp(restart / failure) * np.expm1((np.asarray(interval) + save) / failure)
    return 1 - np.asarray(interval) / wall
