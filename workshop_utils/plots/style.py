"""How every figure of the workshop looks: colours, headlines, direct labels, and theory beside measurement.

    from workshop_utils.plots import style

    style.use()                                          # once, at the top of a notebook
    figure, axes = style.figure()
    style.theory(axes, sizes, predicted, "2(N − 1)/N · K")
    style.measured(axes, sizes, seconds, "ring", colour="worker 0")
    style.headline(axes, "A ring stays flat", "16 MB of gradients, median of 5 steps")
    style.label_ends(axes)                               # names at the lines' ends, no legend

Workers wear the colours of Okabe and Ito (2008, "Color Universal Design"), strategies those of P. Tol (2021,
"Colour Schemes", muted); both survive colour-blindness. Neighbours differ in lightness too, for grey print,
and no figure tells two things apart by colour alone: markers, dashes or labels say the same.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib import colors as mcolors
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

from workshop_utils.plots import alternative

INK = "#222222"  # text and axes
QUIET = "#6B6B6B"  # second lines of text, ticks
FAINT = "#E3E3E3"  # grid

COLOURS = {
    "server": "#3B3B3B",
    "chief": "#7A5C1E",
    # What a worker does with its time.
    "compute": "#5B7083",
    "send": "#D55E00",
    "wait": "#D9D9D9",
    "load": "#D8C25A",
    # What was computed beforehand, and what it is held against.
    "theory": "#6B6B6B",
    "ideal": "#9A9A9A",
    "one process": INK,
    "data parallel": "#332288",
    "model parallel": "#CC6677",
    # Strategies of a job.
    "single": INK,
    "ring": "#0072B2",
    "workshop_parameter_server": "#DDAA33",
    "sharded_servers": "#999933",
    "horovod": "#882255",
    "parameter_server": "#8A8A20",
    "multi_worker_mirrored": "#117733",
    "torch_ddp": "#332288",
    "mpi": "#44AA99",
    "spark": "#CC6677",
}

MUTED = ("#332288", "#CC6677", "#117733", "#999933")  # Tol's, for what is neither worker nor strategy
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "h")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))

RC: dict[Any, Any] = dict(
    matplotlib.rc_params_from_file(Path(__file__).with_name("workshop.mplstyle"), use_default_template=False)
)


WORKERS: tuple[str, ...] = tuple(RC["axes.prop_cycle"].by_key()["color"])


def use() -> None:
    """Draw every later figure of this process in the house's style; in a notebook with alternative text."""
    matplotlib.rcParams.update(RC)
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        alternative.show_in_notebook()


def colour_of(thing: str) -> str:
    """The colour that `thing` has in every lesson, as `#rrggbb`.

    `thing` is a worker ("worker 0", or "worker-0" as `place` names it; "ps-0" and "chief-0" too), one of
    COLOURS, or already a colour.

    Raises:
        ValueError: if it is none of these; the message lists them.
    """
    match = re.fullmatch(r"(worker|rank|server|ps|chief)[ -](\d+)", thing)
    if match:
        role, index = match[1], int(match[2])
        if role in ("worker", "rank"):
            return WORKERS[index % len(WORKERS)]
        return COLOURS["chief" if role == "chief" else "server"]
    if thing in COLOURS:
        return COLOURS[thing]
    if mcolors.is_color_like(thing):
        return mcolors.to_hex(thing)
    raise ValueError(f"{thing!r} has no colour; known are 'worker 0', 'server 0' … and {', '.join(COLOURS)}")


def tint(colour: str, strength: float = 0.2) -> str:
    """`colour_of(colour)` mixed with white: 0 is white, 1 the full colour."""
    full = np.array(mcolors.to_rgb(colour_of(colour)))
    return mcolors.to_hex(tuple(1 - strength * (1 - full)))


def ink_on(background: str) -> str:
    """Black or white, whichever can be read on `background` (WCAG 2.1's relative luminance)."""
    channels = np.array(mcolors.to_rgb(colour_of(background)))
    linear = np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ [0.2126, 0.7152, 0.0722])
    return INK if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "white"


def figure(
    width: float = 7.2, height: float = 4.0, columns: int = 1, rows: int = 1, **options: Any
) -> tuple[Figure, Any]:
    """A figure in the house's style and its axes; sizes in inches, `options` go to `plt.subplots`."""
    with matplotlib.rc_context(RC):
        return plt.subplots(rows, columns, figsize=(width, height), **options)


def panels(
    names: Iterable[str], width: float, height: float, *, below: bool = False, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each of `names`, side by side or one `below` the other; `options` as for `figure`."""
    names = list(names)
    shape = {"rows" if below else "columns": len(names)}
    drawn, grid = figure(width, height, squeeze=False, **shape, **options)
    for axes, name in zip(grid.flat, names, strict=True):
        axes.set_title(name, fontsize=10, loc="left", pad=3)
    return drawn, list(grid.flat)


def headline(on: Axes | Figure, finding: str, detail: str = "") -> None:
    """Write what the reader is to see, in bold, and below it the conditions under which it was found."""
    if isinstance(on, Axes):
        on.set_title(finding, loc="left", pad=24 if detail else 10)
        if detail:
            look: dict[str, Any] = {"color": QUIET, "va": "bottom", "label": alternative.DETAIL}
            note(on, detail, (0, 1), (0, 8), xycoords="axes fraction", **look)
        return
    # A line of figure text each; constrained layout knows only the suptitle, so both are in its box.
    on.suptitle(finding + ("\n" if detail else ""), x=0.01, ha="left", fontsize=12.5, fontweight="bold")
    if detail:
        inches_below_top = 0.30 + 0.23 * finding.count("\n")
        height = on.get_size_inches()[1]
        on.text(0.01, 1 - inches_below_top / height, detail, fontsize=9.5, color=QUIET, va="top")


def finish(on: Axes | Figure, finding: str, detail: str = "") -> Figure:
    """Write the headline, name the lines of every panel at their ends, and return the figure."""
    headline(on, finding, detail)
    whole = on.get_figure(root=True)
    assert whole is not None  # axes that were drawn on have a figure
    for axes in whole.axes:
        label_ends(axes)
    return whole


def measured(
    axes: Axes,
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    label: str = "_measured",
    *,
    colour: str = "worker 0",
    marker: str = "o",
    hollow: bool = False,
    **options: Any,
) -> Any:
    """Draw measurements as points in the colour of `colour`, or as rings, where they differ from the others."""
    defaults: dict[str, Any] = {"linestyle": "none", "zorder": 3}
    if hollow:
        defaults |= {"markerfacecolor": "white", "markeredgewidth": 1.2}
    else:
        defaults |= {"markeredgecolor": "white", "markeredgewidth": 0.8}
    (line,) = axes.plot(x, y, marker=marker, color=colour_of(colour), label=label, **(defaults | options))
    return line


def theory(
    axes: Axes,
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    label: str = "_theory",
    *,
    colour: str = "theory",
    **options: Any,
) -> Any:
    """Draw a prediction as a line without markers."""
    options = {"linewidth": 1.6, "zorder": 2} | options
    (line,) = axes.plot(x, y, color=colour_of(colour), label=label, **options)
    return line


def note(axes: Axes, words: str, at: tuple[Any, Any], shift: tuple[float, float], **options: Any) -> None:
    """Write `words` beside the point `at`, moved by `shift` points to the right and up."""
    axes.annotate(words, at, shift, textcoords="offset points", **({"fontsize": 9.5} | options))


def inside(axes: Axes, x: float, y: float, words: str, background: str, **options: Any) -> None:
    """Write `words` around a place that has the colour `background`, such as the middle of a bar."""
    defaults: dict[str, Any] = {"fontsize": 9, "color": ink_on(background)}
    axes.text(x, y, words, ha="center", va="center", **(defaults | options))


def mark(axes: Axes, x: float, words: str = "", **options: Any) -> None:
    """A dashed line across the axes at `x`, where something changes, with `words` beside its upper end."""
    defaults: dict[str, Any] = {"color": QUIET, "linewidth": 1, "linestyle": (0, (4, 2))}
    axes.axvline(x, **(defaults | options))
    if words:
        note(axes, words, (x, 1), (4, -4), xycoords=("data", "axes fraction"), va="top", color=QUIET)


def rows(
    axes: Axes,
    names: Sequence[str],
    limits: tuple[float, float] | None = None,
    places: Sequence[float] | np.ndarray | None = None,
) -> None:
    """Name the rows from top to bottom, at 0, 1, 2 … or `places`; `limits` are the axis's lower and upper end."""
    axes.set_yticks(range(len(names)) if places is None else places, names)
    axes.invert_yaxis()
    if limits:
        axes.set_ylim(*limits)
    axes.grid(visible=False, axis="y")


def stacked(
    axes: Axes,
    parts: Mapping[str, Sequence[float] | np.ndarray],
    colours: Mapping[str, str],
    height: float = 0.62,
    **options: Any,
) -> None:
    """A bar in each row, made of `parts` from left to right; each part is named where it is widest."""
    left = np.zeros(len(next(iter(parts.values()))))
    for name, widths in parts.items():
        colour, widths = colour_of(colours[name]), np.asarray(widths, dtype=float)
        axes.barh(range(len(left)), widths, height, left=left, color=colour, edgecolor="white")
        widest = int(np.argmax(widths))
        if widths[widest] > 0:
            inside(axes, left[widest] + widths[widest] / 2, widest, name, colour, **options)
        left = left + widths


def label_ends(axes: Axes, *, gap_points: float = 12.0, fontsize: float = 9.5) -> None:
    """Name each labelled line of `axes` that its legend does not name at its right end, in its colour.

    Labels that would overlap are moved apart until `gap_points` lie between their middles. Call it when all
    is drawn and the limits and scales are set.
    """
    legend = axes.get_legend()
    in_legend = {text.get_text() for text in legend.get_texts()} if legend else set()
    named = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    lines = [line for line in named if line.get_label() not in in_legend]
    if not lines:
        return
    ends = [np.asarray(line.get_xydata())[-1] for line in lines]
    whole = axes.get_figure(root=True)
    assert whole is not None  # axes that were drawn on have a figure
    whole.draw_without_rendering()  # the layout has to be settled before distances can be measured
    pixels_per_point = whole.dpi / 72
    heights = axes.transData.transform(ends)[:, 1] / pixels_per_point
    for line, end, shift in zip(lines, ends, spread(heights, gap_points) - heights, strict=True):
        look = {"color": _readable(str(line.get_color())), "fontsize": fontsize, "va": "center"}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        words, place = str(line.get_label()), tuple(end)
        note(axes, words, place, (8, float(shift)), annotation_clip=False, bbox=box, **look)


def spread(positions: Sequence[float] | np.ndarray, gap: float) -> np.ndarray:
    """`positions`, moved as little as needed (in the least-squares sense) to lie at least `gap` apart.

    Their order is kept. This is isotonic regression on positions less the room that the lower ones take.
    """
    from scipy.optimize import isotonic_regression  # here, since not every lesson waits for it to be imported

    order = np.argsort(positions, kind="stable")
    room = gap * np.arange(len(order))
    result = np.empty(len(order))
    if len(order):
        result[order] = isotonic_regression(np.asarray(positions, dtype=float)[order] - room).x + room
    return result


def _readable(colour: str) -> str:
    """`colour` darkened, where needed, until small text in it can be read on white."""
    channels = np.array(mcolors.to_rgb(colour))
    while float(channels @ [0.2126, 0.7152, 0.0722]) > 0.5:
        channels = channels * 0.94
    return mcolors.to_hex(tuple(channels))


def unit_axis(axis: Axis, unit: str) -> None:
    """Ticks with SI prefixes: 4 kB, 20 ms, 200 MB/s."""
    axis.set_major_formatter(EngFormatter(unit=unit))


def percent_axis(axis: Axis) -> None:
    """Ticks of fractions as per cent."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def log_ticks(axis: Axis) -> None:
    """Ticks at 1, 2, 5, 10 … of a logarithmic axis, and none between them."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())


def plain_ticks(axis: Axis, values: Iterable[float]) -> None:
    """Ticks at these values alone, written as people write numbers."""
    values = list(values)
    axis.set_ticks(values, [f"{value:,g}" for value in values])
    axis.set_minor_locator(NullLocator())


def power_axis(axes: Axes, values: Sequence[int], which: Literal["x", "y"] = "x") -> None:
    """A logarithmic axis of base 2 whose ticks are exactly `values`, such as 1, 2, 4, 8 workers."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    plain_ticks(axes.xaxis if which == "x" else axes.yaxis, values)
