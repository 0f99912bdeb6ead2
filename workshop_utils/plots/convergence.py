"""Figures of lesson 09: what batch, learning rate, silence and old gradients do to convergence.

A point is the mean over seeds; the bar through it is the mean's 95 % interval, by Student's t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from scipy import stats

from workshop_utils.plots import style

Series = Mapping[str, Mapping[int, np.ndarray]]  # by name and position, one number a seed
Curves = Mapping[str, np.ndarray]  # by name, positions and values of a line of theory


def against(
    panels: Mapping[str, Series],
    labels: Sequence[str],
    finding: str,
    detail: str = "",
    *,
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Measurements over seeds, a panel for each of `panels`.

    Where some seeds never arrived (`inf`), a hollow marker at the upper edge says how many did.

    Args:
        panels: by title (empty for none), the series in them.
        labels: of the two axes; several panels share them.
        marks: dashed vertical lines of all panels, by what stands beside them.
    """
    figure, grid = style.panels(panels, 8.2 if len(panels) == 1 else 9.8, 4.1, sharey=True)
    for axes, series in zip(grid, panels.values(), strict=True):
        for index, (label, points) in enumerate(series.items()):
            _points(axes, points, label, index)
        ticks = sorted({x for points in series.values() for x in points})
        style.power_axis(axes, [x for x in ticks if x & (x - 1) == 0])
        axes.set_xlabel(labels[0])
        axes.set_yscale("log")
        for words, x in (marks or {}).items():
            style.mark(axes, x)
            style.note(axes, words, (x, 0), (4, 6), xycoords=("data", "axes fraction"), color=style.QUIET)
        _log_axis(axes)
    grid[0].set_ylabel(labels[1])
    return style.finish(grid[0] if "" in panels else figure, finding, detail)


def critical(
    updates: Mapping[int, np.ndarray],
    rates: Mapping[int, float],
    law: tuple[float, float],
    band: np.ndarray,
    noise: Mapping[float, np.ndarray],
    finding: str,
) -> Figure:
    """Steps and best rates against the batch with the `law`, and the noise scale on the way.

    Args:
        updates: by batch, one number a seed.
        rates: by batch, the best one tried.
        law: S_min and B_crit, fitted to the means of `updates`.
        band: the 95 % interval of B_crit.
        noise: by mean loss, in the order of training, the noise scale of each seed's network there.
    """
    names = (
        "steps, and the law fitted",
        "best rates, and the law's shape",
        "noise scale; band: critical batch",
    )
    figure, (left, middle, right) = style.panels(names, 11.6, 4.1)
    batches = np.array(sorted(updates))
    fine = np.geomspace(batches[0], batches[-1], 100)
    least, critical_batch = law
    style.theory(left, fine, least * (1 + critical_batch / fine))
    few = fine[fine < critical_batch]
    style.theory(left, few, least * critical_batch / few, colour="ideal", linestyle=(0, (1.5, 1.5)))
    style.note(left, "twice the batch,\nhalf the steps", (few[-1], least), (-16, 2), ha="right", va="bottom")
    _points(left, updates, "", 0)
    best, shape = np.array([rates[batch] for batch in batches]), 1 + critical_batch / batches
    height = np.exp(np.log(best * shape).mean())
    style.theory(middle, fine, height / (1 + critical_batch / fine))
    style.measured(middle, batches, best, colour=style.MUTED[1], marker="s")
    right.axhspan(*band, color=style.tint("theory", 0.35), linewidth=0)
    losses, each = np.array(list(noise)), list(noise.values())
    right.vlines(losses, [e.min() for e in each], [e.max() for e in each], color=style.MUTED[2], alpha=0.5)
    medians = [np.median(e) for e in each]
    style.theory(right, losses, medians, colour=style.MUTED[2], linewidth=1)
    style.measured(right, losses, medians, colour=style.MUTED[2], marker="D")
    right.set(
        xscale="log",
        yscale="log",
        xlabel="loss (nats)",
        ylabel="noise scale (images)",
    )
    style.plain_ticks(right.xaxis, [tick for tick in (2, 1, 0.5, 0.3, 0.2) if losses.min() / 1.1 < tick])
    right.invert_xaxis()
    for axes, ylabel in ((left, "steps to a loss of 0.3"), (middle, "best learning rate of those tried")):
        axes.set(yscale="log", ylabel=ylabel, xlabel="batch B (images)")
        style.power_axis(axes, [int(batch) for batch in batches[::2]])
    for axes in (left, middle, right):
        _log_axis(axes)
    return style.finish(
        figure,
        finding,
        "points: measured; lines: McCandlish's law (right: order of training); bars: left 95 %, right all networks",
    )


def staleness(
    images: Series, rates: Mapping[str, Mapping[int, float]], limit: Curves, finding: str, detail: str
) -> Figure:
    """Images to the target and best rates against the number of workers, and the `limit` of stale rates."""
    names = "images needed", f"best rates; frames: {list(images)[1]}, over workers"
    figure, (left, right) = style.panels(names, 10.4, 4.2)
    workers = sorted({count for points in images.values() for count in points})
    for index, (label, points) in enumerate(images.items()):
        _points(left, points, label, index)
        counts = sorted(rates[label])
        look: dict[str, Any] = {"colour": style.MUTED[index], "marker": style.MARKERS[index]}
        if index:  # around points in the same place
            look |= {"hollow": True, "markersize": 11, "markerfacecolor": "none"}
        style.measured(right, counts, [rates[label][count] for count in counts], **look)
    for label, (x, y) in limit.items():
        style.theory(right, x, y, label)
    for axes, words in ((left, "images to a loss of 0.3"), (right, "best learning rate of those tried")):
        axes.set(yscale="log", xlabel="workers", ylabel=words)
        style.power_axis(axes, workers)
        _log_axis(axes)
    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6)))
    return style.finish(figure, finding, detail)


def _points(axes: Axes, points: Mapping[int, np.ndarray], label: str, index: int) -> None:
    """Means with their intervals; joined by a thin line, if there is a label."""
    hue, marker = style.MUTED[index % 4], style.MARKERS[index % 8]
    whole = {x: each for x, each in sorted(points.items()) if np.isfinite(each).all()}
    means = np.array([each.mean() for each in whole.values()])
    half = np.array([interval(each) for each in whole.values()])
    axes.vlines(list(whole), means - half, means + half, color=hue, linewidth=1.6, alpha=0.6)
    missing = sorted(points.keys() - whole.keys())
    if label:
        name, dash = "_" if missing else label, style.DASHES[index % 4]
        style.theory(axes, list(whole), means, name, colour=hue, linewidth=1, linestyle=dash)
    style.measured(axes, list(whole), means, colour=hue, marker=marker)
    top = axes.get_xaxis_transform()
    for x in missing:
        style.measured(axes, [x], [0.97], colour=hue, marker=marker, hollow=True, transform=top)
        count = f"{np.isfinite(points[x]).sum()}/{len(points[x])}"
        style.note(axes, count, (x, 0.97), (0, -14), xycoords=top, ha="center", fontsize=8, color=hue)
    if missing:
        style.note(axes, label, (missing[0], 0.97), (-10, -4), xycoords=top, ha="right", color=hue)


def _log_axis(axes: Axes) -> None:
    style.log_ticks(axes.yaxis)
    axes.yaxis.set_major_formatter("{x:,g}")


def interval(values: np.ndarray) -> float:
    """Half the 95 % interval of the mean of `values`, by Student's t."""
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
