"""Figures of lesson 06 show what was measured."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from workshop_utils.plots import tensorflow as figures

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _no_figure_is_left():
    yield
    plt.close("all")


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def curve(*losses: float, steps: int = 10, seconds: float = 1.0) -> pd.DataFrame:
    count = np.arange(len(losses))
    return pd.DataFrame({"step": steps * count, "seconds": seconds * count, "test_loss": losses})


def test_seconds_count_from_when_the_last_worker_had_made_its_first_step():
    metrics = pd.DataFrame(
        [
            ("worker-0", 0, 5.0, np.nan, 2.3),
            ("worker-0", 1, 6.0, 2.0, np.nan),
            ("worker-1", 1, 6.5, 2.1, np.nan),
            ("worker-0", 9, 8.5, np.nan, 0.4),
        ],
        columns=["worker", "step", "seconds", "loss", "test_loss"],
    )
    found = figures.learning_curve(metrics)
    assert found.to_numpy().tolist() == [[0, 0.0, 2.3], [9, 2.0, 0.4]]


@pytest.mark.parametrize("missing", ["loss", "test_loss"])
def test_a_run_without_losses_is_refused_by_name(missing):
    metrics = pd.DataFrame({"worker": ["worker-0"], "seconds": [1.0], "loss": [1.0], "test_loss": [1.0]})
    with pytest.raises(ValueError, match=f"hold no {missing}"):
        figures.learning_curve(metrics.drop(columns=missing))


def test_curves_are_one_only_if_all_their_steps_and_losses_agree():
    curves = {
        "in-graph": curve(2, 1),
        "MirroredStrategy": curve(2, 1.0004),
        "ParameterServerStrategy": curve(2, 1.002),
        "between-graph, asynchronous": curve(2, 1, steps=20),
    }
    assert figures.groups(curves) == [
        ["in-graph", "MirroredStrategy"],
        ["ParameterServerStrategy"],
        ["between-graph, asynchronous"],
    ]


def test_equal_curves_are_named_once_against_steps_and_each_against_seconds():
    curves = {
        "in-graph": curve(2, 1, 0.5, seconds=1.0),
        "MirroredStrategy": curve(2, 1, 0.5, seconds=0.25),
        "ParameterServerStrategy": curve(2, 1.5, 1.25, steps=20, seconds=2.0),
    }
    figure = figures.losses(curves)
    shown = words(figure)
    assert any(
        "3 forms make 2 different curves against steps, and 3 against seconds" in text for text in shown
    )
    assert shown.count("2 synchronous\nforms") == 1
    assert {"MirroredStrategy, 0.5 s", "in-graph, 2.0 s", "ParameterServerStrategy, 4.0 s"} <= set(shown)
    by_time = figure.axes[1].get_lines()[0]  # the fastest first; what was before training has no logarithm
    assert list(by_time.get_xdata()) == [0.25, 0.5]
    assert list(by_time.get_ydata()) == [1, 0.5]


def test_progress_has_a_line_for_every_worker_and_names_the_slow_one():
    metrics = pd.DataFrame(
        {
            "worker": ["worker-0", "worker-0", "worker-1", "worker-1", "chief-0"],
            "step": [1, 5, 1, 2, 9],
            "seconds": [10.0, 11.0, 10.0, 12.0, 13.0],
            "loss": [1.0, 1.0, 1.0, 1.0, np.nan],
        }
    )
    figure = figures.progress({"asynchronous": metrics}, "worker-1")
    lines = figure.axes[0].get_lines()
    assert [list(line.get_xdata()) for line in lines] == [[0, 1], [0, 2]]
    assert [list(line.get_ydata()) for line in lines] == [[1, 5], [1, 2]]
    assert {"worker-0", "worker-1, slow", "asynchronous"} <= set(words(figure))
