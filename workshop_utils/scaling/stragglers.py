"""What waiting for the slowest costs: order statistics of the times that workers take.

    times = LognormalTimes(median=0.1, spread=0.2)
    times.slowest(1000)                     # the mean step of 1,000 workers that wait for each other
    times.slowest(1000, backup=20)          # ... and for all but the 20 slowest

Workers' times are independent of each other, and of those of the step before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

# Trapezoids under a normal density: an integral over 0 … 1 whose ends are infinitely far away is smooth in these.
NODES = np.linspace(-7.5, 7.5, 301)
WEIGHTS = stats.norm.pdf(NODES) * (NODES[1] - NODES[0])


@dataclass(frozen=True)
class LognormalTimes:
    """How long workers take for a step: median · exp(spread · z) with z normal.

    Attributes:
        median: in seconds.
        spread: relative to the median; 0 for none.

    Raises:
        ValueError: for a number that cannot be; the message names the field.
    """

    median: float = 1.0
    spread: float = 0.1

    def __post_init__(self) -> None:
        for name in ("median", "spread"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0, and finite")

    @property
    def mean(self) -> float:
        """What a worker takes on average: what asynchronous training waits for."""
        return self.slowest(1)

    def slowest(self, workers: int, backup: int = 0) -> float:
        """Mean time until all but `backup` of `workers` are done: the expected order statistic.

        The k-th smallest of N uniform numbers follows Beta(k, N − k + 1); the quantile of the workers' distribution
        there is integrated numerically. Source: David and Nagaraja (2003), "Order statistics", section 3.1; Chen et al.
        (2016), "Revisiting distributed synchronous SGD", for backup workers.

        Raises:
            ValueError: for less than one worker, or as many backup workers as there are workers.
        """
        if workers < 1:
            raise ValueError(f"workers is {workers}; there must be at least 1")
        if not 0 <= backup < workers:
            raise ValueError(f"backup is {backup}; it must be at least 0 and less than the {workers} workers")
        above = stats.beta(backup + 1, workers - backup)  # the share of workers' times that are longer
        shares = np.clip(above.ppf(stats.norm.cdf(NODES)), 1e-300, 1 - 1e-16)
        return float(self.median * np.exp(self.spread * stats.norm.isf(shares)) @ WEIGHTS)
