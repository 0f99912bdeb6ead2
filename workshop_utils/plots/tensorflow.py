"""Lesson 06: how TensorFlow's forms of data parallelism train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from workshop_utils.plots import style

# Each form has one colour throughout; those that a strategy of jobs stands for have that strategy's.
FORMS = {
    "in-graph": "#332288",
    "between-graph, synchronous": "#44AA99",
    "MirroredStrategy": "#AA4499",
    "MultiWorkerMirroredStrategy": style.COLOURS["multi_worker_mirrored"],
    "between-graph, asynchronous": "#CC6677",
    "ParameterServerStrategy": style.COLOURS["parameter_server"],
}
SAME = 1e-3  # nats; curves that are never further apart than this are drawn and named as one


def learning_curve(metrics: pd.DataFrame) -> pd.DataFrame:
    """A run's test loss over time: columns step (updates of the variables), seconds and test_loss.

    Seconds count from the moment at which every worker had made its first step: before that, graphs are traced and
    sent around. The loss before training stands at 0 seconds.

    Raises:
        ValueError: if the run has reported no test_loss, or no loss.
    """
    for name in ("loss", "test_loss"):
        if name not in metrics or metrics[name].isna().all():
            raise ValueError(f"the metrics hold no {name}")
    first = metrics.dropna(subset=["loss"]).groupby("worker")["seconds"].min().max()
    tested = metrics.dropna(subset=["test_loss"])
    seconds = (tested["seconds"] - first).clip(lower=0)
    return tested.assign(seconds=seconds)[["step", "seconds", "test_loss"]].reset_index(drop=True)


def equal_forms(curves: Mapping[str, pd.DataFrame]) -> list[str]:
    """The names of those `curves` whose losses agree with the first one's at every step, to within SAME."""
    first = next(iter(curves.values()))
    return [
        name
        for name, curve in curves.items()
        if list(curve["step"]) == list(first["step"])
        and (curve["test_loss"] - first["test_loss"]).abs().max() < SAME
    ]


def test_losses(curves: Mapping[str, pd.DataFrame], longer: pd.DataFrame) -> Figure:
    """Test loss against steps and against seconds, of forms named as in FORMS; each curve is a `learning_curve`.

    `longer` is that of in-graph replication with as many updates as the asynchronous forms make.
    """
    figure, (by_step, by_time) = style.figure(11.2, 4.4, columns=2, sharey=True)
    together = equal_forms(curves)
    _curve(by_step, longer, "step", "in-graph", linestyle="dashed", zorder=1)
    for name, curve in curves.items():
        # Equal curves lie on each other: larger marks below smaller ones.
        below = len(together) - 1 - together.index(name) if name in together else 0
        _curve(by_step, curve, "step", name, marker="o", markersize=5 + 3.2 * below)
    end = tuple(curves[together[0]][["step", "test_loss"]].iloc[-1])
    words = f"{len(together)} synchronous\nforms"
    style.note(by_step, words, end, (0, -13), ha="right", va="top", linespacing=1.2)
    for name in sorted(curves, key=lambda name: float(curves[name]["seconds"].iloc[-1])):
        marker = style.MARKERS[list(FORMS).index(name)]
        label = f"{name}, {curves[name]['seconds'].iloc[-1]:.1f} s"
        trained = curves[name].query("seconds > 0")  # what came before has no place on a logarithmic axis
        _curve(by_time, trained, "seconds", name, marker=marker, markersize=4)
        _curve(by_time, trained.iloc[-1:], "seconds", name, marker=marker, markersize=9, label=label)
    lowest = min(float(curve["test_loss"].min()) for curve in (longer, *curves.values()))
    by_step.set(yscale="log", ylim=(0.55 * lowest, None), ylabel="test loss (nats)")
    by_step.set_xlabel("steps (updates of the variables)")
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
    style.plain_ticks(by_step.yaxis, [tick for tick in ticks if tick > 0.55 * lowest])
    by_time.set(xscale="log", xlabel="seconds since every worker's first step")
    style.log_ticks(by_time.xaxis)
    by_time.xaxis.set_major_formatter("{x:g}")
    by_time.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title="seconds until the last test")
    finding = f"The {len(together)} synchronous forms lie on one curve against steps, but not against seconds"
    rings = f"concentric rings: {len(together)} forms with equal losses"
    dashed = "dashed: in-graph, with as many updates as the asynchronous forms"
    detail = f"the same network, batches, rate and first weights; {rings}; {dashed}"
    return style.finish(figure, finding, detail)


def _curve(axes: Axes, curve: pd.DataFrame, x: str, name: str, **options: Any) -> None:
    axes.plot(
        curve[x], curve["test_loss"], color=FORMS[name], linewidth=1.6, markeredgecolor="white",
        markeredgewidth=0.8, **({"label": "_curve"} | options),
    )  # fmt: skip


def progress(runs: Mapping[str, pd.DataFrame], slow: str) -> Figure:
    """Each worker's steps over time, a panel a run; `slow` is the worker that is late, such as `worker-1`.

    `runs` are metrics by name: rows with a loss, and columns worker, step, seconds.
    """
    figure, grid = style.panels(runs, 9.6, 3.5, sharey=True, sharex=True)
    for axes, metrics in zip(grid, runs.values(), strict=True):
        reports = metrics.dropna(subset=["loss"])
        begin = reports["seconds"].min()
        for index, worker in enumerate(sorted(map(str, reports["worker"].unique()))):
            table = reports[reports["worker"] == worker]
            label = f"{worker}, slow" if worker == slow else worker
            # Where all are in step, the marks coincide: larger ones below, so that both are seen.
            axes.plot(
                table["seconds"] - begin, table["step"], label=label, color=style.colour_of(worker),
                marker=style.MARKERS[index % 8], markersize=9 - 4 * (index % 2), linewidth=1.4,
                markeredgecolor="white", markeredgewidth=0.7,
            )  # fmt: skip
        axes.set_xlabel("seconds since the first report")
        axes.margins(x=0.36)
        axes.set_xlim(left=0)
    grid[0].set_ylabel("the worker's own steps")
    finding = "One late worker holds up all, or itself alone"
    return style.finish(figure, finding, f"{slow} sleeps before each step")


def packs(seconds: Mapping[int, Sequence[float]], nbytes: int) -> Figure:
    """Time to all-reduce `nbytes` in so many messages: every measurement as a point, medians as bars."""
    _, axes = style.figure(7.2, 3.4)
    medians = [float(np.median(measured)) for measured in seconds.values()]
    axes.barh(range(len(medians)), medians, 0.62, color=style.tint("ring", 0.55))
    for row, (median, measured) in enumerate(zip(medians, seconds.values(), strict=True)):
        style.measured(axes, list(measured), [row] * len(measured), colour="ring")
        times = f" {median / min(medians):.1f}×"
        style.note(axes, times, (max(measured), row), (6, 0), va="center")
    shown = EngFormatter("B")
    style.rows(axes, [f"{count:,} × {shown(float(f'{nbytes / count:.3g}'))}" for count in seconds])
    axes.set(xlabel="time", xlim=(0, 1.12 * max(map(max, seconds.values()))))
    style.unit_axis(axes.xaxis, "s")
    detail = f"{shown(nbytes)} of gradients, cut into so many arrays; bars: medians, points: measurements"
    return style.finish(axes, "The same bytes cost more in more messages", detail)
