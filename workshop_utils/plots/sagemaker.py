"""Lesson 11: what threads and racks cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style


def threads(table: pd.DataFrame) -> Figure:
    """How many times as fast a worker is with more threads; `table` has step, width, threads, samples_per_second.

    Each point compares with one thread in the same step; a line goes through the medians.
    """
    _, axes = style.figure(6.4, 4.0)
    counts = sorted(int(count) for count in table["threads"].unique())
    style.theory(axes, counts, counts, "as many times as threads", colour="ideal")
    widths = sorted(int(width) for width in table["width"].unique())
    with_most = []
    for number, width in enumerate(widths):
        rows = table[table["width"] == width]
        one = rows[rows["threads"] == counts[0]].set_index("step")["samples_per_second"]
        gains = rows["samples_per_second"] / rows["step"].map(one)
        medians = gains.groupby(rows["threads"]).median()
        colour, marker = f"worker {number}", style.MARKERS[number]
        style.measured(axes, rows["threads"].to_numpy(), gains.to_numpy(), colour=colour, marker=marker)
        label = f"layers of {width:,} units"
        axes.plot(medians.index, medians, color=style.colour_of(colour), label=label)
        with_most.append(gains[rows["threads"] == counts[-1]])
    style.power_axis(axes, counts)
    axes.set(xlabel="threads of the worker", ylabel="times as fast as one thread", ylim=(0, None))
    finding = _threads_finding(with_most[0], with_most[-1], counts[-1])
    return style.finish(axes, finding, "one worker; points: measurements, lines: their medians")


def _threads_finding(narrow: pd.Series, wide: pd.Series, threads: int) -> str:
    """What all measurements of narrow and of wide layers with the most threads agree on."""
    if wide.min() <= 1.1:
        return f"Here and now, {threads} threads are not reliably faster than one"
    if narrow.max() < 1:
        return f"Here, {threads} threads pay only where matrices are large"
    if wide.min() > narrow.max():
        return f"Here, {threads} threads pay more where matrices are large"
    if narrow.min() > 1.1:
        return f"Here, {threads} threads pay, for small matrices as for large ones"
    return f"Here, {threads} threads pay where matrices are large; where they are small, it varies"


def racks(rows: Sequence[tuple[str, str, float, float]], detail: str) -> Figure:
    """Seconds of an all-reduce by algorithm and placement: (algorithm, placement, seconds or NaN, in theory)."""
    table = pd.DataFrame(rows, columns=["algorithm", "placement", "seconds", "theory"])
    figure, axes = style.figure(7.2, 3.4)
    algorithms, placements = (pd.factorize(table[name])[0] for name in ("algorithm", "placement"))
    heights = -placements - (placements.max() + 1.5) * algorithms
    for row, height, number in zip(rows, heights, placements, strict=True):
        algorithm, placement, seconds, theory = row
        ends = [height - 0.35, height + 0.35]
        axes.plot([theory] * 2, ends, color=style.COLOURS["theory"], linewidth=2)
        look: dict[str, Any] = {"colour": f"worker {number}", "marker": style.MARKERS[number]}
        style.measured(axes, [seconds], [height], **look)
        words, left = f"{algorithm.replace('_', '-')}, {placement}", ("axes fraction", "data")
        style.note(axes, words, (0, height), (-6, 0), xycoords=left, ha="right", va="center")
    axes.set(xlabel="seconds of one all-reduce", xlim=(0, None), yticks=[])
    axes.grid(axis="y", visible=False)
    return style.finish(figure, _racks_finding(table), detail)


def _racks_finding(table: pd.DataFrame) -> str:
    """How many times as long the last placement takes as the first, for algorithms measured in both."""
    seconds = table.groupby("algorithm", sort=False)["seconds"].agg(list)
    ratios = {str(name).replace("_", "-"): own[-1] / own[0] for name, own in seconds.items()}
    costs = [f"{name} × {ratio:.1f}" for name, ratio in ratios.items() if not math.isnan(ratio)]
    if not costs:
        return "In theory, a second rack makes every all-reduce slower"
    return f"What a second rack costs: {', '.join(costs)}"
