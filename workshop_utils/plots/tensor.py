"""Figures of tensor parallelism and of meshes: how layers are cut, what is sent, what stays in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from workshop_utils.plots import drawing, style
from workshop_utils.plots.drawing import Point

# What crosses in each direction of a mesh, the same in every figure.
DIRECTIONS = {"data": "data parallel", "tensor": "model parallel", "pipeline": "mpi"}


def column_then_row() -> Figure:
    """An MLP cut by the columns of its first matrix and the rows of its second, as in Megatron-LM."""
    figure, axes = drawing.canvas(10.2, 4.9)
    drawing.title(
        axes,
        "First by columns, then by rows: the ranks meet once",
        "Z = gelu(X A) B on two ranks. Each colour is a rank. What is grey, both have; only the partial sums cross.",
    )
    middle = 2.2

    def place(
        left: float, width: float, height: float, owners: list[str], names: str, rows: bool = False
    ) -> None:
        _matrix(axes, (left, middle - height / 2), width, height, owners, names, by_rows=rows)

    ranks = ["worker 0", "worker 1"]
    place(0.35, 0.85, 1.25, ["wait"], "X")
    place(1.8, 1.7, 0.85, ranks, "A₀ A₁")
    place(4.15, 1.7, 1.25, ranks, "Y₀ Y₁")
    place(6.4, 0.85, 1.7, ranks, "B₀ B₁", rows=True)
    _matrix(axes, (7.8, middle + 0.07), 0.85, 1.25, ranks[:1], "Z₀")
    _matrix(axes, (7.8, middle - 1.32), 0.85, 1.25, ranks[1:], "Z₁")
    place(9.15, 0.85, 1.25, ["wait"], "Z")
    for x, sign in ((1.5, "×"), (3.83, "="), (6.12, "×"), (7.53, "=")):
        drawing.text(axes, (x, middle), sign, size=14)
    drawing.text(axes, (8.9, middle), "Σ", size=17, colour="send", weight="bold")
    for x, words in (
        (0.78, "the same\neverywhere"),
        (2.65, "cut by columns"),
        (5.0, "gelu: nothing\nto exchange"),
        (6.83, "cut by rows"),
    ):
        drawing.text(axes, (x, 3.45), words, size=9, colour=style.QUIET)
    drawing.text(axes, (9.32, 3.32), "g: all-reduce,\nforward", size=9, colour="send")
    drawing.arrow(axes, (9.05, 3.08), (8.92, 2.5), colour="send", width=1.1)
    drawing.text(
        axes, (1.15, 0.95), "f: all-reduce of X's gradient, backward", size=9, colour="send", align="left"
    )
    drawing.arrow(axes, (1.12, 0.97), (0.78, 1.5), colour="send", width=1.1)
    drawing.text(
        axes,
        (0.35, 0.35),
        "In attention, A holds query, key and value, cut between heads, and B is the output projection.",
        size=9,
        colour=style.QUIET,
        align="left",
    )
    return figure


def _matrix(
    axes: Axes,
    corner: Point,
    width: float,
    height: float,
    owners: Sequence[str],
    names: str,
    by_rows: bool = False,
) -> None:
    """A matrix whose columns (or rows) belong to `owners`, with a name a part."""
    count = len(owners)
    for index, (owner, name) in enumerate(zip(owners, names.split(), strict=True)):
        part = (width, height / count) if by_rows else (width / count, height)
        left = corner[0] + (0 if by_rows else index * part[0])
        bottom = corner[1] + ((count - 1 - index) * part[1] if by_rows else 0)
        axes.add_patch(
            Rectangle(
                (left, bottom), *part, facecolor=style.tint(owner, 0.85), edgecolor="white", linewidth=2
            )
        )
        ink = style.ink_on(style.tint(owner, 0.85))
        drawing.text(axes, (left + part[0] / 2, bottom + part[1] / 2), name, size=12, colour=ink)


def mesh_of_eight() -> Figure:
    """Eight ranks as a cube of data × tensor × pipeline, and what crosses along each of its edges."""
    figure, axes = drawing.canvas(9.6, 4.6)
    drawing.title(
        axes,
        "Eight ranks, three directions",
        "2 × 2 × 2: each rank has one neighbour in each direction. The number is the rank's.",
    )

    def centre(rank: int) -> Point:
        tensor, data, pipeline = rank % 2, rank // 2 % 2, rank // 4
        return (1.35 + 1.75 * tensor + 3.3 * pipeline, 2.9 - 1.9 * data)

    for rank in range(8):
        for bit, direction in ((1, "tensor"), (2, "data"), (4, "pipeline")):
            if not rank & bit:
                bend = -0.33 if direction == "pipeline" else 0.0
                bend = -bend if direction == "pipeline" and rank & 2 else bend
                drawing.arrow(
                    axes, centre(rank), centre(rank | bit), colour=DIRECTIONS[direction], both_ways=True, bend=bend,
                    width=2.2,
                )  # fmt: skip
    for rank in range(8):
        x, y = centre(rank)
        drawing.unit(axes, (x, y), 0.27, str(rank), colour=f"worker {rank}")
    words = {
        "tensor": "tensor: parts of the same layers.\nAll-reduce of activations,\ntwice a layer in each pass",
        "pipeline": "pipeline: other layers.\nActivations on, gradients back,\nonce a microbatch",
        "data": "data: a copy, other sequences.\nAll-reduce of gradients,\nonce a step",
    }
    for row, (direction, said) in enumerate(words.items()):
        drawing.text(
            axes,
            (6.95, 3.25 - 1.05 * row),
            said,
            size=9,
            colour=DIRECTIONS[direction],
            align="left",
            va="center",
        )
    return figure


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


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "08_column_then_row.svg": column_then_row,
    "08_mesh_of_eight.svg": mesh_of_eight,
}
