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
    counted: pd.Series, formulas: Mapping[str, Callable[[np.ndarray], Any]], ranks: int
) -> Figure:
    """What a rank sends per step, by batch: `counted` by cut and batch, and the lines of `formulas`."""
    _, axes = style.figure(8.2, 4.4)
    batches = np.unique(counted.index.get_level_values(1))
    line = np.geomspace(batches[0], batches[-1], 50)
    crossings, shifts = [], {"column": (-13, 9), "layer": (13, -19), "row": (0, -20)}
    for colour, marker, name in zip(style.MUTED, style.MARKERS, CUTS, strict=False):
        style.theory(axes, line, np.broadcast_to(formulas[name](line), line.shape), name, colour=colour)
        style.measured(axes, batches, counted[name].to_numpy(), colour=colour, marker=marker)
        if name != "data":
            # By the counts: data parallelism sends the same at each batch, a cut of the network so much an image.
            data = counted["data"].iloc[-1]
            crossings.append(batches[-1] * data / counted[name].iloc[-1])
            style.note(
                axes, f"{crossings[-1]:,.0f}", (crossings[-1], data), shifts[name], color=colour, ha="center"
            )
            axes.plot(crossings[-1], data, "o", ms=9, mfc="white", mec=colour, mew=1.6, zorder=4)
    axes.set(yscale="log", ylabel="sent per rank and step (bytes; mean of ranks)", xlabel="batch (images)")
    style.power_axis(axes, list(batches))
    style.unit_axis(axes.yaxis, "B")
    detail = "lines: formulas; points: counted on real ranks; rings: as many bytes as data parallelism"
    title = f"With {ranks} ranks, data parallelism sends the least above {max(crossings):,.0f} images"
    return style.finish(axes, title, detail)


def roofline(
    intensity: np.ndarray, attained: np.ndarray, flops: float, bandwidth: float, detail: str
) -> Figure:
    """FLOP/s that a rank `attained`, by the FLOP that it does per byte sent, under the roof of a core and its link.

    `flops` is the core's FLOP/s without any exchange, `bandwidth` the link's bytes/s each way. The roof is for an
    exchange that overlaps all computing (Williams et al. 2009), the curve below it for one that overlaps nothing.
    """
    _, axes = style.figure(7.2, 4.0)
    ridge = flops / bandwidth
    line = np.geomspace(min(ridge, *intensity) / 2, 4 * max(ridge, *intensity), 200)
    one_by_one = 1 / (1 / flops + 1 / (line * bandwidth))
    style.theory(axes, line, np.minimum(flops, line * bandwidth), "all overlaps", colour="one process")
    style.theory(axes, line, one_by_one, "nothing overlaps", linewidth=1, linestyle=style.DASHES[1])
    style.measured(axes, intensity, attained, colour="data parallel")
    style.mark(axes, ridge)
    style.note(
        axes, f"ridge {ridge:,.0f}", (ridge, 0), (4, 6), xycoords=("data", "axes fraction"), color=style.QUIET
    )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte sent", ylabel="attained by a rank (FLOP/s)")
    style.log_ticks(axes.xaxis)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    style.log_ticks(axes.yaxis)
    style.unit_axis(axes.yaxis, "")
    return style.finish(axes, "Left of the ridge, sending takes longer than computing", detail)


def asynchronous_losses(runs: Mapping[str, np.ndarray], rates: Mapping[str, float]) -> Figure:
    """The server's loss by gradients and by virtual seconds.

    `runs` has an array of (seeds, evaluations, [gradients, seconds, loss]) for each side; `rates` are their learning
    rates. Seconds are the seeds' median, too: their spread is small against that of the losses. A final loss is the
    mean of the last five evaluations.
    """
    figure, panels = style.figure(10.4, 4.4, columns=2, sharey=True)
    seconds = []
    for (name, run), colour, dashes in zip(runs.items(), style.MUTED, style.DASHES, strict=False):
        middle, (low, high) = np.median(run, axis=0), np.percentile(run[:, :, 2], (25, 75), axis=0)
        last = run[:, -5:, 2].mean(axis=1)
        seconds.append(f"{name} {middle[-1, 1]:,.0f} s")
        ends = f"{name}, rate {rates[name]:g}:\n{last.min():.2f} to {last.max():.2f}"
        for axes, column in zip(panels, (0, 1), strict=True):
            axes.fill_between(middle[:, column], low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(
                middle[:, column], middle[:, 2], color=colour, linestyle=dashes, label="_" if column else ends
            )
    panels[0].set(xlabel="gradients computed by all replicas", ylabel="loss on the test images (nats)")
    style.plain_ticks(panels[0].xaxis, next(iter(runs.values()))[0, 4::5, 0])
    panels[0].set_yscale("log")
    style.log_ticks(panels[0].yaxis)
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[1].set(xlabel="virtual time (s)", xscale="log")
    panels[1].xaxis.set_major_formatter("{x:,g}")
    detail = (
        f"simulated; median of {len(run)} seeds; bands: middle half; labels: lowest and highest final loss"
    )
    style.headline(figure, f"Time for {middle[-1, 0]:,.0f} gradients: {', '.join(seconds)}", detail)
    style.label_ends(panels[0], gap_points=27)
    return figure
