"""Figures of tensor parallelism and of meshes: what is sent, what stays in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.figure import Figure

from workshop_utils.plots import style

# What crosses in each direction of a mesh, the same in every figure.
DIRECTIONS = {"data": "data parallel", "tensor": "model parallel", "pipeline": "mpi"}


def bytes_sent(
    counted: Mapping[str, Mapping[int, float]], formulas: Mapping[str, Callable[[int], float]], nbytes: int
) -> Figure:
    """Bytes that a rank sends in a step, by number of ranks, as multiples of `nbytes`: counted, and by formula.

    Args:
        counted, formulas: by name of the form.
        nbytes: size of the activations between two blocks.
    """
    figure, axes = style.figure(7.8, 3.9)
    most = max(ranks for series in counted.values() for ranks in series)
    line = np.arange(1, 2 * most + 1)
    for name, colour, marker in zip(
        counted, ("model parallel", "data parallel"), style.MARKERS, strict=False
    ):
        style.theory(axes, line, [formulas[name](int(ranks)) / nbytes for ranks in line], name, colour=colour)
        sent = [value / nbytes for value in counted[name].values()]
        style.measured(axes, list(counted[name]), sent, colour=colour, marker=marker, markersize=7)
    axes.set(xlabel="tensor-parallel ranks N", ylabel="sent by a rank / one activation", ylim=(0, None))
    axes.set_xticks(line)
    style.headline(
        axes,
        "Bounded, whatever N is, and many times an activation",
        f"a step; points: counted, lines: formulas; the activation between two blocks has {nbytes / 1e3:,.0f} kB",
    )
    style.label_ends(axes)
    return figure


def activations(kept: Mapping[str, float], ranks: int) -> Figure:
    """Bytes of one block's activations that one rank keeps for the backward pass, the first those of one process."""
    figure, axes = style.figure(8.0, 1.5 + 0.5 * len(kept))
    values = list(kept.values())
    colours = ("one process", "model parallel", "data parallel")
    axes.barh(range(len(kept)), values, 0.6, color=[style.tint(colour, 0.75) for colour in colours])
    for row, value in enumerate(values):
        axes.annotate(
            f"{value / values[0]:.2f}",
            (value, row),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
        )
    axes.axvline(values[0] / ranks, color=style.colour_of("theory"), linestyle=(0, (5, 2)), linewidth=1.4)
    axes.annotate(
        f"1/{ranks}", (values[0] / ranks, -0.42), (4, 0), textcoords="offset points", fontsize=9.5, va="bottom",
        color=style.QUIET,
    )  # fmt: skip
    axes.set_yticks(range(len(kept)), list(kept))
    axes.set_ylim(len(kept) - 0.5, -0.95)  # above the bars there is room for the name of the dashed line
    axes.set_xlabel("activations of one block that one rank keeps for the backward pass")
    style.unit_axis(axes.xaxis, "B")
    axes.grid(visible=False, axis="y")
    style.headline(
        axes, "Sequence parallelism cuts what tensor parallelism leaves whole", f"{ranks} ranks, counted"
    )
    return figure


def bytes_by_direction(sent: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bytes that a rank sends in a step to its tensor, data and pipeline neighbours, by shape of the mesh."""
    figure, axes = style.figure(8.6, 1.3 + 0.6 * len(sent))
    rows, left = np.arange(len(sent)), np.zeros(len(sent))
    for direction in ("tensor", "data", "pipeline"):
        widths = np.array([parts[direction] for parts in sent.values()])
        colour = style.colour_of(DIRECTIONS[direction])
        axes.barh(rows, widths, 0.62, left=left, color=colour, edgecolor="white")
        widest = int(np.argmax(widths))
        if widths[widest] > 0:
            axes.text(
                left[widest] + widths[widest] / 2, widest, direction, ha="center", va="center", fontsize=9,
                color=style.ink_on(colour),
            )  # fmt: skip
        left = left + widths
    axes.set_yticks(rows, list(sent))
    axes.invert_yaxis()
    axes.set_xlabel("sent by a rank in a step (mean over ranks)")
    axes.set_ylabel("data × tensor × pipeline")
    style.unit_axis(axes.xaxis, "B")
    axes.grid(visible=False, axis="y")
    style.headline(
        axes,
        "How the ranks are arranged decides what they send",
        "counted by communicator.traffic, by neighbour",
    )
    return figure
