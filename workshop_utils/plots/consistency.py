"""Figures of parameter servers: who pushes when, how old gradients are, and what not waiting or locking costs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from workshop_utils.plots import style

LONG_AGO = 16  # updates; staler gradients share the last bar
SERVER_MODES = ("#332288", "#CC6677", "#117733", "#999933")  # Tol's muted: modes are no workers


def pushes(runs: Mapping[str, pd.DataFrame], seconds: float, straggler: int | None = None) -> Figure:
    """Who pushed when, in the first `seconds` of each run.

    Args:
        runs: by name, a row a push: pusher (the worker's number), push_seconds, late (1 if it was dropped).
        seconds: how much of the runs to show.
        straggler: the worker that is marked as slow.
    """
    figure, grid = style.figure(9.6, 0.75 + 1.15 * len(runs), rows=len(runs), sharex=True)
    for axes, (name, table) in zip(np.atleast_1d(grid), runs.items(), strict=True):
        workers = sorted(int(worker) for worker in table["pusher"].unique())
        for worker in workers:
            mine = table[table["pusher"] == worker]
            for late, face in ((0, style.colour_of(f"worker {worker}")), (1, "white")):
                times = mine.loc[mine["late"] == late, "push_seconds"]
                edge = style.colour_of(f"worker {worker}")
                axes.plot(
                    times, np.full(len(times), worker), linestyle="none", marker="o", markersize=5,
                    markerfacecolor=face, markeredgecolor=edge, clip_on=True,
                )  # fmt: skip
        axes.set_yticks(workers, [f"{w}, slow" if w == straggler else f"{w}" for w in workers])
        axes.set_ylim(max(workers) + 0.6, -0.6)
        axes.set_xlim(-0.01 * seconds, seconds)
        axes.set_title(name, fontsize=10, loc="left", pad=3)
        axes.grid(visible=False, axis="y")
        axes.set_ylabel("worker")
    np.atleast_1d(grid)[-1].set_xlabel("seconds since the first push")
    style.headline(
        figure,
        "How far workers drift apart is a choice",
        "a dot: a gradient reaches the server; hollow: it came too late and was dropped",
    )
    return figure


def staleness(runs: Mapping[str, pd.DataFrame]) -> Figure:
    """How many updates by others came between a worker's pull and its push: a histogram for each run."""
    figure, grid = style.figure(9.6, 3.1, columns=len(runs), sharey=True)
    most = min(LONG_AGO, int(max(table["staleness"].max() for table in runs.values())))
    for axes, (name, table), colour in zip(
        np.atleast_1d(grid), runs.items(), _colours(len(runs)), strict=True
    ):
        applied = table.loc[table["late"] == 0, "staleness"]
        shares = np.bincount(applied.clip(upper=most).astype(int), minlength=most + 1) / max(1, len(applied))
        axes.bar(np.arange(most + 1), shares, color=colour, width=0.85)
        axes.axvline(applied.mean(), color=style.INK, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.annotate(
            f"mean {applied.mean():.1f}\nmost {int(applied.max())}", (0.96, 0.95), xycoords="axes fraction",
            ha="right", va="top", fontsize=9.5,
        )  # fmt: skip
        axes.set_title(name, fontsize=10, loc="left", pad=3)
        axes.set_xlabel("staleness (updates)")
        axes.set_xlim(-0.7, max(4, most) + 0.7)
    style.percent_axis(np.atleast_1d(grid)[0].yaxis)
    np.atleast_1d(grid)[0].set_ylabel("share of gradients")
    last = f"; the bar at {LONG_AGO} holds all from there on" if most == LONG_AGO else ""
    style.headline(
        figure,
        "Who does not wait computes on old parameters",
        f"dashed: the mean of all applied gradients{last}",
    )
    return figure


def losses(runs: Mapping[str, pd.DataFrame]) -> Figure:
    """The workers' mean loss over time, for each run: columns seconds (since its first report) and loss."""
    figure, axes = style.figure(8.4, 3.8)
    for index, ((name, table), colour) in enumerate(zip(runs.items(), _colours(len(runs)), strict=True)):
        ordered = table.sort_values("seconds")
        smooth = ordered["loss"].rolling(6, min_periods=1).mean()
        style.theory(
            axes, ordered["seconds"].to_numpy(), smooth.to_numpy(), name, colour=colour,
            linestyle=style.DASHES[index % 4], linewidth=2,
        )  # fmt: skip
    axes.set(xlabel="seconds since the first report", ylabel="loss (nats)", ylim=(0, None))
    style.headline(
        axes, "With a straggler, time is what waiting costs", "mean loss of the workers' last six reports"
    )
    style.label_ends(axes)
    return figure


def thousand_workers(kernel: pd.DataFrame, real: pd.DataFrame, most: np.ndarray, detail: str) -> Figure:
    """Updates per second and mean staleness against asynchronous workers.

    Args:
        kernel: by number of workers, with the columns of `scaling.asynchronous.summary`: lines.
        real: the same from real processes: points.
        most: updates per second that cannot be passed, for each row of `kernel`.
        detail: the conditions, for the second line of the title.
    """
    figure, (left, right) = style.figure(9.6, 4.1, columns=2)
    columns = ("updates per second", "mean staleness")
    names = ("updates per second", "staleness (updates, mean)")
    for axes, column, name in zip((left, right), columns, names, strict=True):
        shown, points = kernel[kernel[column] > 0], real[real[column] > 0]  # a logarithmic axis has no 0
        style.theory(axes, shown.index.to_numpy(), shown[column].to_numpy(), colour=SERVER_MODES[3])
        style.measured(
            axes,
            points.index.to_numpy(),
            points[column].to_numpy(),
            colour="workshop_parameter_server",
            zorder=4,
        )
        axes.set(xscale="log", yscale="log", xlabel="workers", ylabel=name)
        axes.set_xlim(0.9, 1.15 * kernel.index.max())
        axes.set_ylim(0.7 * shown[column].min(), None)
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
        axes.annotate(
            text, place, shift, textcoords="offset points", ha="right", fontsize=9.5, color=style.QUIET
        )
    left.set_ylim(top=1.6 * most.max())
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    style.headline(figure, "A full link makes workers staler, not faster", detail)
    return figure


def hogwild(trials: pd.DataFrame) -> Figure:
    """What a lock costs and saves: a point a trial, and the median of each kind of trial as a line.

    Args:
        trials: a row a trial, with columns kind, updates_per_second, lost and overlapped (shares from 0 to 1).
    """
    kinds = list(dict.fromkeys(trials["kind"]))
    figure, grid = style.figure(9.6, 1.5 + 0.42 * len(kinds), columns=3, sharey=True)
    names = {
        "updates_per_second": "updates per second",
        "lost": "additions lost",
        "overlapped": "pulls overlapped",
    }
    for axes, (column, name) in zip(grid, names.items(), strict=True):
        for row, kind in enumerate(kinds):
            values = trials.loc[trials["kind"] == kind, column].to_numpy(float)
            colour = SERVER_MODES[row // 2]
            marker = style.MARKERS[row % 2]
            style.measured(
                axes, values, np.full(len(values), row), colour=colour, marker=marker, clip_on=False
            )
            axes.plot(
                [np.median(values)] * 2, [row - 0.3, row + 0.3], color=style.INK, linewidth=1.4, zorder=2
            )
        axes.set_xlim(0, 1.1 * trials[column].max() or 1e-3)
        axes.set_xlabel(name)
        axes.grid(visible=False, axis="y")
        if column != "updates_per_second":
            style.percent_axis(axes.xaxis)
        else:
            style.unit_axis(axes.xaxis, "")
    grid[0].set_yticks(range(len(kinds)), kinds)
    grid[0].set_ylim(len(kinds) - 0.5, -0.5)
    style.headline(
        figure,
        "What a lock costs, and what it saves",
        "a point: a run of real processes; a line: their median",
    )
    return figure


def _colours(count: int) -> tuple[str, ...]:
    return tuple(SERVER_MODES[index % len(SERVER_MODES)] for index in range(count))
