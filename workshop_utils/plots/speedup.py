"""Lesson 01: Amdahl's and Gustafson's laws, and what real workers did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from workshop_utils.plots import style
from workshop_utils.scaling.laws import amdahl_speedup, gustafson_speedup

SERIAL_FRACTIONS = (0.01, 0.05, 0.25)


def laws() -> Figure:
    """Both laws against the number of workers, side by side, for some serial fractions."""
    _, (fixed_work, fixed_time) = style.figure(9.2, 4.4, columns=2, sharex=True, sharey=True)
    workers = np.geomspace(1, 1024, 101)
    for axes, law in ((fixed_work, amdahl_speedup), (fixed_time, gustafson_speedup)):
        style.theory(axes, workers, workers, "_perfect", colour="ideal", linestyle=(0, (1.5, 1.5)))
        for index, serial in enumerate(SERIAL_FRACTIONS):
            look: dict[str, Any] = {"colour": f"worker {index}", "linestyle": style.DASHES[index]}
            style.theory(axes, workers, law(serial, workers), f"{100 * serial:g} %", **look)
        style.power_axis(axes, [1, 4, 16, 64, 256, 1024])
        style.power_axis(axes, [1, 4, 16, 64, 256, 1024], "y")
        axes.set_xlabel("workers")
    fixed_work.set_ylabel("speed-up over one worker")
    style.headline(fixed_work, "The same work: a ceiling at 1 / s", "Amdahl 1967; dotted: perfect")
    return style.finish(
        fixed_time, "The same time, more work: no ceiling", "Gustafson 1988; s at the lines' ends"
    )


def measured(speedups: Mapping[int, Sequence[float]], serial_fraction: float, cores: int) -> Figure:
    """Speed-ups that were measured, by number of workers, over Amdahl's law with the fitted serial fraction.

    Each point is a median, with a bar from the lower to the upper quartile.
    """
    _, axes = style.figure(7.2, 4.2)
    sizes = sorted(speedups)
    workers = np.geomspace(1, 2 * sizes[-1], 101)
    style.theory(axes, workers, workers, "perfect", colour="ideal", linestyle=(0, (1.5, 1.5)))
    style.theory(
        axes, workers, amdahl_speedup(serial_fraction, workers), f"Amdahl, s = {100 * serial_fraction:.0f} %"
    )
    for size in sizes:
        low, middle, high = np.percentile(speedups[size], [25, 50, 75])
        axes.plot([size, size], [low, high], color=style.colour_of("torch_ddp"), linewidth=1.4, zorder=2)
        style.measured(axes, [size], [middle], colour="torch_ddp", markersize=8)
        style.note(axes, f"{middle:.2f}", (size, middle), (9, -11))
    style.mark(axes, cores, f"{cores} cores", linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    style.power_axis(axes, [size for size in (1, 2, 4, 8, 16, 32) if size <= 2 * sizes[-1]])
    style.power_axis(axes, [1, 2, 4, 8, 16, 32], "y")
    axes.set(xlabel="workers", ylabel="speed-up over one worker", ylim=(0.7, 2.4 * sizes[-1]))
    beyond = [size for size in sizes if size > cores]
    middle = {size: float(np.median(values)) for size, values in speedups.items()}
    best = max(middle, key=lambda size: middle[size])
    return style.finish(
        axes,
        f"{best} workers are {middle[best]:.1f} times as fast as one"
        + (f"; {beyond[-1]} share {cores} cores" if beyond else ""),
        "points: median and quartiles of the rounds; line: Amdahl's law, fitted up to the number of cores",
    )
