"""Figures of lesson 10: a hang, who waits for whom, a restart, and how often to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    style.stacked(axes, parts, {"compute": "compute", "in the all-reduce": "send"}, fontsize=9.5)
    style.rows(axes, medians.index.to_list())
    axes.set(xlabel="time in a step", xlim=(0, None))
    style.unit_axis(axes.xaxis, "s")
    slowest = medians["compute_seconds"].idxmax()
    detail = "median of all steps but the first; whoever waits least is the slow one"
    return style.finish(axes, f"Everybody waits for {slowest}", detail)


def hang(printed: Sequence[Sequence[str]]) -> Figure:
    """What each rank called when, and which call never returned.

    `printed` are each rank's lines: seconds and a call's name as it begins, seconds and "done" when it has returned.
    """
    bars: list[tuple[int, str, float, float]] = []  # rank, what it does, begin, end; without an end: infinity
    for rank, lines in enumerate(printed):
        times = [(float(seconds), name) for seconds, name in map(str.split, lines)]
        for (begin, name), (end, _) in zip(times, [*times[1:], (np.inf, "")], strict=True):
            bars.append((rank, "compute" if name == "done" else name, begin, end))
    first, last = min(bar[2] for bar in bars), max(bar[2] for bar in bars)
    edge = last + 0.3 * (last - first)
    waiting: dict[str, list[str]] = {}
    _, axes = style.figure(9.0, 0.55 * len(printed) + 1.6)
    colours = {"compute": "compute", "all_reduce": "send", "barrier": "server"}
    for rank, name, begin, end in bars:
        left, width, colour = begin - first, min(end, edge) - begin, style.colour_of(colours[name])
        if end < np.inf or name == "compute":
            axes.barh(rank, width, 0.66, left=left, color=colour, edgecolor="white", linewidth=0.6)
            continue
        waiting.setdefault(name, []).append(str(rank))
        look: dict[str, Any] = {"hatch": "///", "edgecolor": colour, "linewidth": 1}
        axes.barh(rank, width, 0.66, left=left, color=style.tint(colours[name], 0.15), **look)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        style.inside(axes, left + width / 2, rank, f"{name} …", "wait", bbox=box)
    style.rows(axes, [f"rank {rank}" for rank in range(len(printed))], (len(printed) - 0.4, -0.6))
    axes.set(xlabel="time since the first call", xlim=(0, edge - first))
    style.unit_axis(axes.xaxis, "s")
    groups = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} in {name}" for name, ranks in waiting.items()]
    finding = f"They wait for each other: {', '.join(groups)}"
    detail = "slate: computing; orange: all_reduce; hatched: a call that never returns"
    return style.finish(axes, finding, detail)


def restart(metrics: pd.DataFrame) -> Figure:
    """The steps of a run that failed and went on from its last checkpoint, against time.

    `metrics` has the columns seconds, step, loss, attempt and worker.
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
        colour = style.WORKERS[int(attempt) % len(style.WORKERS)]
        style.measured(axes, seconds[~again], step[~again], colour=colour, markersize=4.5)
        style.measured(axes, seconds[again], step[again], colour=colour, markersize=5.5, hollow=True)
        middle = len(step) // 2
        style.note(
            axes,
            f"start {int(attempt) + 1}",
            (seconds[middle], step[middle]),
            (14, -8),
            color=colour,
            va="center",
        )
        reached = max(reached, int(step.max()))
    axes.axhline(reached, color=style.FAINT, zorder=0)
    axes.set(xlabel="seconds since the first step", ylabel="step", ylim=(0, None))
    detail = "a point: a step of one worker; hollow: it had been computed before"
    return style.finish(axes, f"Steps computed twice: {twice}", detail)


Points = Mapping[float, Sequence[float]]


def interval(
    workers: Mapping[int, float], save_seconds: float, restart_seconds: float, simulated: Mapping[int, Points]
) -> Figure:
    """Which share of the time is lost, against how often is saved, for several numbers of workers.

    Args:
        workers: mean seconds between failures, by number of workers.
        save_seconds: of one checkpoint.
        restart_seconds: of one restart.
        simulated: by number of workers, shares of simulated runs by interval.
    """
    _, axes = style.figure(8.4, 4.2)
    intervals = np.geomspace(30, 6 * 3600, 400)
    losses = []
    for index, (count, failure) in enumerate(workers.items()):
        colour = style.WORKERS[index]
        shares = recovery.lost_share(intervals, save_seconds, failure, restart_seconds)
        shown = shares <= 1
        style.theory(axes, intervals[shown] / 60, shares[shown], f"{count:,} workers", colour=colour)
        for seconds, each in simulated[count].items():
            low, middle, high = np.quantile(each, [0, 0.5, 1])
            axes.plot([seconds / 60] * 2, [low, high], color=colour, linewidth=4.5, alpha=0.3, zorder=2.5)
            look: dict[str, Any] = {"marker": style.MARKERS[index], "markersize": 4}
            style.measured(axes, [seconds / 60], [middle], colour=colour, **look)
        young = recovery.best_interval(save_seconds, failure)
        least = recovery.lost_share(young, save_seconds, failure, restart_seconds)
        axes.plot(young / 60, least, marker="|", color=style.INK, markersize=16, zorder=1.5)
        losses.append(f"{100 * shares.min():.0f} % with {count:,} workers")
    axes.set(xscale="log", xlabel="minutes of work between checkpoints")
    style.plain_ticks(axes.xaxis, [1, 3, 10, 30, 100, 300])
    axes.set(ylabel="share of the time that is lost", ylim=(0, 1))
    style.percent_axis(axes.yaxis)
    days = failure * count / 86400
    finding = f"Lost even at best: here {losses[-1]}, {losses[0]}"
    detail = f"a save {save_seconds:.0f} s, a restart {restart_seconds:.0f} s, a failure per worker in {days:.0f} days"
    return style.finish(axes, finding, detail)
