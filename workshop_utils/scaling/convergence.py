"""How many steps a training takes: what the batch, the learning rate and old gradients have to do with it.

reached = steps_to(run.wait().metrics, target=0.3)      # a row a learning rate and seed
rate, steps = fastest(reached)                          # of jobs/digits_large_batch with one batch
law = CriticalBatch.fit(batches, steps_of_each)         # minimum steps, critical batch
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd


def steps_to(metrics: pd.DataFrame, target: float) -> pd.DataFrame:
    """After how many steps each network's loss came to `target`: columns learning_rate, seed, steps.

    Between two reports the logarithm of the loss is taken to fall evenly. NaN for a network that never came there.

    Args:
        metrics: of a run, with columns learning_rate, seed, step and loss.
        target: a loss in nats, above zero.

    Raises:
        ValueError: if `target` is not above zero.
    """
    if not target > 0:
        raise ValueError(f"target is {target}; a loss must be more than 0")
    rows = []
    for _, network in metrics.dropna(subset=["seed"]).groupby(["learning_rate", "seed"]):
        curve = network.drop_duplicates("step").sort_values("step")
        steps = _crossing(curve["step"].to_numpy(float), curve["loss"].to_numpy(float), target)
        rows.append((float(curve["learning_rate"].iloc[0]), int(curve["seed"].iloc[0]), steps))
    return pd.DataFrame(rows, columns=["learning_rate", "seed", "steps"])


def _crossing(steps: np.ndarray, losses: np.ndarray, target: float) -> float:
    below = np.flatnonzero(losses <= target)  # a NaN is not below anything
    if not below.size:
        return math.nan
    first = int(below[0])
    if first == 0 or not np.isfinite(losses[first - 1]):
        return float(steps[first])
    before, after = np.log(losses[first - 1]), np.log(losses[first])
    share = (before - np.log(target)) / (before - after)
    return float(steps[first - 1] + share * (steps[first] - steps[first - 1]))


def fastest(reached: pd.DataFrame) -> tuple[float, np.ndarray]:
    """The learning rate that all seeds came to the target with in the fewest steps on average, and these steps.

    Args:
        reached: as `steps_to` returns it.

    Raises:
        ValueError: if there is no learning rate with which all seeds came there.
    """
    by_rate = _by_rate(reached, "steps")
    complete = {rate: steps for rate, steps in by_rate.items() if np.isfinite(steps).all()}
    if not complete:
        tried = ", ".join(f"{rate:g}" for rate in by_rate)
        raise ValueError(f"with none of the learning rates {tried} did all seeds reach the target")
    best = min(complete, key=lambda rate: complete[rate].mean())
    return best, complete[best]


def _by_rate(table: pd.DataFrame, column: str) -> dict[float, np.ndarray]:
    """What the seeds of each learning rate have in `column`, the smallest rate first."""
    rates = sorted(float(rate) for rate in table["learning_rate"].unique())
    return {rate: table.loc[table["learning_rate"] == rate, column].to_numpy(float) for rate in rates}


@dataclass(frozen=True)
class CriticalBatch:
    """Steps to a target against the batch, S = S_min (1 + B_crit / B), with the best learning rate for each batch.

    Source: McCandlish et al. (2018), "An empirical model of large-batch training", section 2: gradients of a small
    batch are mostly noise, of a large one mostly signal, and at B_crit they have as much of one as of the other.

    Attributes:
        minimum_steps: that no batch can undercut.
        critical_batch: at which training takes twice these steps.
    """

    minimum_steps: float
    critical_batch: float

    @classmethod
    def fit(cls, batches: Sequence[float], steps: Sequence[float]) -> CriticalBatch:
        """The law that comes closest to measurements, in the least squares of relative errors.

        Raises:
            ValueError: if there are fewer than two, or they do not fall as the law does.
        """
        if len(batches) < 2 or len(batches) != len(steps):
            counts = f"{len(batches)} batches and {len(steps)} steps"
            raise ValueError(f"there are {counts}; at least 2 of each are needed")
        b, s = np.asarray(batches, float), np.asarray(steps, float)
        columns = np.stack([1 / s, 1 / (b * s)], axis=1)
        (minimum, slope), *_ = np.linalg.lstsq(columns, np.ones(len(s)), rcond=None)
        if minimum <= 0 or slope <= 0:
            points = f"steps {s.round(1).tolist()} with batches {b.tolist()}"
            raise ValueError(f"{points} do not fall towards a minimum: take smaller and larger batches")
        return cls(float(minimum), float(slope / minimum))

    def steps(self, batch: float | np.ndarray) -> float | np.ndarray:
        """Steps to the target with `batch`."""
        return self.minimum_steps * (1 + self.critical_batch / batch)

    def learning_rate(self, batch: float | np.ndarray, largest: float) -> float | np.ndarray:
        """The best learning rate: η_max / (1 + B_crit / B), linear in small batches and flat in large ones."""
        return largest / (1 + self.critical_batch / batch)


def staleness_at_most(workers: int, bound: int) -> int:
    """Updates by others between a worker's pull and its push, under `stale_synchronous`: (W − 1)(2 · bound + 1).

    Between the two, another worker can come from `bound` pushes behind this one to `bound` ahead, and make one more
    before it has to wait. Ho et al. (2013), section 3, count in clocks, and have the same 2 · bound · (W − 1).

    Raises:
        ValueError: if there is no worker or the bound is negative.
    """
    if workers < 1 or bound < 0:
        raise ValueError(f"workers is {workers} and bound {bound}; they must be at least 1 and at least 0")
    return (workers - 1) * (2 * bound + 1)


def stable_learning_rate(delay: float) -> float:
    """The largest stable learning rate of gradients that are `delay` updates old, as a share of that of fresh ones.

    On a quadratic of curvature λ, wₜ₊₁ = wₜ − η λ wₜ₋τ shrinks if and only if η λ < 2 sin(π / (4τ + 2)) (Levin and May
    1976, "A note on difference-delay equations"). For long delays that is close to π / 2 · 1 / (2τ + 1).

    Raises:
        ValueError: if the delay is negative.
    """
    if not delay >= 0:
        raise ValueError(f"delay is {delay}; it must be at least 0")
    return math.sin(math.pi / (4 * delay + 2))


def largest_stable(losses: pd.DataFrame) -> float:
    """The largest learning rate that all seeds train with, as they do with all smaller ones; NaN if there is none.

    A loss is fine if it is at most twice that of the smallest learning rate, which is taken to work.

    Args:
        losses: columns learning_rate and loss; NaN is a network that diverged.
    """
    by_rate = _by_rate(losses, "loss")
    fine = 2 * by_rate[min(by_rate)].mean()
    best = math.nan
    for rate, of_rate in by_rate.items():
        if not (of_rate <= fine).all():  # false for NaN too
            break
        best = rate
    return best
