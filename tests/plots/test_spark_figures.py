"""Figures of lesson 14 show what was measured."""

import matplotlib
import pandas as pd

from workshop_utils.plots import spark as figures


def words(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_every_step_is_a_point_beside_the_ratio_of_the_medians():
    figure = figures.step_times({"spark": [0.1, 0.3, 0.2], "ring": [0.002, 0.001, 0.004]})
    points = [line.get_xdata().tolist() for line in figure.axes[0].get_lines()]
    assert points == [[0.1, 0.3, 0.2], [0.002, 0.001, 0.004]]
    assert "100 times" in " ".join(words(figure))
    assert {"200 ms", "2 ms"} <= set(words(figure))


def test_every_mode_is_a_named_point():
    modes = {"mode": ["synchronous", "hogwild"], "seconds_taken": [3.0, 5.0], "accuracy": [0.95, 0.9]}
    figure = figures.modes(pd.DataFrame(modes))
    assert {"synchronous", "hogwild"} <= set(words(figure))
    points = [tuple(line.get_xydata()[0]) for line in figure.axes[0].get_lines()]
    assert points == [(3.0, 0.95), (5.0, 0.9)]
