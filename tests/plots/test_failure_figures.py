"""Figures of lesson 10 show what was measured."""

import matplotlib
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from workshop_utils.plots import failures as figures
from workshop_utils.scaling import recovery

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _no_figure_is_left():
    yield
    plt.close("all")


def words(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def points(axes):
    """The data of everything that is drawn with a marker."""
    return [
        line.get_xydata().tolist() for line in axes.get_lines() if line.get_marker() not in ("None", None, "")
    ]


def test_bars_are_the_medians_and_the_slow_worker_is_named():
    table = pd.DataFrame(
        {
            "worker": ["worker-0", "worker-1"] * 4,
            "step": [1, 1, 2, 2, 3, 3, 4, 4],
            "compute_seconds": [9.0, 9.0, 0.1, 0.3, 0.1, 0.3, 0.2, 0.5],
            "all_reduce_seconds": [9.0, 9.0, 0.25, 0.05, 0.25, 0.05, 0.1, 0.0],
        }
    )
    figure = figures.waiting(table)
    widths = [round(bar.get_width(), 6) for bar in figure.axes[0].patches]
    assert widths == [0.1, 0.3, 0.25, 0.05]  # the first step does not count
    assert "Everybody waits for worker-1" in words(figure)


def test_what_each_way_keeps_of_its_speed_is_said():
    rates = pd.DataFrame(
        {"even": [200.0, 150.0], "straggler": [50.0, 147.0]}, index=["synchronous", "1 backup worker"]
    )
    figure = figures.remedies(rates)
    assert points(figure.axes[0]) == [[[200, 0], [150, 1]], [[50, 0], [147, 1]]]
    assert "Keeps most of its own speed with a slow worker: 1 backup worker" in words(figure)
    assert any("synchronous 25%, 1 backup worker 98%" in text for text in words(figure))


def test_steps_that_were_made_before_are_hollow_and_counted():
    table = pd.DataFrame(
        {
            "worker": "worker-0",
            "seconds": [10.0, 11.0, 12.0, 14.0, 15.0, 16.0],
            "step": [1, 2, 3, 2, 3, 4],
            "attempt": [0, 0, 0, 1, 1, 1],
            "loss": 1.0,
        }
    )
    figure = figures.restart(table)
    assert points(figure.axes[0]) == [[[0, 1], [1, 2], [2, 3]], [], [[6, 4]], [[4, 2], [5, 3]]]
    assert {"2 steps are made twice", "first start", "restart 1"} <= set(words(figure))


def test_each_number_of_workers_has_its_line_its_points_and_the_best_interval():
    failure = {10: 1e6, 1000: 1e4}
    figure = figures.interval(
        failure, 60.0, 120.0, {10: [(600.0, 0.1)], 1000: [(600.0, 0.2), (1200.0, 0.25)]}
    )
    drawn = points(figure.axes[0])
    assert drawn[0] == [[10, 0.1]]
    assert drawn[2] == [[10, 0.2], [20, 0.25]]
    assert drawn[1][0][0] == pytest.approx(recovery.best_interval(60.0, 1e6) / 60)
    assert {"10 workers", "1,000 workers"} <= set(words(figure))
