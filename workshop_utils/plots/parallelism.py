"""Figures of data and model parallelism: what each cut sends, and what it costs not to wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style

CUTS = ("data", "column", "layer", "row")  # in the colours and markers of `style`
VALUE_NBYTES = 8


def bytes_per_step(
    counted: pd.Series, data: float, first: Mapping[str, float], inside: Mapping[str, float]
) -> Figure:
    """What a rank sends per step, by batch: in a network's first block, where it was `counted`, and inside a network.

    Args:
        counted: bytes by cut and batch, the mean of the ranks.
        data: the values that data parallelism sends, at any batch.
        first: the values an image that each other cut sends in the first block.
        inside: those inside a network, where the inputs' gradient crosses as well.
    """
    names = ("our network: images need no gradient", "inside a network, by formula")
    figure, panels = style.panels(names, 10.4, 4.3, sharey=True)
    batches = np.unique(counted.index.get_level_values(1))
    line = np.geomspace(batches[0], batches[-1], 50)
    crossings = []
    for axes, values in zip(panels, (first, inside), strict=True):
        for place, (name, colour, marker) in enumerate(zip(CUTS, style.MUTED, style.MARKERS, strict=False)):
            lines = line * values[name] if name in values else np.full_like(line, data)
            style.theory(axes, line, VALUE_NBYTES * lines, name, colour=colour, linestyle=style.DASHES[place])
            if values is first:
                style.measured(axes, batches, counted[name].to_numpy(), colour=colour, marker=marker)
        crossing = max(data / each for each in values.values())
        crossings.append(f"{crossing:,.0f}")
        at = crossing, VALUE_NBYTES * data
        axes.plot(*at, "o", ms=9, mfc="white", mec=style.colour_of("one process"), mew=1.6, zorder=4)
        style.note(axes, f"{crossings[-1]} images", at, (0, -20), ha="center")
        style.power_axis(axes, list(batches))
        axes.set(yscale="log", xlabel="batch (images)")
    panels[0].set_ylabel("sent per rank and step (bytes)")
    style.unit_axis(panels[0].yaxis, "B")
    title = f"Data parallelism sends the least from {crossings[0]} images on; inside a network from {crossings[1]}"
    return style.finish(figure, title, "lines: formulas; points: counted on 2 real ranks, their mean")


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


def time_to_loss(runs: Mapping[float, Mapping[str, Sequence[float]]], target: float) -> Figure:
    """Virtual seconds until each side's network reaches a loss of `target`, a panel a spread of computing times of 1 s.

    `runs` has the seconds of each seed by spread, in seconds, and side; infinite where a seed did not get there. The
    sides are compared with the first.
    """
    names = [f"{100 * spread:.0f} % of a gradient's time is random" for spread in runs]
    sides = next(iter(runs.values()))
    figure, panels = style.panels(names, 10.4, 0.56 * len(sides) + 1.5, sharex=True, sharey=True)
    factors = []
    for axes, of_sides in zip(panels, runs.values(), strict=True):
        medians = {side: float(np.median(seconds)) for side, seconds in of_sides.items()}
        alone = next(iter(medians.values()))
        for row, (side, seconds) in enumerate(of_sides.items()):
            colour, middle = style.MUTED[min(row, 1)], medians[side]
            there = [each for each in seconds if np.isfinite(each)] or [0.0]
            words = f"{middle:,.0f} s" + (f": {alone / middle:.1f} times as fast" if row else "")
            if np.isfinite(middle):
                axes.plot([0, middle], [row, row], color=style.tint(colour, 0.4), linewidth=7, zorder=1)
                factors += [alone / middle] if row else []
            else:
                words = "most seeds did not get there"
            style.measured(axes, there, np.full(len(there), row), colour=colour, alpha=0.5)
            style.note(axes, words, (max(there), row), (9, 0), color=colour, va="center")
        axes.set(xlabel="virtual time (s)", xlim=(0, None))
        axes.grid(visible=False, axis="y")
    style.rows(panels[0], list(sides))
    every = [each for of_sides in runs.values() for side in of_sides.values() for each in side]
    panels[0].set_xlim(0, 1.25 * max(each for each in every if np.isfinite(each)))
    span = f"{min(factors, default=np.nan):.1f} to {max(factors, default=np.nan):.1f}"
    found = f"To a loss of {target:g}, 16 replicas are {span} times as fast as one"
    return style.finish(figure, found, f"simulated; dots: {len(seconds)} seeds; bars: their median")
