"""Figures of lesson 05: what ranks read, fusion and cycle time, the timeline, Adasum, and an elastic run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from workshop_utils.plots import style
from workshop_utils.training import horovod_timeline
from workshop_utils.training.horovod_timeline import TimelineSpan

Repeats = Sequence[float]  # seconds of the same measurement, repeated

PHASES = {
    horovod_timeline.NEGOTIATE: ("agreement", style.COLOURS["wait"]),
    horovod_timeline.COPY_IN: ("copy in and out", style.COLOURS["load"]),
    horovod_timeline.COPY_OUT: ("copy in and out", style.COLOURS["load"]),
    **dict.fromkeys(horovod_timeline.MESSAGES, ("all-reduce", style.COLOURS["send"])),
}
SHORTEST_BAR = 0.004  # of a panel's width: a shorter one could not be seen


def images_read(runs: Mapping[str, Sequence[Sequence[int]]], finding: str, detail: str) -> Figure:
    """Numbers of the images that each rank reads in a step; a panel a run. A grey line ties what all ranks read.

    Of a run, `runs` has a list of numbers for each rank.
    """
    most = max(len(ranks) for ranks in runs.values())
    figure, grid = style.panels(runs, 8.4, 0.95 + (0.3 * most + 0.5) * len(runs), below=True, sharex=True)
    for axes, ranks in zip(grid, runs.values(), strict=True):
        common = sorted(set.intersection(*map(set, ranks)))
        axes.vlines(common, 0, len(ranks) - 1, color=style.COLOURS["wait"], linewidth=2)
        for rank, images in enumerate(ranks):
            colour = style.colour_of(f"rank {rank}")
            axes.plot(images, [rank] * len(images), "|", color=colour, markersize=13, mew=2.2)
        style.rows(axes, [f"rank {rank}" for rank in range(len(ranks))], (len(ranks) - 0.4, -0.6))
        axes.grid(visible=False)
    grid[-1].set_xlabel("image's number in the data set")
    return style.finish(figure, finding, detail)


def tuning(seconds: Mapping[str, Repeats], cycles: Mapping[str, float], finding: str, detail: str) -> Figure:
    """How long it takes until all gradients of a step are back, by setting: each repeat, median and quartiles.

    Of the settings in `cycles` the cycle time is marked, in seconds.
    """
    _, axes = style.figure(8.4, 1.3 + 0.5 * len(seconds))
    colour = style.colour_of("horovod")
    for row, (name, repeats) in enumerate(seconds.items()):
        axes.plot(repeats, [row] * len(repeats), "o", color=colour, alpha=0.25, mew=0, markersize=4)
        axes.hlines(row, *np.quantile(repeats, [0.25, 0.75]), color=colour, linewidth=3)
        style.measured(axes, [float(np.median(repeats))], [row], colour=colour, markersize=9)
        if name in cycles:
            style.theory(axes, [cycles[name]] * 2, [row - 0.35, row + 0.35])
            style.note(axes, "one cycle", (cycles[name], row - 0.35), (0, 2), ha="center", color=style.QUIET)
    axes.set(xlabel="time until all gradients are back", xscale="log")
    style.log_ticks(axes.xaxis)
    style.unit_axis(axes.xaxis, "s")
    style.rows(axes, list(seconds), (len(seconds) - 0.5, -0.7))
    return style.finish(axes, finding, detail)


def gradient_timelines(recorded: Mapping[str, Sequence[TimelineSpan]]) -> Figure:
    """What became of each gradient of one step, as rank 0 recorded it; a panel for each run, on one scale.

    Of several steps in a run the shortest is shown, in which the ranks wait least for each other.
    """
    shown = {name: _fastest(horovod_timeline.steps(spans)) for name, spans in recorded.items()}
    tensors = max(len({span.tensor for span in spans}) for spans in shown.values())
    messages = {name: len(horovod_timeline.messages(spans)) for name, spans in shown.items()}
    titles = [f"{name}, {tensors} gradients" for name in shown]
    figure, grid = style.panels(
        titles, 9.6, 1.0 + len(shown) * (0.75 + 0.16 * tensors), below=True, sharex=True
    )
    lengths = [1e3 * (max(span.end for span in spans) - spans[0].start) for spans in shown.values()]
    for axes, spans in zip(grid, shown.values(), strict=True):
        _gradients(axes, spans, SHORTEST_BAR * max(lengths))
    grid[-1].set_xlabel("milliseconds since a cycle first saw a gradient")
    handles = [Patch(color=colour, label=name) for name, colour in dict(PHASES.values()).items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), fontsize=9)
    detail = "a row: a gradient; the shortest recorded step of each run, on one scale"
    finding = ", ".join(f"{name}: {count} message{'s' * (count > 1)}" for name, count in messages.items())
    return style.finish(figure, finding[0].upper() + finding[1:], detail)


def _fastest(steps: Sequence[list[TimelineSpan]]) -> list[TimelineSpan]:
    if not steps:
        raise ValueError("the timeline holds no step; was anything recorded?")
    # No barrier, for example.
    steps = [[span for span in spans if span.activity in PHASES] for spans in steps]
    return min(steps, key=lambda spans: max(span.end for span in spans) - spans[0].start)


def _gradients(axes: Axes, spans: Sequence[TimelineSpan], shortest: float) -> None:
    rows = {tensor: number for number, tensor in enumerate(dict.fromkeys(span.tensor for span in spans))}
    for span in spans:
        start, length = (span.start - spans[0].start) * 1e3, max(span.seconds * 1e3, shortest)
        axes.barh(rows[span.tensor], length, 0.72, start, color=PHASES[span.activity][1])
    names = [tensor.removeprefix("allreduce.") for tensor in rows]
    style.rows(axes, names, (len(rows) - 0.4, -0.6))
    axes.tick_params(axis="y", labelsize=8)


def adasum(table: pd.DataFrame, combine: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Figure:
    """How long what `combine` makes of two gradients of lengths 1 and 2 is, by the angle between them.

    Args:
        table: a row an angle, with angle in degrees, and Horovod's adasum_x, adasum_y, mean_x and mean_y.
        combine: Adasum of two vectors of two numbers.
    """
    _, axes = style.figure(7.2, 3.9)
    angles = np.linspace(0, np.pi, 91)
    first, seconds = np.array([1.0, 0.0]), 2 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    rules = {
        "mean": ("theory", (first + seconds) / 2),
        "sum": ("send", first + seconds),
        "Adasum": ("horovod", [combine(first, second) for second in seconds]),
    }
    for name, (colour, combined) in rules.items():
        style.theory(axes, np.degrees(angles), np.linalg.norm(combined, axis=1), name, colour=colour)
        if name != "sum":
            lengths = np.hypot(table[f"{name.lower()}_x"], table[f"{name.lower()}_y"])
            style.measured(axes, table["angle"].to_numpy(), lengths, colour=colour)
    style.plain_ticks(axes.xaxis, range(0, 181, 30))
    axes.set(xlabel="angle between the gradients (degrees)", ylabel="length of the result", ylim=(0, None))
    finding = "Adasum: the mean where gradients are parallel, the sum at 90°"
    return style.finish(axes, finding, "lengths 1 and 2; lines: formulas; points: Horovod's mean and Adasum")


def elastic(metrics: pd.DataFrame, killed_seconds: float) -> Figure:
    """Which step every worker was at by the clock, from a kill on, and how long nobody took one.

    Args:
        metrics: a run's metrics, with seconds, worker, step, loss and world_size.
        killed_seconds: when a worker was killed, on the same clock.
    """
    reports = metrics.dropna(subset=["loss"]).sort_values("seconds")
    _, axes = style.figure(9.6, 4.2)
    for worker, table in reports.groupby("worker"):
        size = 3 if worker == "worker-0" else 7  # the one inside the other, since they cover each other
        look: dict[str, Any] = {"colour": str(worker), "markersize": size, "zorder": 10 - size}
        when, steps = table[["seconds", "step"]].to_numpy().T
        style.measured(axes, when, steps, str(worker), **look)
    pauses = pauses_of(metrics)
    for start, seconds, workers in pauses:
        axes.axvspan(start, start + seconds, color=style.tint("wait", 0.5), zorder=0)
        words = f"{seconds:.2f} s, then {workers} worker{'s' * (workers > 1)}"
        style.note(axes, words, (start + seconds, 0.04), (4, 0), xycoords=("data", "axes fraction"))
    style.mark(axes, killed_seconds, "killed", linewidth=1.2)
    axes.set(xlabel="seconds since the launch", ylabel="step", ylim=(0, None))
    again = int(reports[reports["worker"] == "worker-0"]["step"].duplicated().sum())
    finding = f"A killed worker: {again} steps taken twice, {sum(pause[1] for pause in pauses):.1f} s without a step"
    return style.finish(axes, finding, "a point: a worker's report of a step; shaded: no worker takes one")


def pauses_of(metrics: pd.DataFrame) -> list[tuple[float, float, int]]:
    """Of each change of the number of workers: the last report before it, the seconds to the next, the new number."""
    reports = metrics.dropna(subset=["loss"]).sort_values("seconds")
    seconds, sizes = reports["seconds"].to_numpy(), reports["world_size"].to_numpy()
    changes = np.flatnonzero(np.diff(sizes))
    return [(seconds[at], seconds[at + 1] - seconds[at], int(sizes[at + 1])) for at in changes]
