"""Figures of tensor parallelism and of meshes: what is sent, what stays in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.figure import Figure

from workshop_utils.plots import style

# What crosses in each direction of a mesh, the same in every figure.
DIRECTIONS = {"tensor": "model parallel", "data": "data parallel", "pipeline": "mpi"}


def bytes_sent(
    counted: Mapping[str, Mapping[int, float]], formulas: Mapping[str, Callable[[int], float]], nbytes: int
) -> Figure:
    """Bytes that a rank sends in a step, by number of ranks, as multiples of `nbytes`: counted, and by formula.

    Args:
        counted, formulas: by name of the form.
        nbytes: size of the activations between two blocks.
    """
    _, axes = style.figure(7.8, 3.9)
    most = max(ranks for series in counted.values() for ranks in series)
    line = np.arange(1, 2 * most + 1)
    colours = ("model parallel", "data parallel")
    for name, colour, marker in zip(counted, colours, style.MARKERS, strict=False):
        style.theory(axes, line, [formulas[name](int(ranks)) / nbytes for ranks in line], name, colour=colour)
        sent = [value / nbytes for value in counted[name].values()]
        style.measured(axes, list(counted[name]), sent, colour=colour, marker=marker, markersize=7)
    axes.set(xlabel="tensor-parallel ranks N", ylabel="sent by a rank / one activation", ylim=(0, None))
    axes.set_xticks(line)
    return style.finish(
        axes,
        "Bounded, whatever N is, and many times an activation",
        f"a step; points: counted, lines: formulas; the activation between two blocks has {nbytes / 1e3:,.0f} kB",
    )


def activations(kept: Mapping[str, float], ranks: int) -> Figure:
    """Bytes of one block's activations that one rank keeps for the backward pass, the first those of one process."""
    _, axes = style.figure(8.0, 1.5 + 0.5 * len(kept))
    values = list(kept.values())
    colours = ("one process", "model parallel", "data parallel")
    axes.barh(range(len(kept)), values, 0.6, color=[style.tint(colour, 0.75) for colour in colours])
    for row, value in enumerate(values):
        style.note(axes, f"{value / values[0]:.2f}", (value, row), (5, 0), va="center")
    style.mark(axes, values[0] / ranks, linewidth=1.4)
    style.note(axes, f"1/{ranks}", (values[0] / ranks, -0.42), (4, 0), va="bottom", color=style.QUIET)
    style.rows(axes, list(kept), (len(kept) - 0.5, -0.95))  # with a place for the name of the dashed line
    axes.set_xlabel("activations of one block that one rank keeps for the backward pass")
    style.unit_axis(axes.xaxis, "B")
    finding = "Sequence parallelism cuts what tensor parallelism leaves whole"
    return style.finish(axes, finding, f"{ranks} ranks, counted")


def bytes_by_direction(sent: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bytes that a rank sends in a step to its tensor, data and pipeline neighbours, by shape of the mesh."""
    _, axes = style.figure(8.6, 1.3 + 0.6 * len(sent))
    parts = {name: [directions[name] for directions in sent.values()] for name in DIRECTIONS}
    style.stacked(axes, parts, DIRECTIONS)
    style.rows(axes, list(sent))
    axes.set(xlabel="sent by a rank in a step (mean over ranks)", ylabel="data × tensor × pipeline")
    style.unit_axis(axes.xaxis, "B")
    finding = "How the ranks are arranged decides what they send"
    return style.finish(axes, finding, "counted by communicator.traffic, by neighbour")
