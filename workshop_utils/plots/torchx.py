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
    """The mean loss of each step as points, and its running mean as a line at the middle of its steps.

    `levels` are losses of models that know less, the best of them last; a dashed line each.
    """
    _, axes = style.figure(8.4, 4.2)
    mean = metrics.groupby("step")["loss"].mean()
    for name, loss in levels.items():
        style.theory(axes, [1, mean.index[-1]], [loss, loss], name, linestyle="--")
    axes.plot(mean.index, mean, ".", color=style.colour_of("rank 0"), alpha=0.6, markersize=5, label="_steps")
    running = mean.rolling(SMOOTHED).mean().dropna()
    axes.plot(running.index - (SMOOTHED - 1) / 2, running, color=style.INK, label="_running")
    axes.set(xlabel="step", ylabel="loss of the chosen tokens, nats", xlim=(0, mean.index[-1] + 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    detail = f"points: mean of all ranks and seeds; line: mean of {SMOOTHED} steps, drawn at their middle"
    return style.finish(axes, losses_finding(mean.iloc[-SMOOTHED:], levels), detail)


def losses_finding(last: pd.Series, levels: Mapping[str, float]) -> str:
    """Whether the last losses differ from the best level by twice the standard error of their mean."""
    end, error = float(last.mean()), float(last.std(ddof=1) / np.sqrt(len(last)))
    name, level = list(levels.items())[-1]
    apart = "above" if end > level else "below"
    if abs(end - level) <= 2 * error:
        apart = "not clearly apart from"
    return f"Last {len(last)} steps: {end:.2f} ± {2 * error:.2f} nats, {apart} {name}"
