"""Figures of data and model parallelism: what each cut sends, and what it costs not to wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style

CUTS = ("data", "column", "layer", "row")  # in the colours and markers of `style`
INSIDE = "row, inside a network"  # as the row cut, with rings on a dashed line


def bytes_per_step(
    counted: pd.Series, formulas: Mapping[str, Callable[[np.ndarray], Any]], ranks: int
) -> Figure:
    """What a rank sends per step, by batch: `counted` by cut and batch, and the lines of `formulas`."""
    _, axes = style.figure(8.2, 4.4)
    batches = np.unique(counted.index.get_level_values(1))
    line = np.geomspace(batches[0], batches[-1], 50)
    looks = dict(zip(CUTS, zip(style.MUTED, style.MARKERS, strict=False), strict=False))
    looks[INSIDE] = looks["row"]
    crossings, shifts = {}, {"column": (-13, 9), "layer": (13, -19), "row": (0, -20), INSIDE: (-15, 8)}
    for name, (colour, marker) in looks.items():
        dashes = style.DASHES[name == INSIDE]
        lines = np.broadcast_to(formulas[name](line), line.shape)
        style.theory(axes, line, lines, name, colour=colour, linestyle=dashes)
        points = counted[name].to_numpy()
        style.measured(axes, batches, points, colour=colour, marker=marker, hollow=name == INSIDE)
        if name != "data":
            # By the counts: data parallelism sends the same at each batch, a cut of the network so much an image.
            data = counted["data"].iloc[-1]
            crossings[name] = batches[-1] * data / points[-1]
            place = crossings[name], data
            style.note(axes, f"{place[0]:,.0f}", place, shifts[name], color=colour, ha="center")
            axes.plot(*place, "o", ms=9, mfc="white", mec=colour, mew=1.6, zorder=4)
    axes.set(yscale="log", ylabel="sent per rank and step (bytes; mean of ranks)", xlabel="batch (images)")
    style.power_axis(axes, list(batches))
    style.unit_axis(axes.yaxis, "B")
    detail = f"{ranks} ranks; lines: formulas; points: counted on real ranks; rings: as many bytes as data parallelism"
    row, inside = crossings["row"], crossings[INSIDE]
    title = f"Row or data? Equal bytes at {row:,.0f} images, inside a network at {inside:,.0f}"
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
    return style.finish(axes, "Without overlap, half the roof at the ridge", detail)


def time_to_loss(runs: Mapping[str, np.ndarray], targets: Sequence[float]) -> Figure:
    """Virtual seconds until each side's network reaches each of `targets`, a panel each.

    `runs` has an array of (seeds, targets, [seconds, gradients]) for each side; the others are held against the
    first. Seconds and gradients are infinite in a seed that has not reached its target.
    """
    names = [f"to a loss of {target:g}" for target in targets]
    figure, panels = style.panels(names, 10.4, 3.4, sharey=True)
    middles = {side: np.median(run, axis=0) for side, run in runs.items()}
    first = next(iter(middles.values()))
    for place, axes in enumerate(panels):
        for row, ((side, run), colour) in enumerate(zip(runs.items(), style.MUTED, strict=False)):
            seconds, gradients = middles[side][place]
            axes.plot([0, seconds], [row, row], color=style.tint(colour, 0.4), linewidth=5, zorder=1)
            style.measured(axes, run[:, place, 0], np.full(len(run), row), colour=colour, alpha=0.5)
            axes.plot(seconds, row, "|", color=colour, markersize=13, markeredgewidth=2.4, zorder=4)
            words = f"{seconds:,.0f} s", f"{gradients:,.0f} gradients"
            if row:
                faster, fewer = first[place] / (seconds, gradients)
                words = (
                    f"{words[0]}: {faster:.1f} times as fast",
                    f"{words[1]}: {1 / fewer:.1f} times as many",
                )
            style.note(axes, "\n".join(words), (0, row), (2, 8), color=colour, va="bottom", linespacing=1.05)
        axes.set(xlabel="virtual time (s)", xlim=(0, None))
        style.rows(axes, list(runs), (len(runs) - 0.6, -0.95))
    found = ", ".join(f"{side} {middle[-1, 0]:,.0f} s" for side, middle in middles.items())
    detail = f"simulated; dots: {len(run)} seeds; bars and numbers: their median"
    return style.finish(figure, f"To a loss of {targets[-1]:g}: {found}", detail)
