"""What a cost model says: from a few workers to a thousand, which algorithm where, how near to what is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from workshop_utils.plots import style
from workshop_utils.scaling.cost import Path, all_reduce_seconds

# What each algorithm is called and coloured, in every figure that has several.
ALGORITHMS = {
    "ring": ("ring", "ring"),
    "tree": ("tree", "#CC6677"),
    "central": ("parameter server", "workshop_parameter_server"),
    "halving_doubling": ("halving-doubling", "#117733"),
}
TICKS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Curve:
    """One algorithm's seconds, by number of workers.

    `line` is the closed form at `workers`, `low` and `high` its interval. What was measured and fitted, measured and
    held out, and simulated are seconds by number of workers.
    """

    name: str
    colour: str
    workers: npt.NDArray[np.float64]
    line: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64] | None = None
    high: npt.NDArray[np.float64] | None = None
    fitted: Mapping[int, float] | None = None
    held_out: Mapping[int, float] | None = None
    simulated: Mapping[int, float] | None = None


def to_a_thousand(curves: Sequence[Curve], finding: str, detail: str = "") -> Axes:
    """Seconds against workers, both logarithmic: closed forms, what they were fitted to, and the simulated clock.

    Full points were fitted, hollow ones held out; diamonds come from the simulated clock.
    """
    _, axes = style.figure(8.2, 4.6)
    for curve in curves:
        colour = style.colour_of(curve.colour)
        style.theory(axes, curve.workers, curve.line, curve.name, colour=curve.colour)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.workers, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
        _points(
            axes,
            curve.simulated,
            curve.colour,
            marker="D",
            markersize=5,
            markerfacecolor="white",
            markeredgecolor=colour,
        )
        _points(axes, curve.fitted, curve.colour, markersize=7)
        _points(
            axes, curve.held_out, curve.colour, markersize=7, markerfacecolor="white", markeredgecolor=colour
        )
    axes.set_yscale("log")
    most = max(float(curve.workers.max()) for curve in curves)
    ticks = [tick for tick in (*TICKS[:-2], 1000) if tick <= most]
    style.power_axis(axes, ticks)
    axes.set(xlabel="workers", ylabel="time")
    style.unit_axis(axes.yaxis, "s")
    style.headline(axes, finding, detail)
    style.label_ends(axes)
    return axes


def _points(axes: Axes, seconds: Mapping[int, float] | None, colour: str, **options: object) -> None:
    if seconds:
        style.measured(axes, list(seconds), list(seconds.values()), colour=colour, **options)  # type: ignore[arg-type]


def fastest_map(
    path: Path,
    finding: str,
    detail: str = "",
    algorithms: Sequence[str] = ("ring", "tree", "central"),
    checked: pd.DataFrame | None = None,
    most_workers: int = 4096,
) -> Axes:
    """Which of `algorithms` is fastest, by size of the array and number of workers, as a map; by the closed forms.

    `checked` are points with columns nbytes, workers and fastest, from elsewhere: a tick where the map says the same, a
    cross where not.
    """
    nbytes = np.geomspace(100, 1e9, 281)
    workers = np.unique(np.round(np.geomspace(2, most_workers, 181)).astype(int))
    seconds = np.stack(
        [all_reduce_seconds(name, workers[:, None], nbytes[None, :], path) for name in algorithms]
    )
    best = seconds.argmin(axis=0)
    _, axes = style.figure(7.6, 4.6)
    colours = [style.tint(ALGORITHMS[name][1], 0.45) for name in algorithms]
    axes.pcolormesh(
        nbytes,
        workers,
        best,
        cmap=ListedColormap(colours),
        vmin=0,
        vmax=len(algorithms) - 1,
        shading="nearest",
    )
    axes.set(xscale="log", yscale="log")
    style.power_axis(axes, [tick for tick in TICKS if 2 <= tick <= most_workers], "y")
    dots = np.array([]) if checked is None else checked["workers"].to_numpy(float)
    for index, name in enumerate(algorithms):
        _label_region(axes, best == index, nbytes, workers, ALGORITHMS[name][0], dots)
    if checked is not None:
        for marker, same in (("o", True), ("X", False)):
            agree = [
                _winner(path, algorithms, int(row.workers), float(row.nbytes)) == row.fastest  # type: ignore[arg-type]
                for row in checked.itertuples()
            ]
            chosen = checked[np.array(agree) == same]
            style.measured(
                axes,
                chosen["nbytes"],
                chosen["workers"],
                colour=style.INK,
                marker=marker,
                markersize=5 if same else 9,
            )
    axes.grid(visible=False)
    axes.set(xlabel="size of the array", ylabel="workers")
    style.unit_axis(axes.xaxis, "B")
    axes.minorticks_off()
    style.headline(axes, finding, detail)
    return axes


def _winner(path: Path, algorithms: Sequence[str], workers: int, nbytes: float) -> str:
    return min(algorithms, key=lambda name: float(all_reduce_seconds(name, workers, nbytes, path)))


def _label_region(
    axes: Axes,
    inside: npt.NDArray[np.bool_],
    x: npt.NDArray[np.float64],
    y: npt.NDArray[np.int64],
    name: str,
    dots: npt.NDArray[np.float64],
) -> None:
    """Write `name` where the region is wide, if there is room for it, and as far as can be from the rows of `dots`."""
    widths = inside.sum(axis=1)
    widths[: len(y) // 12] = widths[-len(y) // 12 :] = 0  # a word at the edge would be cut
    if widths.max() < 25:
        return
    if len(dots):
        wide = np.flatnonzero(widths >= 0.75 * widths.max())
        apart = np.abs(np.log(y[wide, None] / dots)).min(axis=1)
        row = int(wide[apart.argmax()])
    else:
        widest = np.flatnonzero(widths == widths.max())
        row = int(widest[len(widest) // 2])
    places = np.flatnonzero(inside[row])
    axes.text(
        x[places[len(places) // 2]], y[row], name, ha="center", va="center", fontsize=11, fontweight="bold"
    )


def against_known(
    rows: pd.DataFrame,
    within: float,
    finding: str,
    detail: str = "",
    name: str = "system",
    axes: Axes | None = None,
) -> Axes:
    """Predicted over measured, a row for each `name`: points not fitted, and the band of `within` (0.1: ten per cent).

    `rows` has columns `name`, predicted, measured; what lies outside the band is hollow.
    """
    systems = list(dict.fromkeys(rows[name]))
    if axes is None:
        _, axes = style.figure(8.2, 1.3 + 0.34 * len(systems))
    axes.axvspan(1 / (1 + within), 1 + within, color=style.FAINT, zorder=0)
    axes.axvline(1, color=style.colour_of("theory"), linewidth=1.4)
    for place, system in enumerate(systems):
        own = rows[rows[name] == system]
        ratio = (own["predicted"] / own["measured"]).to_numpy(float)
        near = np.abs(np.log(ratio)) <= np.log1p(within)
        colour = style.colour_of("worker 0")
        style.measured(axes, ratio[near], np.full(near.sum(), place), colour=colour)
        style.measured(
            axes, ratio[~near], np.full((~near).sum(), place), colour=colour, markerfacecolor="white",
            markeredgecolor=colour, markeredgewidth=1.4,
        )  # fmt: skip
    axes.set_xscale("log")
    reach = max(1.5, 1.15 * float(np.exp(np.abs(np.log(rows["predicted"] / rows["measured"])).max())))
    axes.set_xlim(1 / reach, reach)
    ticks = [
        tick
        for tick in (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10)
        if 1 / reach <= tick <= reach
    ]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(systems)), systems)
    axes.set_ylim(len(systems) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("predicted over measured")
    style.headline(axes, finding, detail)
    return axes


def compared(
    groups: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    finding: str,
    detail: str = "",
    unit: str = "s",
) -> Figure:
    """Bars of a few numbers in groups, each named at its end: `groups` has values by name, by group."""
    figure, axes = style.figure(7.6, 1.1 + 0.3 * sum(map(len, groups.values())) + 0.2 * len(groups))
    place, ticks = 0.0, []
    longest = max(max(values.values()) for values in groups.values())
    for group, values in groups.items():
        ticks.append((place + (len(values) - 1) / 2, group))
        for name, value in values.items():
            axes.barh(place, value, 0.8, color=style.colour_of(colours[name]))
            axes.annotate(
                f"{name}: {style.EngFormatter(unit=unit, places=1)(value)}", (value, place), (5, 0),
                textcoords="offset points", va="center", fontsize=9,
            )  # fmt: skip
            place += 1
        place += 0.7
    axes.set_yticks([middle for middle, _ in ticks], [group for _, group in ticks])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * longest)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("time")
    style.unit_axis(axes.xaxis, unit)
    style.headline(axes, finding, detail)
    return figure
