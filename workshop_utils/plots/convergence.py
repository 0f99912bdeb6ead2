"""Figures of lesson 09: what batch, learning rate, silence and old gradients do to convergence.

In all of them a point is the mean of several seeds and the bar through it goes from the best to the worst of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, takewhile
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop_utils.plots import style
from workshop_utils.scaling.convergence import CriticalBatch, stable_learning_rate, staleness_at_most

WIDTHS = (7.0, 2.0, 4.0, 1.5)  # so that curves that lie on each other can be told apart
GIVEN_UP = 2.3  # nats, ln 10: what a guess among ten digits costs; a loss above it is drawn here


def curves(runs: Mapping[str, pd.DataFrame], finding: str, detail: str) -> Figure:
    """The mean loss of each run's seeds against epochs: columns epoch, seed and loss."""
    _, axes = style.figure(8.2, 3.9)
    looks = cycle(zip(style.MUTED, WIDTHS, strict=True))
    for (name, table), (hue, width) in zip(runs.items(), looks, strict=False):
        mean = table.groupby("epoch")["loss"].mean()
        style.theory(axes, mean.index.to_numpy(), mean.to_numpy(), name, colour=hue, linewidth=width)
    axes.set(xlabel="epochs", ylabel="loss on the training images (nats)", ylim=(0, None))
    return style.finish(axes, finding, detail)


def against_batch(table: pd.DataFrame) -> Figure:
    """Final loss after equally many epochs against the batch, for each rule: columns rule, batch, loss."""
    _, axes = style.figure(8.2, 4.1)
    for index, (rule, rows) in enumerate(table.groupby("rule", sort=False)):
        _spread(axes, rows, "batch", "loss", str(rule), index)
    batches = sorted(table["batch"].unique())
    style.power_axis(axes, batches)
    axes.set(xlabel="images in a batch, all workers together", ylabel="final loss (nats)", ylim=(0, 2.6))
    linear = table[table["rule"].str.startswith("linear")].groupby("batch")["loss"].max()
    good = list(takewhile(lambda batch: linear[batch] < 1.5 * linear[batches[0]], batches))
    finding = f"Linear scaling holds up to a batch of {good[-1] if good else batches[0]}"
    detail = f"equally many epochs, so fewer steps with larger batches; {_seeds(table)}"
    return style.finish(axes, finding, detail)


def warm_up_losses(table: pd.DataFrame) -> Figure:
    """Final losses without and with a warm-up, for each kind of start: columns start, warmup (steps), loss."""
    starts = list(dict.fromkeys(table["start"]))
    figure, grid = style.panels(starts, 8.2, 3.7, sharey=True)
    for axes, start in zip(grid, starts, strict=True):
        rows = table[table["start"] == start]
        lengths = sorted(rows["warmup"].unique())
        for x, length in enumerate(lengths):
            losses = _drawable(rows.loc[rows["warmup"] == length, "loss"])
            spots = x + np.linspace(-0.12, 0.12, len(losses))
            style.measured(axes, spots, losses, colour=style.MUTED[0], alpha=0.75)
            axes.hlines(losses.mean(), x - 0.25, x + 0.25, color=style.INK, linewidth=2)
        axes.set_xticks(range(len(lengths)), ["none" if not n else f"{n} steps" for n in lengths])
        axes.set(xlabel="warm-up", xlim=(-0.6, len(lengths) - 0.4))
    grid[0].set(ylabel="final loss (nats)", ylim=(0, 2.5))
    finding = "What a warm-up does depends on the start"
    return style.finish(figure, finding, "a point: one seed; a line: their mean; same steps in all")


def critical(steps: Mapping[int, Sequence[float]], rates: Mapping[int, float], law: CriticalBatch) -> Figure:
    """Steps to the target (for each seed) and best learning rate, for each batch; `law` as lines."""
    figure, (left, right) = style.figure(9.6, 4.2, columns=2)
    batches = sorted(steps)
    fine = np.geomspace(batches[0], batches[-1], 100)
    table = pd.Series(steps, name="steps").explode().astype(float).rename_axis("batch").reset_index()
    style.theory(left, fine, np.asarray(law.steps(fine)))
    ideal = law.minimum_steps * law.critical_batch / fine
    style.theory(left, fine, ideal, colour="ideal", linestyle=(0, (1.5, 1.5)))
    _spread(left, table, "batch", "steps", "", 0)
    highest = 1.6 * table["steps"].max()
    left.set(yscale="log", ylabel="steps to the target loss", ylim=(law.minimum_steps / 2.5, highest))
    beside = law.critical_batch / 2
    quiet: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 9, "color": style.QUIET}
    style.note(left, "twice the batch,\nhalf the steps", (beside, 2 * law.minimum_steps), (-6, -8), **quiet)
    style.mark(left, law.critical_batch, f"critical batch {law.critical_batch:.0f}", linewidth=1.2)
    largest = max(rates.values())
    style.theory(right, fine, np.asarray(law.learning_rate(fine, largest)))
    style.measured(right, batches, [rates[batch] for batch in batches], colour=style.MUTED[1], marker="s")
    right.set(yscale="log", ylabel="best learning rate of those tried")
    style.plain_ticks(left.yaxis, [10 * 2**power for power in range(8) if 10 * 2**power < highest])
    style.plain_ticks(right.yaxis, sorted(set(rates.values())))
    for axes in (left, right):
        style.power_axis(axes, batches)
        axes.set_xlabel("images in a batch")
    finding = f"Beyond a batch of about {law.critical_batch:.0f}, more workers save few steps"
    detail = "points: measured; solid: one law fitted to the left, its learning rate on the right"
    return style.finish(figure, finding, detail)


def local_sgd(table: pd.DataFrame) -> Figure:
    """Final loss against steps between meetings: columns shards, optimizer, local_steps, loss."""
    named = table.assign(shards=table["shards"] + " shards")
    figure, grid = _panels(named, "shards", "optimizer", "local_steps", "loss")
    for axes in grid:
        axes.set_xlabel("local steps between two meetings")
    grid[0].set(ylabel="final loss (nats)", ylim=(0, None))  # once all is drawn on both
    most = int(table["local_steps"].max())
    finding = f"Meeting in one step of {most}: cheap if all see the same kind of data"
    return style.finish(figure, finding, f"final loss after equally many steps; {_seeds(table)}")


def staleness_against_bound(table: pd.DataFrame, workers: int) -> Figure:
    """Measured staleness against the bound: columns bound, mean, most; the largest possible one as a line."""
    _, axes = style.figure(7.4, 3.8)
    bounds = table["bound"].to_numpy(int)
    style.theory(axes, bounds, [staleness_at_most(workers, int(b)) for b in bounds], "cannot be more")
    style.measured(axes, bounds, table["most"].to_numpy(), "most", colour=style.MUTED[1], marker="s")
    style.measured(axes, bounds, table["mean"].to_numpy(), "mean", colour=style.MUTED[0])
    axes.set(xlabel="bound (steps that a worker may be ahead)", xticks=bounds)
    axes.set(ylabel="staleness (updates)", ylim=(0, None))
    detail = f"{workers} workers, one of them slow; counted by the server"
    return style.finish(axes, f"No gradient is staler than ({workers} − 1)(2 · bound + 1)", detail)


def stale_rates(table: pd.DataFrame, stable: pd.DataFrame) -> Figure:
    """Loss against the learning rate for each staleness, and the largest learning rate that still trains.

    Args:
        table: columns workers, learning_rate, loss (one row a seed).
        stable: columns staleness and learning_rate, the largest that trained, a row for each number of workers.
    """
    figure, (left, right) = style.figure(10.0, 4.1, columns=2)
    for index, workers in enumerate(sorted(table["workers"].unique())):
        rows = table[table["workers"] == workers]
        _spread(left, rows, "learning_rate", "loss", f"{workers} worker{'s' if workers > 1 else ''}", index)
    rates = sorted(table["learning_rate"].unique())
    left.set_xscale("log")
    style.plain_ticks(left.xaxis, rates[::2])
    left.set(xlabel="learning rate", ylabel="final loss (nats)", ylim=(0, 2.6))
    fine = np.linspace(0, 1.15 * max(stable["staleness"]), 100)
    fresh = float(stable.sort_values("staleness")["learning_rate"].iloc[0])
    style.theory(right, fine, [fresh * stable_learning_rate(delay) for delay in fine])
    delays, rates_of_all = stable[["staleness", "learning_rate"]].to_numpy().T
    style.measured(right, delays, rates_of_all, colour=style.MUTED[1], marker="s")
    right.set(yscale="log", xlabel="mean staleness (updates)", ylabel="largest learning rate that trains")
    style.plain_ticks(right.yaxis, rates[::2])
    right.set_ylim(rates[0] / 1.5, rates[-1] * 1.5)
    line = "line: theory from the fresh one on, sin(π / (4τ + 2))"
    detail = f"squares: the largest that trained all seeds; {line}"
    return style.finish(figure, "The older the gradients, the smaller the step must be", detail)


def batch_norm(table: pd.DataFrame) -> Figure:
    """Accuracy against each worker's part of the batch: columns cut, statistics, part, accuracy."""
    figure, grid = _panels(table, "cut", "statistics", "part", "accuracy")
    for axes in grid:
        axes.set_xlabel("images of each worker in a step")
        style.percent_axis(axes.yaxis)
    grid[0].set_ylabel("accuracy on the test images")
    detail = f"bars: from the worst to the best of all workers and seeds; {_seeds(table)}"
    return style.finish(figure, "Batch normalisation is the layer that notices how the batch is cut", detail)


def _panels(table: pd.DataFrame, panel: str, line: str, x: str, y: str) -> tuple[Figure, list[Axes]]:
    """A panel for each value of `panel`, in it a line for each value of `line`."""
    panels = table.groupby(panel, sort=False)
    figure, grid = style.panels([str(name) for name, _ in panels], 9.6, 4.0, sharey=True)
    for axes, (_, rows) in zip(grid, panels, strict=True):
        for index, (name, own) in enumerate(rows.groupby(line, sort=False)):
            _spread(axes, own, x, y, str(name), index)
        style.power_axis(axes, sorted(rows[x].unique()))
    return figure, grid


def _spread(axes: Axes, rows: pd.DataFrame, x: str, y: str, label: str, index: int) -> None:
    """Means as points, joined by a thin line if they have a label, and bars from the least to the most."""
    drawn = rows.assign(drawn=_drawable(rows[y]) if y == "loss" else rows[y])
    table = drawn.groupby(x)["drawn"].agg(["mean", "min", "max"])
    positions, mean, hue = table.index.to_numpy(float), table["mean"].to_numpy(), style.MUTED[index % 4]
    axes.vlines(positions, table["min"], table["max"], color=hue, linewidth=1.4, alpha=0.55)
    if label:
        style.theory(axes, positions, mean, label, colour=hue, linewidth=1, linestyle=style.DASHES[index % 4])
    style.measured(axes, positions, mean, colour=hue, marker=style.MARKERS[index % 8])


def _drawable(losses: pd.Series) -> np.ndarray:
    """Losses as they can be drawn: what has diverged lies at that of a guess."""
    return np.minimum(losses.fillna(GIVEN_UP).to_numpy(float), GIVEN_UP)


def _seeds(table: pd.DataFrame) -> str:
    return f"{table['seed'].nunique()} seeds"
