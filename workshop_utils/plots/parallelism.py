"""Figures of data and model parallelism: what is cut, what is sent, when workers wait, and that nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop_utils import models
from workshop_utils.plots import drawing, style
from workshop_utils.plots.drawing import Point

CROSSING = "send"  # what leaves a worker is drawn in this colour everywhere
NOTHING = 1e-17  # where a difference of zero is drawn on a logarithmic axis


def two_ways_to_split() -> Figure:
    """Data parallelism cuts the batch, model parallelism the network."""
    figure, axes = drawing.canvas(9.6, 5.0)
    drawing.title(
        axes,
        "Cut the batch, or cut the network",
        "The number of a thing is that of the worker who has it. What crosses from one to another is red.",
    )
    axes.plot([4.75, 4.75], [0.3, 4.05], color=style.FAINT, linewidth=1.2)
    _data_parallel_half(axes)
    _model_parallel_half(axes)
    return figure


def _data_parallel_half(axes: Axes) -> None:
    drawing.text(axes, (0.2, 3.95), "Data parallelism", weight="bold", align="left", size=11)
    drawing.text(
        axes, (0.2, 3.62), "A shard of the batch and the whole network each", align="left", colour=style.QUIET
    )
    _batch(axes, (0.3, 0.62), [0, 0, 0, 1, 1, 1, 2, 2])
    for worker in range(3):
        bottom = 2.48 - 0.98 * worker
        _network(axes, (1.75, bottom), 1.25, 0.74, [[worker] * 3, [worker] * 4, [worker] * 2])
        drawing.arrow(
            axes, (0.86, 2.9 - 0.87 * worker - 0.1), (1.5, bottom + 0.37), colour=f"worker {worker}"
        )
        drawing.arrow(axes, (3.2, bottom + 0.37), (3.92, 1.87 + 0.12 * (1 - worker)), colour=CROSSING)
    drawing.text(axes, (4.28, 1.87), "mean of\ngradients", colour=CROSSING, size=9)
    drawing.text(
        axes, (2.4, 0.22), "crosses: every gradient, once, at the end of a step", size=9, colour=CROSSING
    )


def _model_parallel_half(axes: Axes) -> None:
    drawing.text(axes, (5.0, 3.95), "Model parallelism", weight="bold", align="left", size=11)
    drawing.text(
        axes, (5.0, 3.62), "The whole batch and a part of every layer each", align="left", colour=style.QUIET
    )
    _batch(axes, (5.1, 0.62), [None] * 8)
    drawing.arrow(axes, (5.68, 1.9), (6.2, 1.9), colour="compute")
    _network(
        axes, (6.45, 0.72), 2.3, 2.4, [[None] * 4, [0, 0, 1, 1, 2, 2], [0, 1, 2]], radius=0.135, borders=True
    )
    for x, word in ((6.45, "pixels"), (7.6, "hidden"), (8.75, "classes")):
        drawing.text(axes, (x, 3.3), word, size=8.5, colour=style.QUIET)
    drawing.text(
        axes, (7.2, 0.22), "crosses: activations, in the middle of both passes", size=9, colour=CROSSING
    )


def _batch(axes: Axes, corner: Point, owners: Sequence[int | None]) -> None:
    """A batch as a stack of examples, the first on top, each in its owner's colour."""
    height = 0.32
    for row, owner in enumerate(reversed(owners)):
        colour = "wait" if owner is None else f"worker {owner}"
        label = "" if owner is None else str(owner)
        drawing.box(
            axes, (corner[0], corner[1] + row * height), 0.5, height - 0.06, label, colour=colour, size=8
        )
    drawing.text(
        axes,
        (corner[0] + 0.25, corner[1] + len(owners) * height + 0.1),
        "batch",
        size=8.5,
        colour=style.QUIET,
    )


def _network(
    axes: Axes,
    corner: Point,
    width: float,
    height: float,
    layers: Sequence[Sequence[int | None]],
    radius: float = 0.085,
    borders: bool = False,
) -> None:
    """Layers of units in their owners' colours; with `borders`, connections that leave an owner are marked."""
    places = [
        [
            (
                corner[0] + width * depth / (len(layers) - 1),
                corner[1] + height * (1 - (unit + 0.5) / len(layer)),
            )
            for unit in range(len(layer))
        ]
        for depth, layer in enumerate(layers)
    ]
    for depth in range(len(layers) - 1):
        for start, source in zip(places[depth], layers[depth], strict=True):
            for end, target in zip(places[depth + 1], layers[depth + 1], strict=True):
                crosses = borders and source is not None and source != target
                axes.plot(
                    *zip(start, end, strict=True),
                    color=style.colour_of(CROSSING) if crosses else "#BDBDBD",
                    linewidth=1.1 if crosses else 0.8,
                    zorder=1 + crosses,
                )
    for layer, owners in zip(places, layers, strict=True):
        for centre, owner in zip(layer, owners, strict=True):
            colour = "wait" if owner is None else f"worker {owner}"
            drawing.unit(
                axes, centre, radius, "" if owner is None or not borders else str(owner), colour=colour
            )


def when_they_synchronise() -> Figure:
    """One step of each scheme as a timeline of three workers; widths are schematic."""
    figure, axes = drawing.canvas(8.95, 5.0)
    drawing.title(
        axes,
        "Data parallel workers meet once a step, model parallel workers three times",
        "One training step, not to scale. In red all workers exchange; nobody can go on before the last has come.",
    )
    _timeline(
        axes,
        3.85,
        "Data parallelism",
        [("forward", 1.9, False), ("backward", 2.9, False), ("gradients", 1.7, True), ("update", 0.7, False)],
    )
    _timeline(
        axes,
        1.85,
        "Model parallelism",
        [
            ("hidden", 0.95, False),
            ("activa-\ntions", 0.8, True),
            ("output", 0.85, False),
            ("logits", 0.6, True),
            ("output", 1.1, False),
            ("their\ngradients", 0.85, True),
            ("hidden", 1.35, False),
            ("update", 0.7, False),
        ],
    )
    for start, end, name in ((1.57, 4.73, "forward"), (4.77, 8.03, "backward")):
        axes.plot([start, start, end, end], [0.42, 0.36, 0.36, 0.42], color=style.QUIET, linewidth=1)
        drawing.text(axes, ((start + end) / 2, 0.2), name, size=9, colour=style.QUIET)
    return figure


def _timeline(axes: Axes, top: float, name: str, phases: Sequence[tuple[str, float, bool]]) -> None:
    drawing.text(axes, (0.2, top), name, weight="bold", align="left", size=10.5)
    row, left = 0.4, 1.55
    for worker in range(3):
        drawing.text(
            axes,
            (1.42, top - 0.35 - worker * row),
            f"worker {worker}",
            align="right",
            size=9,
            colour=style.QUIET,
        )
    for label, width, exchange in phases:
        if exchange:
            drawing.box(
                axes, (left + 0.02, top - 0.53 - 2 * row), width - 0.04, 3 * row - 0.04, label,
                colour=CROSSING, size=8.5, corner_radius=0.04,
            )  # fmt: skip
        else:
            for worker in range(3):
                drawing.box(
                    axes, (left + 0.02, top - 0.53 - worker * row), width - 0.04, row - 0.04, label,
                    colour=f"worker {worker}", size=8.5, corner_radius=0.04,
                )  # fmt: skip
        left += width


def distbelief() -> Figure:
    """DistBelief with Downpour SGD, after figure 2 of Dean et al. (2012)."""
    figure, axes = drawing.canvas(8.6, 5.3)
    drawing.title(
        axes,
        "DistBelief (2012): model parallel inside a replica, data parallel between replicas",
        "Downpour SGD: each replica fetches parameters and pushes gradients when it is ready; no replica waits.",
    )
    drawing.box(axes, (2.0, 3.62), 6.0, 0.72, colour="server", filled=False)
    drawing.text(axes, (1.85, 3.98), "parameter server,\nin shards", align="right", size=9.5)
    for shard in range(6):
        drawing.box(axes, (2.16 + 0.96 * shard, 3.74), 0.86, 0.48, f"w{'₀₁₂₃₄₅'[shard]}", colour="server")
    for replica in range(3):
        left = 2.0 + 2.1 * replica
        drawing.box(axes, (left, 1.3), 1.8, 1.4, colour="compute", filled=False)
        for worker in range(4):
            corner = (left + 0.13 + 0.92 * (worker % 2), 2.13 - 0.7 * (worker // 2))
            drawing.box(axes, corner, 0.62, 0.44, str(worker), colour=f"worker {worker}", corner_radius=0.04)
        for x, y in ((0.9, 2.35), (0.9, 1.65)):
            drawing.arrow(axes, (left + x - 0.17, y), (left + x + 0.17, y), both_ways=True, width=1.1)
        for x in (0.44, 1.36):
            drawing.arrow(axes, (left + x, 1.85), (left + x, 2.15), both_ways=True, width=1.1)
        for slant in (-0.17, 0.17):
            start, end = (left + 0.73, 2.0 - slant), (left + 1.07, 2.0 + slant)
            drawing.arrow(axes, start, end, both_ways=True, width=1.1)
        drawing.arrow(axes, (left + 0.65, 3.58), (left + 0.65, 2.74), colour="server")
        drawing.arrow(axes, (left + 1.15, 2.74), (left + 1.15, 3.58), colour=CROSSING)
        drawing.text(axes, (left + 0.52, 3.14), "w", align="right", size=10)
        drawing.text(axes, (left + 1.28, 3.14), "Δw", align="left", size=10, colour=CROSSING)
        drawing.box(axes, (left + 0.3, 0.32), 1.2, 0.46, f"data shard {replica}", colour="load", size=9)
        drawing.arrow(axes, (left + 0.9, 0.8), (left + 0.9, 1.27), colour="load")
    drawing.text(
        axes, (1.85, 2.0), "model replicas, each\npartitioned over\n4 machines", align="right", size=9.5
    )
    drawing.text(axes, (1.85, 0.55), "training data", align="right", size=9.5)
    return figure


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
    sent = models.data_parallel_bytes(network, workers)
    style.theory(
        by_batch,
        batches,
        [sent for _ in batches],
        "data parallel",
        colour="data parallel",
        linestyle=(0, (5, 2)),
    )
    style.theory(
        by_batch,
        batches,
        batches * models.model_parallel_bytes(network, workers, 1),
        "model parallel",
        colour="model parallel",
    )
    style.measured(by_batch, list(counted), list(counted.values()), colour="model parallel")
    by_batch.set(
        xscale="log", yscale="log", xlabel="batch (images)", ylabel=f"sent per worker and step, N = {workers}"
    )
    style.power_axis(by_batch, list(counted))
    style.unit_axis(by_batch.yaxis, "B")
    by_batch.annotate(
        f"equal at a batch of {crossover:.0f}",
        (crossover, sent),
        (10, -26),
        textcoords="offset points",
        fontsize=9.5,
        arrowprops={"arrowstyle": "-", "color": style.QUIET, "shrinkB": 3},
    )
    style.headline(
        by_batch, "Only activations grow with the batch", "lines: formulas, points: counted while training"
    )
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
    axes.set(xscale="log", yscale="log", xlabel="hidden units", ylabel="batch at which both send the same")
    style.power_axis(axes, [16, 64, 256, 1024, 4096])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.minorticks_off()
    axes.set_ylim(12, 9000)
    label: dict[str, Any] = {"transform": axes.transAxes, "fontsize": 9.5}
    axes.text(0.05, 0.93, "data parallelism sends less", **label, color=style.colour_of("data parallel"))
    axes.text(0.44, 0.05, "model parallelism sends less", **label, color=style.colour_of("model parallel"))
    style.headline(
        axes, "The wider all layers, the larger that batch", "large dot: the network of this lesson"
    )
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
    figure, (curves, gaps) = style.figure(10.4, 4.2, columns=2)
    style.theory(curves, steps, expected, colour="one process")
    early = min(2, len(steps) - 1)
    curves.annotate("line: one process", (steps[early], expected[early]), (14, 6), textcoords="offset points")
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
    style.headline(
        curves, "One curve, however the work is split", "points: real processes, each every few steps"
    )
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
    style.headline(
        gaps, f"They differ by {_scientific(largest)} at most", "a point a step; sums in another order"
    )
    return figure


def _scientific(value: float) -> str:
    """1.3e-15 as 1.3 · 10⁻¹⁵."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa} · 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def asynchronous_losses(
    reference: npt.ArrayLike, runs: Mapping[str, npt.ArrayLike], smooth: int = 10
) -> Figure:
    """The loss of one process and of asynchronous `runs` by update, each as a mean over `smooth` updates."""
    figure, axes = style.figure(7.8, 4.2)
    for index, (name, losses) in enumerate([("one process", reference), *runs.items()]):
        values = np.convolve(np.asarray(losses), np.ones(smooth) / smooth, mode="valid")
        strength = 0.4 + 0.6 * index / len(runs)
        colour = "one process" if index == 0 else style.tint("#96700F", strength)
        dashes = style.DASHES[index % len(style.DASHES)]
        style.theory(
            axes,
            np.arange(smooth, smooth + len(values)),
            values,
            name,
            colour=colour,
            linestyle=dashes,
            linewidth=2,
        )
    axes.set(
        xlabel="update of the parameters", ylabel=f"loss (nats), mean of {smooth} updates", ylim=(0, None)
    )
    style.headline(
        axes,
        "Without waiting, the order of arrival decides the result",
        "Downpour SGD, simulated; same data, same start",
    )
    style.label_ends(axes)
    return figure


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "02_two_ways_to_split.svg": two_ways_to_split,
    "02_when_they_synchronise.svg": when_they_synchronise,
    "02_distbelief.svg": distbelief,
}
