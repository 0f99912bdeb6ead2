"""Figures of lesson 09 show what was measured, what diverged included."""

import math

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from workshop_utils.plots import convergence as figures
from workshop_utils.scaling.convergence import CriticalBatch, stable_learning_rate, staleness_at_most

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _no_figure_is_left():
    yield
    plt.close("all")


def words(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def points(axes) -> list[np.ndarray]:
    """Where each series of measured points lies."""
    return [line.get_xydata() for line in axes.get_lines() if line.get_linestyle() == "None"]


def seeds(**columns) -> pd.DataFrame:
    return pd.DataFrame(columns).assign(seed=lambda table: np.arange(len(table)) % 2)


def test_linear_scaling_is_said_to_hold_up_to_the_last_batch_before_the_first_that_fails():
    table = seeds(
        rule=["same rate"] * 8 + ["linear scaling"] * 8,
        batch=[32, 32, 64, 64, 128, 128, 256, 256] * 2,
        loss=[0.2, 0.2, 0.5, 0.5, 1, 1, 2, 2, 0.2, 0.2, 0.22, 0.24, 0.2, math.nan, 0.2, 0.2],
    )
    table.loc[13, "loss"] = 3.0
    figure = figures.against_batch(table)
    assert "Linear scaling holds up to a batch of 64" in words(figure)
    same, linear = points(figure.axes[0])
    assert same[:, 1].tolist() == [0.2, 0.5, 1, 2]
    assert linear[2].tolist() == [128, (0.2 + figures.GIVEN_UP) / 2], "what diverged counts as a guess"


def test_each_seed_of_a_warm_up_is_a_point_and_a_diverged_one_lies_at_a_guess():
    table = pd.DataFrame({"start": ["usual"] * 3, "warmup": [0, 0, 10], "loss": [0.5, math.nan, 0.3]})
    figure = figures.warm_up(table)
    none, ten = points(figure.axes[0])
    assert none[:, 1].tolist() == [0.5, figures.GIVEN_UP]
    assert ten[:, 1].tolist() == [0.3]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["none", "10 steps"]


def test_the_critical_batch_is_drawn_with_the_law_through_the_points():
    law = CriticalBatch(40, 16)
    batches = [2, 8, 32, 128]
    steps = {batch: [0.9 * law.steps(batch), 1.1 * law.steps(batch)] for batch in batches}
    figure = figures.critical(steps, dict.fromkeys(batches, 0.4), law)
    left, right = figure.axes
    assert "about 16" in words(figure)
    (measured,) = points(left)
    np.testing.assert_allclose(measured[:, 1], [law.steps(batch) for batch in batches])
    curve = left.get_lines()[0].get_xydata()
    np.testing.assert_allclose(np.interp(128, *curve.T), law.steps(128), rtol=1e-3)
    assert points(right)[0][:, 1].tolist() == [0.4] * 4


def test_both_kinds_of_shards_are_seen_whole():
    table = seeds(
        shards=["shuffled"] * 4 + ["sorted"] * 4,
        optimizer=["local SGD"] * 8,
        local_steps=[1, 1, 16, 16] * 2,
        loss=[0.3, 0.3, 0.3, 0.3, 0.4, 0.4, 1.9, 2.1],
    )
    figure = figures.local_sgd(table)
    for axes in figure.axes:
        assert axes.get_ylim()[1] >= 2.1
    assert points(figure.axes[1])[0][:, 1].tolist() == [0.4, 2.0]


def test_staleness_is_drawn_below_what_cannot_be_passed():
    table = pd.DataFrame({"bound": [0, 2], "mean": [1.0, 2.0], "most": [3, 9]})
    axes = figures.staleness(table, workers=4).axes[0]
    assert axes.get_lines()[0].get_ydata().tolist() == [staleness_at_most(4, 0), staleness_at_most(4, 2)]
    assert [series[:, 1].tolist() for series in points(axes)] == [[3, 9], [1, 2]]


def test_the_law_of_old_gradients_begins_at_the_fresh_one():
    table = seeds(
        workers=[1] * 4 + [4] * 4, learning_rate=[0.1, 0.1, 0.8, 0.8] * 2, loss=[0.3] * 6 + [math.nan] * 2
    )
    stable = pd.DataFrame({"staleness": [0.0, 3.0], "learning_rate": [0.8, 0.1]})
    left, right = figures.stale_rates(table, stable).axes
    assert points(left)[1][:, 1].tolist() == [0.3, figures.GIVEN_UP]
    law = right.get_lines()[0].get_xydata()
    assert law[0].tolist() == [0, 0.8]
    assert np.interp(3, *law.T) == pytest.approx(0.8 * stable_learning_rate(3), rel=0.01)


def test_batch_normalisation_has_a_line_for_each_kind_of_statistics_with_its_name():
    table = seeds(
        cut=["shuffled"] * 4,
        statistics=["local"] * 2 + ["synchronised"] * 2,
        part=[8] * 4,
        accuracy=[0.5, 0.7, 0.9, 0.9],
    )
    figure = figures.batch_norm(table)
    local, synchronised = points(figure.axes[0])
    assert local.tolist() == [[8, 0.6]]
    assert synchronised.tolist() == [[8, 0.9]]
    assert "synchronised" in words(figure)


def test_curves_are_means_over_seeds():
    table = pd.DataFrame({"epoch": [1, 1, 2, 2], "seed": [0, 1, 0, 1], "loss": [2.0, 1.0, 1.0, 0.0]})
    figure = figures.curves({"one": table}, "A finding", "its conditions")
    assert figure.axes[0].get_lines()[0].get_xydata().tolist() == [[1, 1.5], [2, 0.5]]
    assert "A finding" in words(figure)
