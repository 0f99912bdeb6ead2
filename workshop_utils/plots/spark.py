"""Figures of lesson 14: what a step of SGD costs in Spark, and Elephas's modes side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style


def step_times(seconds: Mapping[str, Sequence[float]]) -> Figure:
    """Each step's time as a point, on a logarithmic axis; `seconds` has `spark` and `ring`, without first steps."""
    _, axes = style.figure(8.4, 2.6)
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    for row, (name, values) in enumerate(seconds.items()):
        heights = row + np.linspace(-0.18, 0.18, len(values))
        style.measured(axes, list(values), heights, colour=name, marker="os"[row % 2], markersize=5)
        axes.vlines(medians[name], row - 0.32, row + 0.32, color=style.INK, linewidth=1.5)
        place = (medians[name], row - 0.34)
        style.note(axes, f"{1000 * medians[name]:.3g} ms", place, (0, 4), ha="center")
    style.rows(axes, list(seconds), (len(seconds) - 0.45, -0.75))
    axes.set(xscale="log", xlabel="time of one step, logarithmic")
    style.unit_axis(axes.xaxis, "s")
    times = float(f"{medians['spark'] / medians['ring']:.2g}")  # it deserves no more digits
    detail = "the same gradients, the same weights; a line is the median"
    finding = f"A step by Spark takes about {times:,.0f} times as long as one by the ring"
    return style.finish(axes, finding, detail)


def modes(table: pd.DataFrame) -> Figure:
    """Accuracy against time of Elephas's modes: a row each, with `mode`, `seconds_taken` and `accuracy`."""
    _, axes = style.figure(7.2, 3.6)
    points = zip(table["mode"], table["seconds_taken"], table["accuracy"], strict=True)
    for number, (mode, seconds, accuracy) in enumerate(points):
        marker = style.MARKERS[number]
        style.measured(axes, [seconds], [accuracy], colour=f"worker {number}", marker=marker, markersize=9)
        # Right of the first, below the second, above the third: modes with a server often come to lie together.
        shift, align = (((11, 0), "left"), ((0, -15), "center"), ((0, 14), "center"))[number % 3]
        style.note(axes, mode, (seconds, accuracy), shift, ha=align, va="center")
    low, high = float(table["accuracy"].min()), float(table["accuracy"].max())
    axes.set(xlabel="time to train", xlim=(0, 1.35 * float(table["seconds_taken"].max())))
    axes.set(ylabel="accuracy on the test images", ylim=(max(0, low - 0.06), min(1, high + 0.06)))
    style.unit_axis(axes.xaxis, "s")
    style.percent_axis(axes.yaxis)
    detail = "those with a server differ from run to run"
    return style.finish(axes, "One run each: too few to say which mode is best", detail)
