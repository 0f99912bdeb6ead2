"""What a cost model says: from a few workers to a thousand, which algorithm where, how near to what is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

from workshop_utils.plots import style

Array = npt.NDArray[Any]
Group = Mapping[str, float]  # seconds, by name
Forms = Mapping[str, Callable[[int, float], float]]  # of workers and bytes to seconds, by algorithm

# What each algorithm is called and coloured, in every figure that has several.
ALGORITHMS = {
    "ring": ("ring", "ring"),
    "tree": ("tree", style.MUTED[0]),
    "double_tree": ("double tree", style.MUTED[3]),
    "halving_doubling": ("halving-doubling", style.MUTED[2]),
    "recursive_doubling": ("recursive doubling", style.MUTED[1]),
}
MAPPED = tuple(ALGORITHMS)
TIE = 1.02  # two algorithms so near to each other are not told apart
TICKS = (2, 4, 8, 16, 64, 256, 1000)  # workers
RATIOS = (0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2)
WIDE_RATIOS = (0.1, 0.2, 0.33, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10)


def to_a_thousand(
    workers: Array, curves: Mapping[str, Array], simulated: pd.DataFrame, finding: str, detail: str
) -> Figure:
    """Seconds against workers, both logarithmic: closed forms as lines, and points of the simulated clock.

    `curves` are an algorithm's seconds, one for each of `workers`; `simulated` has columns algorithm, workers, seconds.
    """
    _, axes = style.figure(8.2, 4.6)
    for name, seconds in curves.items():
        called, colour = ALGORITHMS[name]
        style.theory(axes, workers, seconds, called, colour=colour)
    for index, name in enumerate(MAPPED):
        places, seconds = simulated[simulated["algorithm"] == name][["workers", "seconds"]].to_numpy(float).T
        style.measured(axes, places, seconds, colour=ALGORITHMS[name][1], marker=style.MARKERS[index])
    axes.set_yscale("log")
    style.power_axis(axes, [tick for tick in TICKS if workers.min() <= tick <= workers.max()])
    axes.set(xlabel="workers", ylabel="time of one all-reduce")
    style.log_ticks(axes.yaxis)
    style.unit_axis(axes.yaxis, "s")
    axes.yaxis.set_minor_formatter(NullFormatter())
    style.label_ends(axes)
    return style.finish(axes, finding, detail)


def fastest_map(forms: Forms, finding: str, detail: str, checked: pd.DataFrame) -> Figure:
    """Which all-reduce is fastest by the closed `forms`, by size of the array and number of workers, a row for each.

    `checked` are points with columns nbytes, workers and fastest, by the simulated clock: a dot where the map says the
    same or a tie of that algorithm, a cross where not. `detail` goes on with what dots and crosses mean.
    """
    nbytes, workers = np.geomspace(100, 1e9, 141), np.arange(3, 1025)
    _, axes = style.figure(7.6, 4.6)
    tints = [style.tint(ALGORITHMS[name][1], 0.45) for name in MAPPED]
    seconds = _seconds(forms, workers[:, None], nbytes)
    first, second = np.sort(seconds, axis=0)[:2]
    best = np.where(second > TIE * first, seconds.argmin(axis=0), len(MAPPED))
    colours = ListedColormap([*tints, style.FAINT])
    axes.pcolormesh(nbytes, workers, best, cmap=colours, vmin=0, vmax=len(MAPPED), shading="nearest")
    axes.set(xscale="log", yscale="log", xlabel="size of the array", ylabel="workers")
    style.power_axis(axes, [1 << bit for bit in range(2, 11)], "y")
    style.unit_axis(axes.xaxis, "B")
    for index, name in enumerate(MAPPED):
        _label_region(
            axes, best == index, nbytes, workers, ALGORITHMS[name][0], checked["workers"].to_numpy(float)
        )
    seconds = _seconds(forms, checked["workers"], checked["nbytes"])
    theirs = seconds[[MAPPED.index(name) for name in checked["fastest"]], np.arange(len(checked))]
    agrees = theirs <= TIE * seconds.min(axis=0)
    for points, marker, size in ((checked[agrees], "o", 5), (checked[~agrees], "X", 9)):
        look: dict[str, Any] = {"colour": style.INK, "marker": marker, "markersize": size}
        style.measured(axes, points["nbytes"], points["workers"], **look)
    axes.grid(visible=False)
    axes.minorticks_off()
    detail += "; dots: the simulated clock agrees" + ("" if agrees.all() else ", crosses: not")
    return style.finish(axes, finding, detail)


def _seconds(forms: Forms, workers: npt.ArrayLike, nbytes: npt.ArrayLike) -> Array:
    """By algorithm, in the order of MAPPED."""
    sizes, arrays = np.asarray(workers), np.asarray(nbytes, dtype=float)
    return np.stack([np.vectorize(forms[name], otypes=[float])(sizes, arrays) for name in MAPPED])


def _label_region(axes: Axes, inside: Array, x: Array, y: Array, name: str, dots: Array) -> None:
    """Write `name` where the region is wide, if there is room for it, and as far as can be from the rows of `dots`."""
    widths = inside.sum(axis=1)
    widths[(y < 1.5 * y[0]) | (y > y[-1] / 1.5)] = 0  # a word at the edge would be cut
    if widths.max() < 20:
        return
    wide = np.flatnonzero(widths >= 0.5 * widths.max())
    apart = np.abs(np.log(y[wide, None] / dots)).min(axis=1)
    row = int(wide[apart.argmax()])
    places = np.flatnonzero(inside[row])
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 11, "fontweight": "bold"}
    axes.text(x[places[len(places) // 2]], y[row], name, **look)


def against_known(rows: pd.DataFrame, within: float, finding: str, detail: str = "") -> Figure:
    """Predicted over measured, a row for each system: points not fitted, and the band of `within` (0.1: ten per cent).

    `rows` has columns system, predicted, measured; what lies outside the band is hollow.
    """
    systems = list(dict.fromkeys(rows["system"]))
    _, axes = style.figure(8.2, 1.3 + 0.34 * len(systems))
    axes.axvspan(1 / (1 + within), 1 + within, color=style.FAINT, zorder=0)
    axes.axvline(1, color=style.colour_of("theory"), linewidth=1.4)
    for place, (_, own) in enumerate(rows.groupby("system", sort=False)):
        ratio = (own["predicted"] / own["measured"]).to_numpy(float)
        near = np.abs(np.log(ratio)) <= np.log1p(within)
        style.measured(axes, ratio[near], np.full(near.sum(), place))
        style.measured(axes, ratio[~near], np.full((~near).sum(), place), hollow=True, markeredgewidth=1.4)
    axes.set_xscale("log")
    reach = max(1.5, 1.15 * float(np.exp(np.abs(np.log(rows["predicted"] / rows["measured"])).max())))
    axes.set_xlim(1 / reach, reach)
    ticks = RATIOS if reach < 2 else WIDE_RATIOS
    style.plain_ticks(axes.xaxis, [tick for tick in ticks if 1 / reach <= tick <= reach])
    style.rows(axes, systems, (len(systems) - 0.5, -0.5))
    axes.set_xlabel("predicted over measured")
    return style.finish(axes, finding, detail)


def compared(groups: Mapping[str, Group], colours: Mapping[str, str], finding: str, detail: str) -> Figure:
    """Bars of seconds in groups, each named at its end."""
    _, axes = style.figure(7.6, 1.1 + 0.3 * sum(map(len, groups.values())) + 0.2 * len(groups))
    place, middles = 0.0, []
    written = EngFormatter(unit="s", places=2)
    for values in groups.values():
        middles.append(place + (len(values) - 1) / 2)
        for name, value in values.items():
            axes.barh(place, value, 0.8, color=style.colour_of(colours[name]))
            style.note(axes, f"{name}: {written(value)}", (value, place), (5, 0), va="center", fontsize=9)
            place += 1
        place += 0.7
    style.rows(axes, [*groups], places=middles)
    axes.set(xlabel="time", xlim=(0, 1.35 * max(max(values.values()) for values in groups.values())))
    style.unit_axis(axes.xaxis, "s")
    return style.finish(axes, finding, detail)
