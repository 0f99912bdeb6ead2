"""Steps to a target, the critical batch, and how old a gradient may be."""

import math

import numpy as np
import pandas as pd
import pytest

from workshop_utils.scaling.convergence import (
    CriticalBatch,
    fastest,
    largest_stable,
    stable_learning_rate,
    steps_to,
)


def metrics(*curves):
    rows = [
        (rate, seed, 10 * index, loss)
        for rate, seed, losses in curves
        for index, loss in enumerate(losses, 1)
    ]
    return pd.DataFrame(rows, columns=["learning_rate", "seed", "step", "loss"])


def test_steps_are_counted_to_where_the_logarithm_of_the_loss_crosses_the_target_if_it_does():
    curves = (0.1, 0, [1.0, 0.25, 0.01]), (0.1, 1, [1.0, 0.9]), (0.1, 2, [1.0, math.nan]), (0.2, 0, [0.4])
    steps = steps_to(metrics(*curves), target=0.5)["steps"]
    assert steps.tolist() == pytest.approx([15, math.nan, math.nan, 10], nan_ok=True)


def test_the_fastest_learning_rate_is_one_with_which_all_seeds_arrive():
    rates, steps = [0.1, 0.1, 0.2, 0.2, 0.4, 0.4], [40.0, 50.0, 30.0, 32.0, 5.0, math.nan]
    table = pd.DataFrame({"learning_rate": rates, "steps": steps})
    rate, steps = fastest(table)
    assert rate == 0.2
    assert steps.tolist() == [30, 32]
    with pytest.raises(ValueError, match=r"none of the learning rates 0\.4 did all seeds reach"):
        fastest(table[table["learning_rate"] == 0.4])


def test_the_critical_batch_is_found_again_and_at_it_steps_are_twice_their_least_and_the_rate_is_half():
    law = CriticalBatch(100, 32)
    batches = np.array([1, 4, 16, 64, 256, 1024])
    found = CriticalBatch.fit(batches, law.steps(batches))
    assert (found.minimum_steps, found.critical_batch) == pytest.approx((100, 32))
    assert law.steps(32) == 200
    assert law.learning_rate(32, largest=0.8) == 0.4


@pytest.mark.parametrize("delay", [0, 1, 3, 8])
def test_the_stable_rate_is_where_the_delayed_recurrence_stops_shrinking(delay):
    limit = 2 * stable_learning_rate(delay)  # for curvature 1; fresh gradients may take 2

    def growth(rate):  # wₜ₊₁ = wₜ − rate · wₜ₋τ, by the roots of zᵗ⁺¹ − zᵗ + rate
        return float(np.abs(np.roots([1, -1, *[0] * (delay - 1), rate] if delay else [1, rate - 1])).max())

    assert growth(0.99 * limit) < 1
    assert growth(1.01 * limit) > 1


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ((1, 1, 0.5, 0.5, 0.4, 2.5, 0.1, 0.1), 0.2),
        ((1, 1, 0.5, math.nan, 0.4, 0.4, 0.1, 0.1), 0.1),
        ((1, 1, 0.5, 0.5, 0.4, 0.4, 0.1, 0.1), 0.8),
    ],
)
def test_the_largest_stable_rate_lies_below_the_first_that_fails(losses, rate):
    table = pd.DataFrame({"learning_rate": np.repeat([0.1, 0.2, 0.4, 0.8], 2), "loss": losses})
    assert largest_stable(table) == rate
