"""Figures of parameter servers: who pushes when."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style


def pushes(runs: Mapping[str, pd.DataFrame], seconds: float, straggler: int) -> Figure:
    """Who pushed when, in the first `seconds` of each run.

    Args:
        runs: by name, a row a push: pusher (the worker's number), push_seconds, late (1 if it was dropped).
        seconds: how much of the runs to show.
        straggler: the worker that is marked as slow.
    """
    figure, grid = style.panels(runs, 9.6, 0.75 + 1.15 * len(runs), below=True, sharex=True)
    for axes, table in zip(grid, runs.values(), strict=True):
        workers = sorted(int(worker) for worker in table["pusher"].unique())
        for (worker, late), mine in table.groupby(["pusher", "late"]):
            colour = style.colour_of(f"worker {worker:.0f}")  # a table with gaps has no whole numbers
            axes.plot(
                mine["push_seconds"], mine["pusher"], linestyle="none", marker="o", markersize=5,
                markerfacecolor="white" if late else colour, markeredgecolor=colour,
            )  # fmt: skip
        names = [f"{worker}, slow" if worker == straggler else f"{worker}" for worker in workers]
        style.rows(axes, names, (workers[-1] + 0.6, workers[0] - 0.6), workers)
        axes.set(xlim=(-0.01 * seconds, 1.01 * seconds), ylabel="worker")
    grid[-1].set_xlabel("seconds since the first push")
    detail = "a dot: a gradient reaches the server; hollow: it came too late and was dropped"
    return style.finish(figure, "How far workers drift apart is a choice", detail)
