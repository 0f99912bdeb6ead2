"""Lesson 00: the whole idea in one picture, and the first runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop_utils import data
from workshop_utils.plots import drawing, style
from workshop_utils.runs import Run

# What the workshop does, from left to right: its name in the package, and what it is to the reader.
FLOW = (
    ("TrainingJob", "what to run"),
    ("Launcher", "where"),
    ("Run", "real processes"),
    ("Measurements", "what happened"),
    ("CostModel", "and with 1,000?"),
    ("plots", "what you see"),
)


def whole_idea(workers: int = 3) -> Figure:
    """Workers with shards of the data and copies of one model, whose gradients meet; below it, the workshop's flow."""
    figure, axes = drawing.canvas(10, 6.2)
    drawing.title(
        axes,
        "Many workers train one model: the data is shared out, the gradients meet",
        "Each worker has examples of its own and a copy of the model. After every step all copies are the same again.",
    )
    meeting = (5.0, 2.1)
    columns = [5 + 3.1 * (worker - (workers - 1) / 2) for worker in range(workers)]
    digits = data.arrays(data.prepare("digits"))
    for worker, x in enumerate(columns):
        mine = [
            np.flatnonzero(digits.train_labels == (4 * worker + digit) % 10)[worker] for digit in range(5)
        ]
        _shard(axes, (x, 5.0), digits.train_images[mine].reshape(-1, digits.height, digits.width))
        drawing.arrow(axes, (x, 4.76), (x, 4.46), colour=style.QUIET, width=1.2)
        _worker(axes, (x, 3.8), worker)
        _exchange(axes, x, meeting, worker)
    quiet: dict[str, Any] = {"colour": style.QUIET, "size": 9, "align": "left"}
    drawing.text(axes, (columns[-1] + 1.12, 5.0), "its\nexamples", **quiet)
    drawing.text(axes, (columns[-1] + 1.12, 3.8), "the\nmodel", **quiet)
    drawing.text(axes, (columns[0] - 0.12, 2.62), "its gradient", **quiet | {"align": "center"})
    drawing.text(axes, (columns[-1] + 0.12, 2.62), "one update", **quiet | {"align": "center"})
    drawing.box(axes, (meeting[0] - 1.15, meeting[1] - 0.24), 2.3, 0.48, "average of the gradients", colour="send",
                filled=False)  # fmt: skip
    _flow(axes)
    return figure


def _shard(axes: Axes, centre: drawing.Point, images: np.ndarray) -> None:
    side, gap = 0.36, 0.05
    left = centre[0] - (len(images) * (side + gap) - gap) / 2
    for index, image in enumerate(images):
        x = left + index * (side + gap)
        extent = (x, x + side, centre[1] - side / 2, centre[1] + side / 2)
        axes.imshow(image, cmap="Greys", extent=extent, aspect="auto", zorder=3)


def _worker(axes: Axes, centre: drawing.Point, worker: int) -> None:
    width, height = 2.0, 1.3
    corner = (centre[0] - width / 2, centre[1] - height / 2)
    drawing.box(axes, corner, width, height, colour=f"worker {worker}", filled=False)
    drawing.text(axes, (centre[0], corner[1] + height - 0.17), f"worker {worker}",
                 weight="bold")  # fmt: skip
    layers = [
        [(centre[0] + x, centre[1] - 0.12 + 0.26 * (unit - (units - 1) / 2)) for unit in range(units)]
        for x, units in ((-0.6, 3), (0.0, 4), (0.6, 2))
    ]
    for before, after in pairwise(layers):
        for start in before:
            for end in after:
                axes.plot(*zip(start, end, strict=True), color=style.QUIET, linewidth=0.5, zorder=2)
    for point in (point for layer in layers for point in layer):
        drawing.unit(axes, point, 0.09, colour="compute")


def _exchange(axes: Axes, x: float, meeting: drawing.Point, worker: int) -> None:
    """The gradient on its way to the others, and the average on its way back."""
    side = np.sign(x - meeting[0])
    target = (meeting[0] + side * 0.85, meeting[1] + 0.27)
    bottom = 3.12
    drawing.arrow(
        axes, (x - 0.16, bottom), (target[0] - 0.13, target[1]), colour=f"worker {worker}", width=2.0
    )
    drawing.arrow(
        axes, (target[0] + 0.13, target[1]), (x + 0.16, bottom), colour=style.QUIET, width=1.3, dashed=True
    )


def _flow(axes: Axes) -> None:
    axes.plot([0.2, 9.8], [1.52, 1.52], color=style.FAINT, linewidth=1.0)
    drawing.text(axes, (0.2, 1.3), "How this workshop shows it", weight="bold", align="left")
    width, gap = 1.36, 0.288
    for index, (name, meaning) in enumerate(FLOW):
        left = 0.2 + index * (width + gap)
        drawing.box(axes, (left, 0.58), width, 0.44, name, colour="compute", weight="bold", size=9)
        drawing.text(axes, (left + width / 2, 0.36), meaning, size=8.5, colour=style.QUIET)
        if index:
            drawing.arrow(axes, (left - gap, 0.8), (left, 0.8), colour="compute", width=1.2)


def losses(metrics: pd.DataFrame) -> Figure:
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
    style.measured(
        lower, [*tested.index], tested.to_numpy(), colour="one process", linestyle="solid", linewidth=1.0
    )
    lower.set(xlabel="step", ylabel="test accuracy")
    lower.margins(y=0.15)
    style.percent_axis(lower.yaxis)
    workers = reported["worker"].nunique()
    style.headline(
        upper,
        f"{workers} workers, {workers} losses, one model"
        if workers > 1
        else "One worker, one loss, one model",
        "each loss is that of a worker's own examples; they learn the same weights",
    )
    style.label_ends(upper)
    last_step, last = tested.index[-1], tested.iloc[-1]
    lower.annotate(
        f"{100 * last:.1f} %",
        (last_step, last),
        (8, 0),
        textcoords="offset points",
        va="center",
        fontsize=9.5,
        annotation_clip=False,
    )
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
    axes.set_yticks([row[0] for row in rows], [row[1] for row in rows], color=style.INK)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds since the launch")
    first_steps = [float(run.metrics["seconds"].min()) for run in runs.values()]
    style.headline(
        axes,
        f"{[*runs][-1].capitalize()}, the first step comes {first_steps[0] / first_steps[-1]:.0f} times sooner",
        "what each process does after the launch",
    )
    first = rows[0][2]
    for kind, name, (left, right) in zip(
        ("load", "wait", "worker 0"),
        ("import PyTorch", "set up, meet", "train"),
        pairwise(first),
        strict=True,
    ):
        axes.text((left + right) / 2, rows[0][0], name, ha="center", va="center", fontsize=9,
                  color=style.ink_on(kind))  # fmt: skip
    return figure


DRAWINGS = {"00_whole_idea.svg": whole_idea}
