"""Figures of lesson 05 show what was measured."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from workshop_utils import adasum
from workshop_utils.plots import horovod as figures
from workshop_utils.timeline import Span

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


def test_the_front_ends_stand_on_the_schedule_and_on_each_other():
    table = pd.DataFrame(
        {
            "rank": [0, 1, 0, 0],
            "step": [1, 1, 10, 10],
            "learning_rate": [0.1, 0.1, 0.2, np.nan],
            "mean_loss": [np.nan, np.nan, np.nan, 0.5],
        }
    )
    figure = figures.front_ends({"one": table, "other": table}, lambda steps: 0.1 + 0.01 * steps)
    left, right = figure.axes
    assert points(left) == [[[1, 0.1], [10, 0.2]]] * 2
    assert points(right) == [[[10, 0.5]]] * 2
    rule = next(line for line in left.get_lines() if line.get_label() == "asked for")
    assert rule.get_xydata()[0].tolist() == [1, 0.1]  # the first step, counted from 1, has the rate of step 0


def test_fusion_and_cycle_are_shown_by_every_repeat_and_the_lower_quartile():
    figure = figures.tuning({"0": [0.3, 0.1, 0.2], "1MB": [0.02]}, {0.001: [0.004], 0.02: [0.021]}, tensors=7)
    left, right = figure.axes
    assert points(left)[-1] == [[0, pytest.approx(0.15)], [1, 0.02]]
    assert sorted(y for _, y in points(left)[0]) == [0.1, 0.2, 0.3]
    assert points(right)[-1] == [[0.001, 0.004], [0.02, 0.021]]
    assert [label.get_text() for label in left.get_xticklabels()] == ["off", "1MB"]
    assert any("7 gradients" in text for text in words(figure))


def step_of(names, start, together):
    spans = [Span(name, "NEGOTIATE_ALLREDUCE", start, start + 0.001) for name in names]
    for place, name in enumerate(names):
        first = start + 0.001 if together else start + 0.001 * (place + 1)
        spans.append(Span(name, "GLOO_ALLREDUCE", first, first + 0.001, 1))
    return spans


def test_a_timeline_shows_the_fastest_step_and_counts_its_messages():
    names = ["allreduce.2.bias", "allreduce.0.bias"]
    slow = [Span("allreduce.2.bias", "NEGOTIATE_ALLREDUCE", 0.0, 0.9)]
    fused = [*slow, *step_of(names, 1.0, together=True)]
    alone = [*slow, *step_of(names, 1.0, together=False)]
    figure = figures.timelines({"fused": fused, "alone": alone})
    assert {"fused: 1 message for 2 gradients", "alone: 2 messages for 2 gradients"} <= set(words(figure))
    bars = [patch for patch in figure.axes[1].patches if isinstance(patch, Rectangle)]
    assert sorted(round(bar.get_x(), 6) for bar in bars) == [0, 0, 1, 2]
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["2.bias", "0.bias"]


def test_a_timeline_without_a_step_is_refused():
    with pytest.raises(ValueError, match="holds no step"):
        figures.timelines({"empty": []})


def test_adasum_has_a_panel_an_angle_with_horovods_point_where_it_was():
    rows = [
        {"angle": 0.0, "adasum_x": 1.0, "adasum_y": 0.0, "mean_x": 1.0, "mean_y": 0.0},
        {"angle": 90.0, "adasum_x": 1.0, "adasum_y": 0.9, "mean_x": 0.5, "mean_y": 0.5},
    ]
    figure = figures.adasum(pd.DataFrame(rows), adasum.combine)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["0°", "90°"]
    assert points(figure.axes[1]) == [[[0.5, 0.5]], [[1.0, 0.9]]]


@pytest.mark.parametrize("joined", [None, 4.0])
def test_an_elastic_run_shows_every_report_and_how_many_workers_there_were(joined):
    table = pd.DataFrame(
        {
            "seconds": [1.0, 1.0, 3.0, 5.0, 5.0, 6.0],
            "worker": ["worker-0", "worker-1", "worker-0", "worker-0", "worker-1", "worker-0"],
            "loss": [2.0, 2.1, 1.0, 0.5, 0.6, np.nan],
            "world_size": [2, 2, 1, 2, 2, 2],
        }
    )
    figure = figures.elastic(table, 2.0, joined)
    upper, lower = figure.axes
    assert sorted(len(series) for series in points(upper)) == [2, 3]
    assert lower.get_lines()[0].get_ydata().tolist() == [2, 2, 1, 2, 2]
    assert ("another has started" in words(figure)) is (joined is not None)
