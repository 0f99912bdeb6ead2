"""Figures of lesson 13 show what was measured, and say only what that allows."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from workshop_utils.plots import torchx as figures

matplotlib.use("Agg")


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


@pytest.mark.parametrize(
    ("end", "finding"),
    [
        (6.9, "So far the model guesses: it needs more steps"),
        (np.log(200), "BERT hesitates among about 200 tokens, no longer 1,024"),
    ],
)
def test_the_line_is_the_running_mean_of_the_ranks_and_the_title_says_what_was_learnt(
    end: float, finding: str
) -> None:
    rows = [(rank, step, end + sign) for step in range(1, 21) for rank, sign in ((0, 0.1), (1, -0.1))]
    figure = figures.losses(pd.DataFrame(rows, columns=["rank", "step", "loss"]), vocabulary=1024)
    assert any(finding in text for text in words(figure))
    (mean,) = [line for line in figure.axes[0].get_lines() if line.get_label() == "mean of 10 steps"]
    assert list(mean.get_ydata()) == pytest.approx([end] * 20)


def test_a_step_counts_a_tenth_in_the_running_mean() -> None:
    rows = [(rank, step, 3.0 + (step == 20)) for step in range(1, 21) for rank in (0, 1)]
    figure = figures.losses(pd.DataFrame(rows, columns=["rank", "step", "loss"]), vocabulary=1024)
    (mean,) = [line for line in figure.axes[0].get_lines() if line.get_label() == "mean of 10 steps"]
    assert list(mean.get_ydata())[-2:] == pytest.approx([3.0, 3.1])
