"""Lesson 00: the first runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style
from workshop_utils.runs import Run


def training_curves(metrics: pd.DataFrame) -> Figure:
    """Each worker's loss against its steps, from a run's metrics, and the test accuracy of their one model."""
    figure, (upper, lower) = style.figure(7.2, 4.8, rows=2, sharex=True, height_ratios=(2, 1))
    reported = metrics.dropna(subset=["loss"])
    for index, (name, rows) in enumerate(reported.groupby("worker", sort=True)):
        upper.plot(rows["step"], rows["loss"], color=style.colour_of(str(name)), label=str(name),
                   linestyle=style.DASHES[index % len(style.DASHES)])  # fmt: skip
    upper.set_ylabel("loss, in nats")
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    tested = metrics.dropna(subset=["accuracy"]).groupby("step")["accuracy"].mean()
    look: dict[str, Any] = {"colour": "one process", "linestyle": "solid", "linewidth": 1.0}
    style.measured(lower, [*tested.index], tested.to_numpy(), **look)
    lower.set(xlabel="step", ylabel="test accuracy")
    lower.margins(y=0.15)
    style.percent_axis(lower.yaxis)
    workers = reported["worker"].nunique()
    finding = f"{workers} workers, {workers} losses, one model"
    if workers == 1:
        finding = "One worker, one loss, one model"
    detail = "each loss is that of a worker's own examples; they learn the same weights"
    style.headline(upper, finding, detail)
    style.label_ends(upper)
    last_step, last = tested.index[-1], tested.iloc[-1]
    style.note(lower, f"{100 * last:.1f} %", (last_step, last), (8, 0), va="center", annotation_clip=False)
    return figure


def starts(runs: dict[str, Run]) -> Figure:
    """When each worker of each finished run had its framework, its first step and its last, in seconds from the launch.

    `runs` are the runs by what the figure is to call them.
    """
    figure, axes = style.figure(7.6, 0.55 * sum(len(run.workers) for run in runs.values()) + 1.5)
    position, rows = 0.0, []
    for name, run in runs.items():
        began = {start["worker"]: start["time"] - run.launched_at for start in run.starts}
        steps = run.metrics.groupby("worker")["seconds"].agg(["min", "max"])
        for worker in steps.index:
            edges = [0.0, began[worker], steps.loc[worker, "min"], steps.loc[worker, "max"]]
            for kind, (left, right) in zip(("load", "wait", worker), pairwise(edges), strict=True):
                axes.barh(position, right - left, left=left, height=0.62, color=style.colour_of(kind))
            rows.append((position, f"{name}\n{worker}", edges))
            position += 1
        position += 0.4
    style.rows(axes, [row[1] for row in rows], places=[row[0] for row in rows])
    axes.tick_params(axis="y", labelcolor=style.INK)
    axes.set_xlabel("seconds since the launch")
    first_steps = [float(run.metrics["seconds"].min()) for run in runs.values()]
    sooner = f"the first step comes {first_steps[0] / first_steps[-1]:.0f} times sooner"
    detail = "what each process does after the launch"
    style.headline(axes, f"{[*runs][-1].capitalize()}, {sooner}", detail)
    names = {"load": "import PyTorch", "wait": "import more, meet", "worker 0": "train"}
    for (kind, name), (left, right) in zip(names.items(), pairwise(rows[0][2]), strict=True):
        style.inside(axes, (left + right) / 2, 0, name, kind)
    return figure
