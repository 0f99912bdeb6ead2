"""Lesson 00: what workers recognise that have each seen half of the digits, and when a second one helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from workshop_utils.plots import style

# By the order of the sides: the worker alone, both workers, one process.
LOOKS = (("worker 0", "o", 0), ("data parallel", "s", 0), ("one process", "D", 1))
LOWEST = 85  # per cent, of the panel that enlarges the best


def recognised(curves: Mapping[str, np.ndarray], steps: int) -> Figure:
    """The percentage of the test images recognised against the step, for three sides; the last two once more, enlarged.

    `curves` has an array (seeds, evaluations) for each side, evaluated at equal intervals up to `steps`.
    """
    figure, panels = style.figure(9.6, 4.2, columns=2)
    ends = []
    for index, (name, curve) in enumerate(curves.items()):
        colour, marker, first = LOOKS[index]
        at = np.linspace(0, steps, curve.shape[1] + 1)[1:]
        ends.append(f"{name} {curve[:, -1].mean():.0f} %")
        for axes in panels if index else panels[:1]:
            band = style.colour_of(colour)
            axes.fill_between(at, curve.min(axis=0), curve.max(axis=0), color=band, alpha=0.2)
            look: dict[str, Any] = {
                "colour": colour,
                "marker": marker,
                "markevery": (first, 2),
                "linestyle": "solid",
            }
            style.measured(axes, at, curve.mean(axis=0), name, **look)
    for axes, lowest in zip(panels, (0, LOWEST), strict=True):
        axes.set(xlabel="step", ylim=(lowest, 100))
        axes.set_ylabel("test images recognised, %" + (f", from {lowest}" if lowest else ""))
    alone, together, whole = ends
    seeds = len(next(iter(curves.values())))
    finding = f"Recognised: {together}, {whole}, {alone}"
    return style.finish(figure, finding, f"mean of {seeds} seeds; band: smallest to largest")


def steps(times: Mapping[int, Mapping[str, Sequence[float]]]) -> Figure:
    """How long a step takes: one worker, two that exchange nothing, and two that do; a panel a number of images.

    `times` has the milliseconds of single runs by images in a step and by side, in this order. Bars are medians. What
    two workers take beyond two that exchange nothing is drawn as exchange and waiting.
    """
    names = [
        f"{images:,} images in a step" + ", another scale" * bool(place) for place, images in enumerate(times)
    ]
    drawn, panels = style.panels(names, 9.6, 3.1, sharey=True)
    factors = []
    for (images, sides), axes in zip(times.items(), panels, strict=True):
        alone, apart, both = (float(np.median(each)) for each in sides.values())
        factors.append(f"{alone / both:.2g} times as fast with {images:,} images in a step")
        parts = {
            "computing": (alone, apart, min(apart, both)),
            "exchange": (0, 0, max(0, both - apart)),
        }
        style.stacked(axes, parts, {"computing": "compute", "exchange": "send"}, fontsize=7)
        for row, each in enumerate(sides.values()):
            style.measured(
                axes, each, [row + 0.2] * len(each), colour="ideal", linestyle="none", markersize=4
            )
        axes.set(xlim=(0, None), xlabel="a step, in ms")
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5))
    style.rows(panels[0], list(next(iter(times.values()))))
    runs = len(next(iter(next(iter(times.values())).values())))
    finding = f"Two workers: {', '.join(factors)}".replace(" images in a step,", ",")
    return style.finish(
        drawn, finding, f"bars: medians of {runs} runs; points: single runs; exchange: with waiting"
    )
