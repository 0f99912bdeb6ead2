"""The plan of the package: which room imports from which, as a matrix that is empty above its diagonal."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop_utils import architecture
from workshop_utils.plots import drawing, style

CELL = 0.235  # inches
LEFT, BELOW = 3.05, 0.25  # of the matrix
ABOVE = 2.0  # room for the columns' names and the headline


def plan() -> Figure:
    """Rows import from columns, in the order of `architecture.FLOORS`; what goes against it is marked by a cross."""
    order = architecture.order()
    side = CELL * len(order)
    figure, axes = drawing.canvas(LEFT + side + 0.6, BELOW + side + ABOVE)
    kept, against = architecture.keeps_to_plan(architecture.imports())
    drawing.title(
        axes,
        f"Imports run one way: all but {len(against)} stand below the diagonal",
        "Read from the code: a dot says that the row's room imports from the column's; a cross is a named exception.",
    )
    _floors(axes, order)
    for index, room in enumerate(order):
        x, y = _at(index, index, len(order))
        axes.text(LEFT - 0.12, y, room, ha="right", va="center", fontsize=8.5, color=style.INK)
        axes.text(
            x, BELOW + side + 0.1, room, ha="center", va="bottom", fontsize=8, rotation=90, color=style.INK
        )
        axes.plot(x, y, marker="s", markersize=9, color=style.tint("theory", 0.35), markeredgecolor="none")
    for importer, imported in sorted(kept | against):
        x, y = _at(order.index(importer), order.index(imported), len(order))
        marker, colour = ("X", "send") if (importer, imported) in against else ("o", "worker 0")
        axes.plot(x, y, marker=marker, markersize=6.5, color=style.colour_of(colour), markeredgecolor="none")
    return figure


def _at(row: int, column: int, rooms: int) -> drawing.Point:
    return LEFT + CELL * (column + 0.5), BELOW + CELL * (rooms - row - 0.5)


def _floors(axes: Axes, order: list[str]) -> None:
    """A band for each floor, named at its left, and thin lines that lead the eye from a room to its column."""
    side = CELL * len(order)
    for index in range(len(order) + 1):
        for line in (
            ([LEFT + CELL * index] * 2, [BELOW, BELOW + side]),
            ([LEFT, LEFT + side], [BELOW + CELL * index] * 2),
        ):
            axes.plot(*line, color=style.FAINT, linewidth=0.5, zorder=1)
    top = BELOW + side
    for floor, rooms in architecture.FLOORS.items():
        height = CELL * len(rooms)
        axes.plot([0.2, LEFT + side], [top, top], color=style.QUIET, linewidth=0.8, zorder=2)
        axes.text(
            0.2,
            top - CELL / 2,
            floor,
            ha="left",
            va="center",
            fontsize=9,
            fontweight="bold",
            color=style.QUIET,
        )
        top -= height
    axes.plot([0.2, LEFT + side], [top, top], color=style.QUIET, linewidth=0.8, zorder=2)


DRAWINGS = {"architecture.svg": plan}
