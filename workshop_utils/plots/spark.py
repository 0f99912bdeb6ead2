"""Figures of lesson 14: what a step of SGD costs in Spark, and what averaging and adding make of the same updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from workshop_utils.plots import style


def step_times(seconds: Mapping[str, Sequence[float]], detail: str) -> Figure:
    """Each time as a point, on a logarithmic axis, a row for each name: `Spark`, and some that begin with `ring`."""
    _, axes = style.figure(8.4, 1 + 0.7 * len(seconds))
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    for row, (name, values) in enumerate(seconds.items()):
        heights = row + np.linspace(-0.18, 0.18, len(values))
        style.measured(
            axes,
            list(values),
            heights,
            colour=name.split(",")[0].lower(),
            marker="os"[name.startswith("ring")],
            markersize=5,
        )
        axes.vlines(medians[name], row - 0.32, row + 0.32, color=style.INK, linewidth=1.5, zorder=5)
        place = (medians[name], row - 0.34)
        style.note(axes, f"{float(f'{1000 * medians[name]:.2g}'):g} ms", place, (0, 4), ha="center")
    style.rows(axes, list(seconds), (len(seconds) - 0.45, -0.75))
    axes.set(xscale="log", xlabel="time of one step, logarithmic")
    style.unit_axis(axes.xaxis, "s")
    ratio = medians["Spark"] / max(each for name, each in medians.items() if name.startswith("ring"))
    least = 10 ** int(np.log10(ratio))  # load on the machine changes the rest
    return style.finish(axes, f"Here a step in Spark takes over {least:,} times as long as in a ring", detail)


def by_seed(values: Mapping[str, Sequence[float]], what: str, finding: str, detail: str) -> Figure:
    """A row for each of `values`: a point for each seed, and a line at their mean."""
    _, axes = style.figure(8.4, 0.9 + 0.55 * len(values))
    for row, each in enumerate(values.values()):
        style.measured(axes, list(each), [row] * len(each), colour=f"worker {row}", marker=style.MARKERS[row])
        mean = float(np.mean(each))
        axes.vlines(mean, row - 0.3, row + 0.3, color=style.INK, linewidth=1.5)
        style.note(axes, f"{mean:.2f}", (mean, row - 0.3), (0, 3), ha="center")
    style.rows(axes, list(values), (len(values) - 0.45, -0.55))
    axes.set(xlabel=what)
    axes.margins(x=0.1)
    return style.finish(axes, finding, detail)
