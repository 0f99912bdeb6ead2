"""Figures of lesson 10: who waits for whom, what not waiting buys, a restart, and how often to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style
from workshop_utils.scaling import recovery


def waiting(metrics: pd.DataFrame) -> Figure:
    """What each worker does with its steps: the median of its computing, and of its time in the all-reduce.

    `metrics` are a run's, with compute_seconds and all_reduce_seconds.
    """
    steps = metrics.dropna(subset=["compute_seconds"])
    steps = steps[steps["step"] > steps["step"].min()]  # the first one warms up
    medians = steps.groupby("worker")[["compute_seconds", "all_reduce_seconds"]].median()
    _, axes = style.figure(8.4, 0.62 * len(medians) + 1.5)
    parts = {"compute": medians["compute_seconds"], "in the all-reduce": medians["all_reduce_seconds"]}
    style.stacked(axes, parts, {"compute": "compute", "in the all-reduce": "wait"}, fontsize=9.5)
    style.rows(axes, medians.index.to_list())
    axes.set(xlabel="time in a step", xlim=(0, None))
    style.unit_axis(axes.xaxis, "s")
    slowest = medians["compute_seconds"].idxmax()
    detail = "median of the steps; who waits least is the slow one"
    return style.finish(axes, f"Everybody waits for {slowest}", detail)


def remedies(rates: pd.DataFrame) -> Figure:
    """Gradients applied per second, without and with a straggler.

    `rates` has a row a way of co-operating, in the order in which they are shown, and the columns `even`, `straggler`.
    """
    _, axes = style.figure(8.4, 0.6 * len(rates) + 1.6)
    rows = np.arange(len(rates))
    even, slow = rates["even"].to_numpy(), rates["straggler"].to_numpy()
    axes.hlines(rows, slow, even, color=style.FAINT, linewidth=4, zorder=1)
    style.measured(axes, even, rows, colour="worker 0", hollow=True, markersize=9, markeredgewidth=2)
    style.measured(axes, slow, rows, colour="worker 5", marker="D", markersize=9)
    for values, label, shift in ((even, "all equally fast", 14), (slow, "one slow worker", -14)):
        style.note(axes, label, (values[0], 0), (0, shift), ha="center", va="center")
    style.rows(axes, list(rates.index), (len(rates) - 0.4, -0.7))
    axes.set(xlabel="gradients applied per second, all workers together", xlim=(0, None))
    kept = slow / even
    best = rates.index[int(np.argmax(kept))]
    parts = [f"{name} {share:.0%}" for name, share in zip(rates.index, kept, strict=True)]
    finding = f"Keeps most of its own speed with a slow worker: {best}"
    return style.finish(axes, finding, f"kept of the speed: {', '.join(parts)}")


def restart(metrics: pd.DataFrame) -> Figure:
    """The steps of a run that failed and went on from its last checkpoint, against time.

    `metrics` are those of a `RestartedRun`: seconds, step, attempt, and worker.
    """
    steps = metrics.dropna(subset=["loss"]).sort_values("seconds")
    steps = steps[steps["worker"] == steps["worker"].iloc[0]]
    origin = steps["seconds"].min()
    _, axes = style.figure(8.4, 4.0)
    reached, twice = 0, 0
    for attempt, table in steps.groupby("attempt"):
        seconds, step = table["seconds"].to_numpy() - origin, table["step"].to_numpy()
        again = step <= reached
        twice += int(again.sum())
        name = "first start" if attempt == 0 else f"restart {int(attempt)}"
        colour = style.WORKERS[int(attempt) % len(style.WORKERS)]
        style.measured(axes, seconds[~again], step[~again], colour=colour, markersize=4.5)
        style.measured(axes, seconds[again], step[again], colour=colour, markersize=5.5, hollow=True)
        middle = len(step) // 2
        style.note(axes, name, (seconds[middle], step[middle]), (14, -8), color=colour, va="center")
        reached = max(reached, int(step.max()))
    axes.axhline(reached, color=style.FAINT, zorder=0)
    axes.set(xlabel="seconds since the first step", ylabel="step", ylim=(0, None))
    detail = "a point: a step of one worker; hollow: it had been made before"
    return style.finish(axes, f"Steps made twice: {twice}", detail)


Points = Sequence[tuple[float, float]]


def interval(
    workers: Mapping[int, float], save_seconds: float, restart_seconds: float, simulated: Mapping[int, Points]
) -> Figure:
    """Which share of the time is lost, against how often is saved, for several numbers of workers.

    Args:
        workers: mean seconds between failures, by number of workers.
        save_seconds: of one checkpoint.
        restart_seconds: of one restart.
        simulated: (interval, share) of simulated runs, by number of workers.
    """
    _, axes = style.figure(8.4, 4.2)
    intervals = np.geomspace(30, 6 * 3600, 200)
    for index, (count, failure) in enumerate(workers.items()):
        colour = style.WORKERS[index]
        shares = recovery.lost_share(intervals, save_seconds, failure, restart_seconds)
        shown = shares <= 1
        style.theory(axes, intervals[shown] / 60, shares[shown], f"{count:,} workers", colour=colour)
        points = np.array(simulated[count])
        style.measured(axes, points[:, 0] / 60, points[:, 1], colour=colour, marker=style.MARKERS[index])
        best = recovery.best_interval(save_seconds, failure)
        least = recovery.lost_share(best, save_seconds, failure, restart_seconds)
        axes.plot(best / 60, least, marker="|", color=style.INK, markersize=16, zorder=4)
    axes.set(xscale="log", xlabel="minutes between checkpoints")
    style.plain_ticks(axes.xaxis, [1, 3, 10, 30, 100, 300])
    axes.set(ylabel="share of the time that is lost", ylim=(0, 1))
    style.percent_axis(axes.yaxis)
    detail = "lines: Daly's formula; points: simulated runs; black bars: Young's √(2 δ M)"
    return style.finish(axes, "More workers fail more often, and must save more often", detail)
