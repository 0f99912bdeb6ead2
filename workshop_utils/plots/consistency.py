"""Figures of parameter servers: who pushes when, how old gradients are, and what not waiting or locking costs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from workshop_utils.plots import style

LONG_AGO = 16  # updates; staler gradients share the last bar


def pushes(runs: Mapping[str, pd.DataFrame], seconds: float, straggler: int) -> Figure:
    """Who pushed when, in the first `seconds` of each run.

    Args:
        runs: by name, a row a push: pusher (the worker's number), push_seconds, late (1 if it was dropped).
        seconds: how much of the runs to show.
        straggler: the worker that is marked as slow.
    """
    figure, grid = style.panels(runs, 9.6, 0.75 + 1.15 * len(runs), below=True, sharex=True)
    for axes, table in zip(grid, runs.values(), strict=True):
        workers = range(int(table["pusher"].max()) + 1)
        for (worker, late), mine in table.groupby(["pusher", "late"]):
            colour = style.colour_of(f"worker {worker:.0f}")  # a table with gaps has no whole numbers
            axes.plot(
                mine["push_seconds"], mine["pusher"], linestyle="none", marker="o", markersize=5,
                markerfacecolor="white" if late else colour, markeredgecolor=colour,
            )  # fmt: skip
        names = [f"{worker}, slow" if worker == straggler else f"{worker}" for worker in workers]
        style.rows(axes, names, (len(names) - 0.4, -0.6))
        axes.set(xlim=(-0.01 * seconds, seconds), ylabel="worker")
    grid[-1].set_xlabel("seconds since the first push")
    detail = "a dot: a gradient reaches the server; hollow: it came too late and was dropped"
    return style.finish(figure, "How far workers drift apart is a choice", detail)


def staleness_histograms(runs: Mapping[str, pd.DataFrame]) -> Figure:
    """How many updates by others came between a worker's pull and its push: a histogram for each run."""
    figure, grid = style.panels(runs, 9.6, 3.1, sharey=True)
    most = min(LONG_AGO, int(max(table["staleness"].max() for table in runs.values())))
    for axes, table, colour in zip(grid, runs.values(), cycle(style.MUTED), strict=False):
        applied = table.loc[table["late"] == 0, "staleness"]
        shares = np.bincount(applied.clip(upper=most).astype(int), minlength=most + 1) / max(1, len(applied))
        axes.bar(np.arange(most + 1), shares, color=colour, width=0.85)
        style.mark(axes, applied.mean(), color=style.INK, linewidth=1.2)
        axes.annotate(
            f"mean {applied.mean():.1f}\nmost {int(applied.max())}", (0.96, 0.95), xycoords="axes fraction",
            ha="right", va="top", fontsize=9.5,
        )  # fmt: skip
        axes.set(xlabel="staleness (updates)", xlim=(-0.7, max(4, most) + 0.7))
    style.percent_axis(grid[0].yaxis)
    grid[0].set_ylabel("share of gradients")
    last = f"; the bar at {LONG_AGO} holds all from there on" if most == LONG_AGO else ""
    detail = f"dashed: the mean of all applied gradients{last}"
    return style.finish(figure, "Workers that don't wait use stale parameters", detail)


def losses_over_time(runs: Mapping[str, pd.DataFrame]) -> Figure:
    """The workers' mean loss over time, for each run: columns seconds (since its first report) and loss."""
    _, axes = style.figure(8.4, 3.8)
    looks = cycle(zip(style.MUTED, style.DASHES, strict=True))
    for (name, table), (colour, dashes) in zip(runs.items(), looks, strict=False):
        ordered = table.sort_values("seconds")
        smooth = ordered["loss"].rolling(6, min_periods=1).mean().to_numpy()
        seconds = ordered["seconds"].to_numpy()
        style.theory(axes, seconds, smooth, name, colour=colour, linestyle=dashes, linewidth=2)
    axes.set(xlabel="seconds since the first report", ylabel="loss (nats)", ylim=(0, None))
    detail = "mean loss of the workers' last six reports"
    return style.finish(axes, "With a straggler, time is what waiting costs", detail)


def thousand_workers(kernel: pd.DataFrame, real: pd.DataFrame, most: np.ndarray, detail: str) -> Figure:
    """Updates per second and mean staleness against asynchronous workers.

    Args:
        kernel: by number of workers, with the columns of `scaling.communication.steady_rates`: lines.
        real: the same from real processes: points.
        most: updates per second that cannot be passed, for each row of `kernel`.
        detail: the conditions, for the second line of the title.
    """
    figure, (left, right) = style.figure(9.6, 4.1, columns=2)
    names = {"updates per second": "updates per second", "mean staleness": "staleness (updates, mean)"}
    for axes, (column, name) in zip((left, right), names.items(), strict=True):
        shown, points = kernel[kernel[column] > 0], real[real[column] > 0]  # a logarithmic axis has no 0
        style.theory(axes, shown.index.to_numpy(), shown[column].to_numpy(), colour=style.MUTED[3])
        real_workers, values = points.index.to_numpy(), points[column].to_numpy()
        style.measured(axes, real_workers, values, colour="workshop_parameter_server", zorder=4)
        axes.set(xscale="log", xlabel="workers", xlim=(0.9, 1.15 * kernel.index.max()))
        axes.set(yscale="log", ylabel=name, ylim=(0.7 * shown[column].min(), None))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axis.set_minor_formatter(NullFormatter())
    workers = kernel.index.to_numpy()
    style.theory(left, workers, most, colour="ideal", linestyle=style.DASHES[1], linewidth=1.3, zorder=1)
    full, middle = int(np.argmax(most >= 0.999 * most.max())), len(kernel) * 2 // 3
    for axes, text, place, shift in (
        (left, "the server's link is full: 1/s", (workers[-1], most[-1]), (-4, 8)),
        (left, "W/(c + r)", (workers[full // 2], most[full // 2]), (-8, 4)),
        (right, "W − 1", (workers[middle], kernel["mean staleness"].iloc[middle]), (-8, 6)),
    ):
        style.note(axes, text, place, shift, ha="right", color=style.QUIET)
    left.set_ylim(top=1.6 * most.max())
    style.log_ticks(left.yaxis)
    return style.finish(figure, "A full link makes workers staler, not faster", detail)


def hogwild(trials: pd.DataFrame) -> Figure:
    """What a lock costs and saves: a point a trial, and the median of each kind of trial as a line.

    Args:
        trials: a row a trial, with columns kind, updates_per_second, lost and overlapped (shares from 0 to 1).
    """
    kinds = list(dict.fromkeys(trials["kind"]))
    figure, grid = style.figure(9.6, 1.5 + 0.42 * len(kinds), columns=3, sharey=True)
    columns = ("updates_per_second", "lost", "overlapped")
    names = ("updates per second", "additions lost", "pulls overlapped")
    for axes, column, name in zip(grid, columns, names, strict=True):
        for row, kind in enumerate(kinds):
            values = trials.loc[trials["kind"] == kind, column].to_numpy(float)
            look: dict[str, Any] = {"colour": style.MUTED[row // 2], "marker": style.MARKERS[row % 2]}
            style.measured(axes, values, np.full(len(values), row), **look, clip_on=False)
            axes.vlines(np.median(values), row - 0.3, row + 0.3, color=style.INK, linewidth=1.4, zorder=2)
        style.rows(axes, kinds, (len(kinds) - 0.5, -0.5))
        axes.set(xlabel=name, xlim=(0, 1.1 * trials[column].max() or 1e-3))
        style.percent_axis(axes.xaxis)
    style.unit_axis(grid[0].xaxis, "")
    finding = "What a lock costs, and what it saves"
    return style.finish(figure, finding, "a point: a run of real processes; a line: their median")
