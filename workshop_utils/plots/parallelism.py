"""Figures of data and model parallelism: what each cut sends, and what it costs not to wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style

CUTS = ("data", "column", "layer", "row")  # in the colours and markers of `style`


def bytes_per_step(
    counted: pd.Series, formulas: Mapping[str, Callable[[np.ndarray], Any]], workers: int
) -> Figure:
    """What a rank sends per step, by batch: `counted` by cut and batch, and the lines of `formulas`."""
    _, axes = style.figure(8.2, 4.4)
    batches = np.unique(counted.index.get_level_values(1))
    line = np.geomspace(batches[0], batches[-1], 50)
    for colour, marker, name in zip(style.MUTED, style.MARKERS, CUTS, strict=False):
        label = f"{name}, {workers} ranks" if name != "layer" else "layer, 2 ranks"
        style.theory(axes, line, np.broadcast_to(formulas[name](line), line.shape), label, colour=colour)
        style.measured(axes, batches, counted[name].to_numpy(), colour=colour, marker=marker)
    axes.set(yscale="log", ylabel="sent per rank and step, mean of the ranks", xlabel="batch (images)")
    style.power_axis(axes, list(batches))
    style.unit_axis(axes.yaxis, "B")
    detail = "lines: formulas, points: counted on real ranks"
    return style.finish(axes, "Cuts of the network send more with larger batches", detail)


def asynchronous_losses(runs: Mapping[str, np.ndarray], rates: Mapping[str, float]) -> Figure:
    """The server's loss by gradients and by virtual seconds.

    `runs` has an array of (seeds, evaluations, [gradients, seconds, loss]) for each side; `rates` are their learning
    rates. Seconds are those of the seeds' mean, for their spread is small against that of the losses.
    """
    figure, panels = style.figure(9.6, 4.2, columns=2, sharey=True)
    ends = []
    for (name, run), colour in zip(runs.items(), style.MUTED, strict=False):
        mean, low, high = run.mean(axis=0), run[:, :, 2].min(axis=0), run[:, :, 2].max(axis=0)
        for axes, column in zip(panels, (0, 1), strict=True):
            axes.fill_between(mean[:, column], low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(mean[:, column], mean[:, 2], color=colour, label=f"{name}, rate {rates[name]:g}")
        ends.append(f"{name} {mean[-1, 2]:.2f} after {mean[-1, 1]:.0f} s")
    panels[0].set(xlabel="gradients computed by all replicas", ylabel="loss on the test images (nats)")
    panels[0].set_yscale("log")
    style.log_ticks(panels[0].yaxis)
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].legend(loc="upper right")
    panels[1].set_xlabel("virtual time (s)")
    detail = f"simulated; lines: mean of {len(run)} seeds, bands: lowest to highest"
    style.headline(figure, f"Final loss: {', '.join(ends)}", detail)
    return figure
