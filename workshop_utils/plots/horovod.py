"""Figures of lesson 05: three front ends, fusion and cycle time, the timeline, Adasum, and an elastic run."""

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

# A front end is no worker and no strategy: colours of Tol's muted scheme that neither has.
FRONT_ENDS = ("#882255", "#117733", "#DDAA33")
PHASES = {
    horovod_timeline.NEGOTIATE: ("wait until every rank has it", style.COLOURS["wait"]),
    horovod_timeline.COPY_IN: ("copy in and out", style.COLOURS["load"]),
    horovod_timeline.COPY_OUT: ("copy in and out", style.COLOURS["load"]),
    **dict.fromkeys(horovod_timeline.MESSAGES, ("all-reduce", style.COLOURS["send"])),
}
SHORTEST_BAR = 0.004  # of a panel's width: a shorter one could not be seen


def front_ends(runs: Mapping[str, pd.DataFrame], schedule: Callable[[np.ndarray], np.ndarray]) -> Figure:
    """The learning rate and the mean loss of all ranks, by step, of runs that should do the same.

    Args:
        runs: by name, a run's metrics, with learning_rate and mean_loss.
        schedule: the learning rate that is asked for, from steps counted from 0.
    """
    figure, (left, right) = style.figure(11.0, 3.9, columns=2)
    last = max(int(table["step"].max()) for table in runs.values())
    steps = np.arange(last + 1)
    style.theory(left, steps + 1, schedule(steps), "asked for")
    sizes = np.linspace(11, 5, len(runs))  # one inside the other, since they cover each other
    looks = zip(FRONT_ENDS, sizes, style.MARKERS, strict=False)
    for (name, table), (colour, size, marker) in zip(runs.items(), looks, strict=False):
        look: dict[str, Any] = {"colour": colour, "marker": marker, "markersize": size}
        rates = table[table["rank"] == 0].dropna(subset=["learning_rate"])
        style.measured(left, *rates[["step", "learning_rate"]].to_numpy().T, **look)
        steps, losses = table.dropna(subset=["mean_loss"])[["step", "mean_loss"]].to_numpy().T
        style.measured(right, steps, losses, name, linestyle="solid", linewidth=1.0, **look)
    left.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    right.set(xlabel="step", ylabel="mean loss of all ranks (nats)", ylim=(0, None))
    style.headline(left, "The learning rate warms up to N times its size", "line: the rule; points: reported")
    style.headline(right, "All front ends take the same steps", "the last batch of each epoch")
    style.label_ends(left)
    right.legend(loc="upper right")
    return figure


def tuning(thresholds: Mapping[str, Repeats], cycles: Mapping[float, Repeats], tensors: int) -> Figure:
    """How long a step's gradients take, by fusion threshold and by cycle time.

    Args:
        thresholds: seconds of each repeat by threshold, as it was written.
        cycles: seconds of each repeat by cycle time in seconds.
        tensors: how many gradients there are.
    """
    _, (left, right) = style.figure(11.0, 3.9, columns=2)
    places = np.arange(len(thresholds))
    _repeats(left, places, list(thresholds.values()))
    left.set_xticks(places, ["off" if name == "0" else name for name in thresholds])
    left.set(xlabel="fusion threshold", yscale="log", xlim=(-0.5, len(thresholds) - 0.5))
    _repeats(right, list(cycles), list(cycles.values()))
    ends = np.array([min(cycles), max(cycles)])
    style.theory(right, ends, ends, "one cycle")
    right.set(xlabel="cycle time", xscale="log", yscale="log")
    style.unit_axis(right.xaxis, "s")
    right.set_xticks(list(cycles))
    for axes in (left, right):
        axes.set_ylabel("time until all gradients are back")
        style.log_ticks(axes.yaxis)
        style.unit_axis(axes.yaxis, "s")
        axes.minorticks_off()
    detail = f"{tensors} gradients; faint: each repeat; bold: lower quartile"
    style.headline(left, "One large message beats many small ones", detail)
    detail = "the same gradients, with the largest buffer"
    return style.finish(right, "A long cycle makes everybody wait", detail)


def _repeats(axes: Axes, x: Sequence[float] | np.ndarray, samples: Sequence[Repeats]) -> None:
    look: dict[str, Any] = {"color": style.colour_of("horovod"), "alpha": 0.25, "markeredgewidth": 0}
    for place, seconds in zip(x, samples, strict=True):
        axes.plot(np.full(len(seconds), place), seconds, "o", markersize=4, **look)
    # Other work on the machine only ever adds, so the faster repeats say more of Horovod.
    quartiles = [float(np.percentile(seconds, 25)) for seconds in samples]
    style.measured(axes, x, quartiles, colour="horovod", markersize=9)


def gradient_timelines(recorded: Mapping[str, Sequence[TimelineSpan]]) -> Figure:
    """What became of each gradient of one step, as rank 0 recorded it; a panel for each run, with its own scale.

    Of each run the fastest step is shown, the one that other work on the machine disturbed least.
    """
    shown = {name: _fastest(horovod_timeline.steps(spans)) for name, spans in recorded.items()}
    tensors = max(len({span.tensor for span in spans}) for spans in shown.values())
    messages = {name: len(horovod_timeline.messages(spans)) for name, spans in shown.items()}
    counts = {name: f"{count} message{'s' * (count > 1)}" for name, count in messages.items()}
    titles = [f"{name}: {count} for {tensors} gradients" for name, count in counts.items()]
    figure, grid = style.panels(titles, 9.6, 1.0 + len(shown) * (0.75 + 0.16 * tensors), below=True)
    for axes, spans in zip(grid, shown.values(), strict=True):
        _gradients(axes, spans)
    grid[-1].set_xlabel("milliseconds since the first gradient was handed over (mind the scales)")
    _legend(figure, dict(PHASES.values()))
    order = "in the order in which the backward pass gives them"
    detail = f"a row: a gradient, {order}; the fastest step of each run"
    finding = "Packed together, gradients travel at once; alone, one after the other"
    return style.finish(figure, finding, detail)


def _legend(figure: Figure, colours: Mapping[str, str]) -> None:
    handles = [Patch(color=style.colour_of(colour), label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), fontsize=9)


def _fastest(steps: Sequence[list[TimelineSpan]]) -> list[TimelineSpan]:
    if not steps:
        raise ValueError("the timeline holds no step; was anything recorded?")
    return min(steps, key=lambda spans: max(span.end for span in spans) - spans[0].start)


def _gradients(axes: Axes, spans: Sequence[TimelineSpan]) -> None:
    rows = {tensor: number for number, tensor in enumerate(dict.fromkeys(span.tensor for span in spans))}
    first = spans[0].start
    shortest = SHORTEST_BAR * (max(span.end for span in spans) - first) * 1e3
    for span in spans:
        if span.activity in PHASES:
            length = max(span.seconds * 1e3, shortest)
            colour = PHASES[span.activity][1]
            axes.barh(rows[span.tensor], length, 0.72, (span.start - first) * 1e3, color=colour)
    names = [tensor.removeprefix("allreduce.") for tensor in rows]
    style.rows(axes, names, (len(rows) - 0.4, -0.6))
    axes.tick_params(axis="y", labelsize=8)


def adasum(table: pd.DataFrame, rule: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Figure:
    """Two gradients at several angles, and what becomes of them: `rule` as arrows, Horovod's results as points.

    Args:
        table: a row an angle, with angle, adasum_x, adasum_y, mean_x and mean_y, from two ranks.
        rule: the combination of two vectors that Horovod's is held against.
    """
    titles = [f"{angle:g}°" for angle in table["angle"]]
    figure, grid = style.panels(titles, 2.35 * len(table), 2.9, sharey=True)
    for axes, row in zip(grid, table.to_dict("records"), strict=True):
        angle = np.radians(row["angle"])
        first, second = np.array([1.0, 0.0]), np.array([np.cos(angle), np.sin(angle)])
        # Each thinner than those before it, so that arrows in one direction are all seen.
        _arrow(axes, rule(first, second), style.colour_of("horovod"), 4.5)
        _arrow(axes, first, style.colour_of("worker 0"), 3.0)
        _arrow(axes, second, style.colour_of("worker 1"), 2.0)
        _arrow(axes, (first + second) / 2, style.colour_of("theory"), 1.0)
        for name, colour, marker, size in (("mean", "theory", "o", 6), ("adasum", "horovod", "D", 7)):
            x, y, hue = row[f"{name}_x"], row[f"{name}_y"], style.colour_of(colour)
            axes.plot(x, y, marker, color=hue, markersize=size, zorder=4)
        axes.set(xlim=(-1.15, 1.35), ylim=(-0.35, 1.25), aspect="equal")
        axes.tick_params(labelsize=8)
    names = ("gradient of rank 0", "of rank 1", "their mean", "Adasum")
    _legend(figure, dict(zip(names, ("worker 0", "worker 1", "theory", "horovod"), strict=True)))
    detail = "arrows: the rule; points: what Horovod gave"
    return style.finish(figure, "The same direction: their mean. At right angles: their sum.", detail)


def _arrow(axes: Axes, vector: np.ndarray, colour: str, width: float) -> None:
    if float(np.hypot(*vector)) > 1e-6:
        shape = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tuple(vector), (0, 0), arrowprops=shape)


def elastic(metrics: pd.DataFrame, killed_seconds: float, joined_seconds: float | None) -> Figure:
    """The loss of every worker by the clock, and how many workers there were.

    Args:
        metrics: a run's metrics, with seconds, worker, loss and world_size.
        killed_seconds: when a worker was killed, on the same clock.
        joined_seconds: when another said that it had started; None if none did.
    """
    reports = metrics.dropna(subset=["loss"]).sort_values("seconds")
    _, (upper, lower) = style.figure(9.6, 4.9, rows=2, sharex=True, height_ratios=[3, 1])
    for worker, table in reports.groupby("worker"):
        seconds, loss = table["seconds"].to_numpy(), table["loss"].to_numpy()
        style.measured(upper, seconds, loss, str(worker), colour=str(worker), markersize=5)
    upper.set(ylabel="loss of a worker's batch (nats)", ylim=(0, None))
    sizes = reports[["seconds", "world_size"]]
    lower.plot(sizes["seconds"], sizes["world_size"], color=style.INK, drawstyle="steps-post")
    most = int(sizes["world_size"].max())
    lower.set(xlabel="seconds since the launch", yticks=range(most + 1))
    lower.set(ylabel="workers", ylim=(0, most + 0.6))
    for words, moment in (("a worker is killed", killed_seconds), ("another has started", joined_seconds)):
        if moment is not None:
            style.mark(upper, moment, words, linewidth=1.2)
            style.mark(lower, moment, linewidth=1.2)
    return style.finish(upper, "The loss goes on where it was", "points: reports of each worker")
