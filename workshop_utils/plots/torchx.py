"""Lesson 13: what BERT learns."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from workshop_utils.plots import style

SMOOTHED = 10  # steps of the running mean, whose end is the finding


def pretraining_losses(metrics: pd.DataFrame, vocabulary: int) -> Figure:
    """The loss of each rank as points, their mean and its running mean as lines, and that of guessing."""
    _, axes = style.figure(7.2, 3.9)
    mean = metrics.groupby("step")["loss"].mean()
    for rank in sorted(int(each) for each in metrics["rank"].unique()):
        rows, colour = metrics[metrics["rank"] == rank], style.colour_of(f"rank {rank}")
        axes.plot(rows["step"], rows["loss"], ".", color=colour, alpha=0.5, markersize=4)
    guess = float(np.log(vocabulary))
    style.theory(axes, [1, mean.index[-1]], [guess, guess], f"guessing: ln {vocabulary:,}")
    axes.plot(mean.index, mean, color=style.INK, linewidth=0.9, alpha=0.45)
    running = mean.rolling(SMOOTHED, min_periods=1).mean()
    axes.plot(running.index, running, color=style.INK, label=f"mean of {SMOOTHED} steps")
    axes.set(xlabel="step", ylabel="loss of the hidden tokens, nats", xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    ranks = metrics["rank"].nunique()
    detail = f"points: {ranks} ranks, each with its own sentences; thin: their mean"
    return style.finish(axes, losses_finding(guess, float(running.iloc[-1])), detail)


def losses_finding(guess: float, end: float) -> str:
    """What the loss at the end allows to say, in nats: a model's perplexity is how many tokens it hesitates between."""
    if end > guess - 0.2:
        return "So far the model guesses: it needs more steps"
    return f"BERT hesitates among about {round(np.exp(end), -1):,.0f} tokens, no longer {np.exp(guess):,.0f}"
