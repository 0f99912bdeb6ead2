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
    """The loss of each rank as points, and the running mean over all ranks as a line at the middle of its steps.

    `levels` are losses of models that know less, the best of them last; a dashed line each.
    """
    _, axes = style.figure(8.4, 4.2)
    for rank in sorted(int(each) for each in metrics["rank"].unique()):
        rows, colour = metrics[metrics["rank"] == rank], style.colour_of(f"rank {rank}")
        axes.plot(
            rows["step"], rows["loss"], ".", color=colour, alpha=0.6, markersize=5, label=f"rank {rank}"
        )
    axes.legend(loc="lower left")
    mean = metrics.groupby("step")["loss"].mean()
    for name, loss in levels.items():
        style.theory(axes, [1, mean.index[-1]], [loss, loss], name, linestyle="--")
    running = mean.rolling(SMOOTHED).mean().dropna()
    axes.plot(running.index - (SMOOTHED - 1) / 2, running, color=style.INK, label="_running")
    axes.set(xlabel="step", ylabel="loss of the chosen tokens, nats", xlim=(0, mean.index[-1] + 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    detail = (
        f"points: a rank's own sequences; line: mean of {SMOOTHED} steps and all ranks, drawn at their middle"
    )
    return style.finish(axes, losses_finding(mean.iloc[-SMOOTHED:], levels), detail)


def losses_finding(last: pd.Series, levels: Mapping[str, float]) -> str:
    """Whether the last losses are below the best level by twice the standard error of their mean."""
    end, error = float(last.mean()), float(last.std(ddof=1) / np.sqrt(len(last)))
    name, level = list(levels.items())[-1]
    below = "below" if end + 2 * error < level else "not clearly below"
    return f"Last {len(last)} steps: {end:.2f} ± {2 * error:.2f} nats, {below} {name}"
