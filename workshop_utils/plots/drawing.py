"""Boxes and arrows: the vocabulary of the workshop's diagrams.

Coordinates are inches, from the lower left of a canvas without axes, so that a diagram keeps its proportions
and its text its size.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from workshop_utils.plots import style

Point = tuple[float, float]


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty white canvas of `width` × `height` inches, and the axes to draw on, in inches."""
    figure, axes = style.figure(width, height, layout="none")
    axes.set_position((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def title(axes: Axes, finding: str, detail: str = "") -> None:
    """The diagram's headline at its upper left: what it says, and below that a second line."""
    top = axes.get_ylim()[1]
    text(axes, (0.2, top - 0.3), finding, size=12.5, weight="bold", align="left")
    if detail:
        text(axes, (0.2, top - 0.58), detail, size=9.5, colour=style.QUIET, align="left")


def box(
    axes: Axes,
    corner: Point,
    width: float,
    height: float,
    label: str = "",
    *,
    colour: str = "compute",
    filled: bool = True,
    dashed: bool = False,
    size: float = 9.5,
    weight: str = "normal",
    corner_radius: float = 0.06,
) -> None:
    """A rounded box with its lower left at `corner`; filled with the colour, or a tint of it with an edge."""
    edge = style.colour_of(colour)
    face = edge if filled else style.tint(colour, 0.13)
    axes.add_patch(
        FancyBboxPatch(
            corner,
            width,
            height,
            boxstyle=f"round,pad=0,rounding_size={corner_radius}",
            facecolor=face,
            edgecolor=edge,
            linewidth=1.3,
            linestyle=(0, (4, 2)) if dashed else "solid",
        )
    )
    middle = (corner[0] + width / 2, corner[1] + height / 2)
    text(axes, middle, label, size=size, colour=style.ink_on(face), weight=weight)


def unit(axes: Axes, centre: Point, radius: float = 0.13, label: str = "", *, colour: str) -> None:
    """A neuron: a disc at `centre`."""
    face = style.colour_of(colour)
    axes.add_patch(Circle(centre, radius, facecolor=face, edgecolor="white", linewidth=1.2, zorder=4))
    text(axes, centre, label, size=8, colour=style.ink_on(face))


def arrow(
    axes: Axes,
    start: Point,
    end: Point,
    label: str = "",
    *,
    colour: str = "send",
    width: float = 1.6,
    bend: float = 0.0,
    dashed: bool = False,
    both_ways: bool = False,
    label_at: Point | None = None,
    size: float = 9,
) -> None:
    """An arrow from `start` to `end`, bent by `bend` (a fraction of its length), named beside its middle."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="<|-|>" if both_ways else "-|>",
            mutation_scale=9 + width,
            linewidth=width,
            color=style.colour_of(colour),
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=2,
            shrinkB=2,
            linestyle=(0, (4, 2)) if dashed else "solid",
            zorder=3,
        )
    )
    if label:
        middle = label_at or ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.12)
        text(axes, middle, label, size=size, colour=colour)


def text(
    axes: Axes,
    at: Point,
    words: str,
    *,
    size: float = 9.5,
    colour: str = style.INK,
    weight: str = "normal",
    align: Any = "center",
    **options: Any,
) -> None:
    """Words at a point, centred vertically; `align` is left, center or right."""
    options = {"ha": align, "va": "center_baseline", "zorder": 6, "linespacing": 1.35} | options
    axes.text(*at, words, fontsize=size, color=style.colour_of(colour), fontweight=weight, **options)
