"""Lesson 13: what BERT learns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from workshop_utils.plots import style

SMOOTHED = 20  # steps of the running mean, whose end is the finding


def pretraining_losses(metrics: pd.DataFrame, levels: Mapping[str, float]) -> Figure:
    """The loss of each rank as points, their mean and its running mean as lines.

    `levels` are losses of models that know less, the best of them last; a dashed line each.
    """
    _, axes = style.figure(8.4, 4.2)
    mean = metrics.groupby("step")["loss"].mean()
    for rank in sorted(int(each) for each in metrics["rank"].unique()):
        rows, colour = metrics[metrics["rank"] == rank], style.colour_of(f"rank {rank}")
        axes.plot(rows["step"], rows["loss"], ".", color=colour, alpha=0.5, markersize=4)
    for name, loss in levels.items():
        style.theory(axes, [1, mean.index[-1]], [loss, loss], name)
    axes.plot(mean.index, mean, color=style.INK, linewidth=0.9, alpha=0.45)
    running = mean.rolling(SMOOTHED, min_periods=1).mean()
    axes.plot(running.index, running, color=style.INK, label="")
    axes.set(xlabel="step", ylabel="loss of the chosen tokens, nats", xlim=(0, mean.index[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    ranks = metrics["rank"].nunique()
    detail = f"points: {ranks} ranks, each with its own sentences; thin: their mean; thick: mean of {SMOOTHED} steps"
    last = mean.iloc[-SMOOTHED:]
    return style.finish(axes, losses_finding(last, levels), detail)


def losses_finding(last: pd.Series, levels: Mapping[str, float]) -> str:
    """What the last losses allow to say: below a level means by twice the standard error of their mean."""
    end, error = float(last.mean()), float(last.std(ddof=1) / np.sqrt(len(last)))
    tokens = f"As if among {np.exp(end):.0f} tokens"
    below = [name for name, loss in levels.items() if end + 2 * error < loss]
    if len(below) == len(levels):
        return f"{tokens}: less than is possible {below[-1]}"
    return (
        f"{tokens}: better than {below[-1]}, no more"
        if below
        else f"{tokens}: no better than {next(iter(levels))}"
    )
