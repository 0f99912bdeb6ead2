"""Figures of data and model parallelism: what is sent, and that the loss stays the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.plots import style
from workshop_utils.training import models

SMOOTHED = 10  # updates of a running mean
NOTHING = 1e-17  # where a difference of zero is drawn on a logarithmic axis


def bytes_per_step(network: models.MLP, workers: int, counted: Mapping[int, float]) -> Figure:
    """What a worker sends per step in both schemes, by batch, and the batch at which they meet, by width.

    `counted` holds the bytes that were counted in model parallel steps, by batch size.

    Raises:
        ValueError: if there is one worker only, for it sends nothing.
    """
    if workers < 2:
        raise ValueError(f"workers is {workers}; one worker sends nothing, there must be at least 2")
    figure, (by_batch, by_width) = style.figure(10.4, 4.4, columns=2)
    batches = np.geomspace(min(counted) / 1.5, max(counted) * 1.5, 50)
    crossover = models.crossover_batch(network)
    sent = ring_bytes_sent(workers, network.nbytes)
    data: dict[str, Any] = {"colour": "data parallel", "linestyle": style.DASHES[1]}
    style.theory(by_batch, batches, np.full(len(batches), sent), "data parallel", **data)
    activations = batches * models.model_parallel_bytes(network, workers, 1)
    style.theory(by_batch, batches, activations, "model parallel", colour="model parallel")
    style.measured(by_batch, list(counted), list(counted.values()), colour="model parallel")
    by_batch.set(yscale="log", ylabel=f"sent per worker and step, N = {workers}", xlabel="batch (images)")
    style.power_axis(by_batch, list(counted))
    style.unit_axis(by_batch.yaxis, "B")
    line = {"arrowstyle": "-", "color": style.QUIET, "shrinkB": 3}
    place = (crossover, sent)
    style.note(by_batch, f"equal at a batch of {crossover:.0f}", place, (10, -26), arrowprops=line)
    detail = "lines: formulas, points: counted while training"
    style.headline(by_batch, "Only activations grow with the batch", detail)
    style.label_ends(by_batch)
    _crossover_by_width(by_width, network)
    return figure


def _crossover_by_width(axes: Axes, network: models.MLP) -> None:
    inputs, width, classes = *network.hidden.weights.shape, network.output.weights.shape[1]
    widths = np.geomspace(16, 4096, 60)
    fixed = [_crossover(inputs, each, classes) for each in widths]
    square = [_crossover(each, each, classes) for each in widths]
    style.theory(axes, widths, fixed, f"{inputs} inputs", colour="one process", linestyle=(0, (5, 2)))
    style.theory(axes, widths, square, "as many inputs\nas hidden units", colour="one process")
    style.measured(axes, [width], [models.crossover_batch(network)], colour="one process", markersize=8)
    axes.set(yscale="log", ylabel="batch at which both send the same", ylim=(12, 9000))
    axes.set_xlabel("hidden units")
    style.power_axis(axes, [16, 64, 256, 1024, 4096])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    label: dict[str, Any] = {"transform": axes.transAxes, "fontsize": 9.5}
    axes.text(0.05, 0.93, "data parallelism sends less", **label, color=style.colour_of("data parallel"))
    axes.text(0.44, 0.05, "model parallelism sends less", **label, color=style.colour_of("model parallel"))
    detail = "large dot: the network of this lesson"
    style.headline(axes, "The wider all layers, the larger that batch", detail)
    style.label_ends(axes)


def _crossover(inputs: float, width: float, classes: int) -> float:
    """`models.crossover_batch` for any sizes, without the weights."""
    return 2 * (inputs * width + width + width * classes + classes) / (2 * width + classes)


def losses_agree(reference: npt.ArrayLike, runs: Mapping[str, npt.ArrayLike]) -> Figure:
    """The loss by step of one process and of each of `runs`, and how far they lie apart.

    Names that begin with "data parallel" get its colour, all others that of model parallelism.
    """
    expected = np.asarray(reference)
    steps = np.arange(1, len(expected) + 1)
    _, (curves, gaps) = style.figure(10.4, 4.2, columns=2)
    style.theory(curves, steps, expected, colour="one process")
    early = min(2, len(steps) - 1)
    style.note(curves, "line: one process", (steps[early], expected[early]), (14, 6), fontsize=10)
    jitter = np.random.default_rng(0)
    for index, (name, losses) in enumerate(runs.items()):
        colour = "data parallel" if name.startswith("data parallel") else "model parallel"
        marker, values = style.MARKERS[index % len(style.MARKERS)], np.asarray(losses)
        every = slice(index, None, len(runs))  # taken in turn, so that no run hides another
        style.measured(curves, steps[every], values[every], colour=colour, marker=marker)
        # A difference of nothing has no place on a logarithmic axis; it is drawn at its left end.
        difference = np.maximum(np.abs(values - expected), NOTHING)
        row = -index + jitter.uniform(-0.22, 0.22, len(difference))
        style.measured(gaps, difference, row, colour=colour, marker=marker, markersize=4.5, alpha=0.8)
    curves.set(xlabel="step", ylabel="loss of the whole batch (nats)", ylim=(0, None))
    detail = "points: real processes, each every few steps"
    style.headline(curves, "One curve, however the work is split", detail)
    largest = max(float(np.abs(np.asarray(losses) - expected).max()) for losses in runs.values())
    gaps.set(xscale="log", xlabel="difference from one process (nats)")
    gaps.set_xlim(NOTHING / 2, max(1e-11, 10 * largest))
    gaps.set_xticks([NOTHING, 1e-15, 1e-13, 1e-11], ["none", "10⁻¹⁵", "10⁻¹³", "10⁻¹¹"])
    gaps.minorticks_off()
    gaps.set_yticks(-np.arange(len(runs)), list(runs))
    gaps.set_ylim(-len(runs) + 0.4, 1.0)
    rounding = float(np.finfo(float).eps)
    gaps.axvline(rounding, color=style.colour_of("theory"), linewidth=1.2, linestyle=(0, (5, 2)))
    gaps.text(rounding * 1.5, 0.68, "one rounding in float64", fontsize=9, color=style.QUIET, va="center")
    finding = f"They differ by {_scientific(largest)} at most"
    return style.finish(gaps, finding, "a point a step; sums in another order")


def _scientific(value: float) -> str:
    """1.3e-15 as 1.3 · 10⁻¹⁵."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa} · 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def asynchronous_losses(reference: npt.ArrayLike, runs: Mapping[str, npt.ArrayLike]) -> Figure:
    """The loss of one process and of asynchronous `runs` by update, each as a running mean."""
    _, axes = style.figure(7.8, 4.2)
    for index, (name, losses) in enumerate([("one process", reference), *runs.items()]):
        means = pd.Series(losses).rolling(SMOOTHED).mean().dropna()
        updates = means.index.to_numpy() + 1
        colour = "one process" if index == 0 else style.tint("#96700F", 0.4 + 0.6 * index / len(runs))
        dashes = style.DASHES[index % len(style.DASHES)]
        style.theory(axes, updates, means.to_numpy(), name, colour=colour, linestyle=dashes, linewidth=2)
    axes.set(ylabel=f"loss (nats), mean of {SMOOTHED} updates", ylim=(0, None))
    axes.set_xlabel("update of the parameters")
    finding = "Without waiting, the order of arrival decides the result"
    return style.finish(axes, finding, "Downpour SGD, simulated; same data, same start")
