"""Lesson 13: from an image to the log of rank 0, and what BERT learns."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from workshop_utils.plots import drawing, style

CLOUD = "torch_ddp"  # what AWS runs is framed in this colour
STORAGE = "load"
SMOOTHED = 10  # steps of the running mean, whose end is the finding


def flow() -> Figure:
    """What happens between `docker build` and the first line of rank 0, and who does it."""
    figure, axes = drawing.canvas(10.4, 5.3)
    drawing.title(
        axes,
        "Seven steps lead from an image to the log of rank 0",
        "1 store it, 2 send the Job, 3 start all pods or none, 4 mount the text, 5 meet, 6 all-reduce, 7 read; "
        "a square is a chip, with its first of two ranks",
    )
    drawing.box(axes, (0.2, 0.35), 1.9, 4.1, colour="compute", filled=False)
    drawing.text(axes, (1.15, 4.22), "your machine", weight="bold")
    drawing.box(axes, (0.35, 3.15), 1.6, 0.75, "docker build\nneuron.Dockerfile", colour="compute", size=9)
    drawing.box(axes, (0.35, 1.9), 1.6, 0.75, "torchx run\n-s kubernetes", colour="compute", size=9)
    drawing.box(axes, (0.35, 0.6), 1.6, 0.75, "kubectl logs -f\n…-0-0", colour="compute", size=9)

    drawing.box(axes, (2.75, 0.35), 7.45, 4.1, colour=CLOUD, filled=False)
    drawing.text(axes, (10.05, 4.22), "AWS: one region, one zone", size=9, colour=style.QUIET, align="right")
    drawing.box(axes, (2.95, 3.15), 1.5, 0.75, "ECR:\nthe image", colour="server", size=9)
    drawing.box(axes, (2.95, 1.9), 1.5, 0.75, "Volcano:\nqueue, Job", colour=CLOUD, size=9)
    drawing.box(axes, (2.95, 0.48), 1.5, 0.7, "etcd:\nwho is there?", colour="server", size=9)
    drawing.box(
        axes, (8.75, 1.75), 1.3, 1.05, "FSx for Lustre\n/data: text,\ncheckpoints", colour=STORAGE, size=8.5
    )

    drawing.box(axes, (5.15, 0.5), 3.3, 3.55, colour="server", filled=False, dashed=True)
    drawing.text(axes, (5.27, 3.86), "placement group", size=8.5, colour=style.QUIET, align="left")
    for node, bottom in enumerate((2.45, 0.62)):
        _node(axes, node, bottom)
    drawing.arrow(axes, (6.8, 2.45), (6.8, 1.87), colour="send", both_ways=True, width=2.4)
    drawing.text(axes, (6.92, 2.16), "6: 8 × EFA", size=9, colour="send", align="left")

    drawing.arrow(axes, (1.95, 3.52), (2.95, 3.52), "1", colour="send")
    drawing.arrow(axes, (1.95, 2.27), (2.95, 2.27), "2", colour="send")
    drawing.arrow(axes, (4.45, 2.42), (5.3, 2.95), "3", colour="send")
    drawing.arrow(axes, (4.45, 2.12), (5.3, 1.6), colour="send")
    drawing.arrow(axes, (4.45, 3.52), (5.3, 3.35), colour="server")
    drawing.arrow(axes, (8.75, 2.5), (8.3, 2.95), colour=STORAGE, both_ways=True)
    drawing.arrow(axes, (8.75, 2.05), (8.3, 1.5), colour=STORAGE, both_ways=True)
    drawing.text(axes, (8.6, 1.55), "4", size=9)  # in the pale colour of the arrow it could not be read
    drawing.arrow(axes, (4.45, 0.8), (5.3, 0.95), "5", colour="server", both_ways=True, label_at=(4.88, 1.03))
    axes.plot([5.3, 4.78], [2.55, 1.62], color=style.colour_of("compute"), linewidth=1.6)
    drawing.arrow(axes, (4.8, 1.63), (1.95, 1.1), "7", colour="compute", label_at=(2.45, 1.36))
    return figure


def _node(axes: Axes, node: int, bottom: float) -> None:
    """A trn1.32xlarge with its pod: one agent (torchrun), 32 ranks on 16 chips of two cores."""
    drawing.box(axes, (5.3, bottom), 3.0, 1.25, colour=f"worker {node}", filled=False)
    drawing.text(
        axes, (5.42, bottom + 1.05), f"trn1.32xlarge {node}, pod {node}", size=9, weight="bold", align="left"
    )
    drawing.text(axes, (5.42, bottom + 0.82), "torchrun: 32 ranks", size=8.5, align="left")
    for chip in range(16):
        corner = (5.42 + 0.35 * (chip % 8), bottom + 0.4 - 0.29 * (chip // 8))
        first = 32 * node + 2 * chip
        drawing.box(axes, corner, 0.32, 0.25, f"{first}", colour=f"worker {node}", size=7, corner_radius=0.02)


def losses(metrics: pd.DataFrame, vocabulary: int) -> Figure:
    """The loss of each rank as points, their mean and its running mean as lines, and that of guessing."""
    figure, axes = style.figure(7.2, 3.9)
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
    style.headline(
        axes,
        losses_finding(guess, float(running.iloc[-1])),
        f"points: {ranks} ranks, each with its own sentences; thin: their mean",
    )
    style.label_ends(axes)
    return figure


def losses_finding(guess: float, end: float) -> str:
    """What the loss at the end allows to say, in nats: a model's perplexity is how many tokens it hesitates between."""
    if end > guess - 0.2:
        return "So far the model guesses: it needs more steps"
    return f"BERT hesitates among about {np.exp(end):,.0f} tokens, no longer {np.exp(guess):,.0f}"


DRAWINGS = {"13_flow.svg": flow}
