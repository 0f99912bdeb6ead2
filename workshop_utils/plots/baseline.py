"""Lesson 01: where one worker's time and memory go, and why one worker is not enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from workshop_utils.plots import style
from workshop_utils.scaling.laws import amdahl_speedup, gustafson_speedup, karp_flatt, training_flops
from workshop_utils.scaling.published import PEAK_FLOPS_PER_SECOND, TRAINING_RUNS, UTILISATION

# The phases of a step, in order, and the two that grow with the batch in hues of their own.
PHASES = {"data": "load", "forward": "#9DB0BF", "backward": "compute", "update": "server"}
YEAR_SECONDS = 365.25 * 24 * 3600


def step_shares(medians: Mapping[int, Mapping[str, float]]) -> Figure:
    """Each phase's share of a step, for each batch size, from seconds by phase by batch size."""
    _, axes = style.figure(7.6, 0.62 * len(medians) + 1.7)
    shares = [_shares(seconds) for seconds in medians.values()]
    for row, (of_row, seconds) in enumerate(zip(shares, medians.values(), strict=True)):
        left = 0.0
        for phase, share in of_row.items():
            colour = style.colour_of(PHASES[phase])
            axes.barh(row, share, left=left, height=0.66, color=colour, edgecolor="white")
            # Each phase is named once, where it is widest.
            is_widest = share == max(other[phase] for other in shares)
            label = f"{phase}\n{_percent(share)}" if is_widest else _percent(share)
            if share > 0.06:
                style.inside(axes, left + share / 2, row, label, colour, linespacing=1.2)
            left += share
        whole, update = 1000 * sum(seconds.values()), 1000 * seconds["update"]
        axes.text(1.01, row, f"{whole:,.1f} ms,\nupdate {update:,.1f} ms", va="center", fontsize=9)
    style.rows(axes, [f"{batch:,}" for batch in medians])
    axes.set(xlim=(0, 1), xlabel="share of a step", ylabel="samples in a batch")
    style.percent_axis(axes.xaxis)
    axes.grid(visible=False)
    data = max(of_row["data"] for of_row in shares)
    small, large = (_percent(shares[index]["update"]) for index in (0, -1))
    finding = f"The update takes {small} of a small batch's step, {large} of a large one's"
    sliver = f"data, the yellow sliver, takes {100 * data:.1f} % at most"
    return style.finish(axes, finding, f"one core, medians; right: time of the whole step; {sliver}")


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    return {phase: duration / sum(seconds.values()) for phase, duration in seconds.items()}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def memory(
    formulas: Mapping[int, Mapping[str, float]],
    measured: Sequence[Sequence[float]],
    peaks: Sequence[float],
) -> Figure:
    """Memory in one step, a panel a batch: bars are `formulas`, bytes of each part by batch; points are `measured`.

    `measured` has the bytes of each batch before the step and after its forward pass, its backward pass and its update;
    `peaks` the most that there were in between, NaN where the system does not tell.
    """
    kept = {"parameters": "compute", "optimizer": "#9DB0BF"}
    parts = [kept, kept | {"activations": "load"}, *[kept | {"gradients": "send"}] * 2]
    drawn, panels = style.panels([f"batch {batch:,}" for batch in formulas], 9.6, 4.2, sharey=True)
    for index, (axes, sizes) in enumerate(zip(panels, formulas.values(), strict=True)):
        for x, colours in enumerate(parts):
            bottom = 0.0
            for part, colour in colours.items():
                height = sizes[part] / 1e6
                axes.bar(x, height, 0.86, bottom, color=style.colour_of(colour), edgecolor="white")
                bottom += height
                middle = bottom - height / 2
                if axes is panels[-1] and part == "activations":
                    style.inside(axes, x, middle, part, colour, fontsize=7, rotation=90)
                elif axes is panels[-1] and x == len(parts) - 1:
                    words = "Adam's state" if part == "optimizer" else part
                    style.note(axes, words, (x, middle), (22, 0), va="center")
        style.measured(axes, range(4), np.divide(measured[index], 1e6), colour="server", marker="D")
        style.theory(
            axes, (-0.45, 3.45), [peaks[index] / 1e6] * 2, colour="server", linestyle=style.DASHES[1]
        )
        axes.set_xticks(
            range(4), ["before", "after\nforward", "after\nbackward", "after\nupdate"], fontsize=8
        )
        axes.grid(visible=False, axis="x")
    panels[0].set_ylabel("memory, in MB")
    first, last = measured[0], measured[-1]
    batches = list(formulas)
    grown = (last[1] - last[0]) / (first[1] - first[0])
    finding = f"{batches[-1] / batches[0]:g} times the batch: {grown:.1f} times the activations"
    finding += f", {peaks[-1] / peaks[0]:.1f} times the peak" if np.isfinite(peaks).all() else ""
    detail = "bars: formulas; points: what the operating system counts; dashed: its peak"
    return style.finish(drawn, finding, detail)


def time_to_train() -> Figure:
    """Published training runs: device-years against 6 · P · D, over what devices at 40 % of their peak would need."""
    _, axes = style.figure(7.4, 4.6)
    flops = [training_flops(run.parameters, run.tokens) for run in TRAINING_RUNS]
    for device, peak in PEAK_FLOPS_PER_SECOND.items():
        own = [work for run, work in zip(TRAINING_RUNS, flops, strict=True) if run.device == device]
        span = np.array([min(own) / 3, max(own) * 2.5])
        needed = span / (UTILISATION * peak) / YEAR_SECONDS
        style.theory(axes, span, needed, f"{device}, {peak / 1e12:.0f} TFLOP/s, at {_percent(UTILISATION)}")
    for run, work in zip(TRAINING_RUNS, flops, strict=True):
        years = run.device_hours * 3600 / YEAR_SECONDS
        colour, marker = ("worker 0", "o") if run.device == "A100" else ("worker 5", "s")
        style.measured(axes, [work], [years], colour=colour, marker=marker, markersize=8)
        # The LLaMA points lie on or under the line of their device, the others above theirs.
        offset, side = ((9, -9), "left") if run.name.startswith("LLaMA") else ((-9, 6), "right")
        style.note(axes, run.name, (work, years), offset, ha=side)
    axes.set(xscale="log", xlabel="training compute 6 · P · D, in floating-point operations")
    axes.set(yscale="log", ylabel="GPU years")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.set_xlim(right=max(flops) * 2.5)
    seconds = np.array([run.device_hours * 3600 for run in TRAINING_RUNS])
    used = flops / seconds / [PEAK_FLOPS_PER_SECOND[run.device] for run in TRAINING_RUNS]
    share = f"{100 * min(used):.0f} to {_percent(max(used))}"
    detail = f"circles (A100), squares (H100): reported hours, in which 6 · P · D is {share} of the peak"
    times = []
    for index in (seconds.argmin(), seconds.argmax()):
        years = float(f"{seconds[index] / YEAR_SECONDS:.2g}")
        run = TRAINING_RUNS[index]
        times.append(f"{years:,.0f} {run.device} years ({run.name.rpartition(' ')[2]})")
    return style.finish(axes, f"From {times[0]} to {times[1]}", detail)


def laws() -> Figure:
    """Amdahl's speed-up and Gustafson's efficiency against the workers, for some fractions that cannot be shared."""
    _, (speedups, efficiencies) = style.figure(9.2, 4.2, columns=2, sharex=True)
    workers = np.geomspace(1, 1024, 101)
    for index, fraction in enumerate((0.01, 0.05, 0.25)):
        colour, percent = f"worker {index}", _percent(fraction)
        look: dict[str, Any] = {"colour": colour, "linestyle": style.DASHES[index]}
        style.theory(speedups, workers, amdahl_speedup(fraction, workers), f"s = {percent}", **look)
        speedups.axhline(1 / fraction, color=style.colour_of(colour), linewidth=0.6)
        efficiency = gustafson_speedup(fraction, workers) / workers
        style.theory(efficiencies, workers, efficiency, f"g = {percent}", **look)
    perfect: dict[str, Any] = {"colour": "ideal", "linestyle": (0, (1.5, 1.5))}
    style.theory(speedups, workers, workers, **perfect)
    fixed: dict[str, Any] = {"linestyle": style.DASHES[3]}
    style.theory(efficiencies, workers, amdahl_speedup(0.05, workers) / workers, "Amdahl, s = 5 %", **fixed)
    for axes in (speedups, efficiencies):
        style.power_axis(axes, [1, 4, 16, 64, 256, 1024])
        axes.set_xlabel("workers")
    style.power_axis(speedups, [1, 4, 16, 64, 256, 1024], "y")
    speedups.set_ylabel("times as fast as one worker")
    style.percent_axis(efficiencies.yaxis)
    efficiencies.set(ylabel="efficiency: speed-up ÷ workers", ylim=(0, 1.04))
    style.headline(
        speedups, "Amdahl: a ceiling at 1 / s", "the same work; thin: 1 / s; dotted, grey: perfect"
    )
    finding = "Gustafson: efficiency stays above 1 − g"
    return style.finish(efficiencies, finding, "g: share of N workers' time; s: of one worker's")


def step_times(
    seconds: Mapping[int, Sequence[float]], model: tuple[float, float, float], fitted: int, limit: float
) -> Figure:
    """Steps of several workers over a + b/N + c(N − 1) and rivals; Karp and Flatt's fraction over (a + cN)/(a + b).

    `seconds` are those of each run, by number of workers from 1 on; `model` is a, b, c, from up to `fitted` workers. It
    passes if no median beyond them is farther than the share `limit` from its prediction.
    """
    a, b, c = model
    _, (times, fractions) = style.figure(9.6, 4.2, columns=2)
    sizes = np.array(sorted(seconds))
    middle = np.array([np.median(seconds[size]) for size in sizes])
    serial = karp_flatt(middle[0], middle[1:], sizes[1:])
    for first, last, name in ((1, fitted, False), (fitted, sizes[-1], True)):
        n = np.geomspace(first, last, 101)
        look: dict[str, Any] = {"linestyle": style.DASHES[name]}
        label = ("a + b/N + c(N − 1)", "(a + cN)/(a + b)") if name else ("_theory", "_theory")
        style.theory(times, n, a + b / n + c * (n - 1), label[0], **look)
        several = n[n > 1.99]  # of one worker there is no fraction
        style.theory(fractions, several, (a + c * several) / (a + b), label[1], **look)
    n, known = np.geomspace(1, sizes[-1], 101), sizes <= fitted
    for rival, terms, dashes in (("Amdahl: a + b/N", 2, 2), ("a + b/N + c log₂ N", 3, 3)):
        rows, line = (
            np.stack([each**0, 1 / each, np.log2(each)][:terms], axis=1) for each in (sizes[known], n)
        )
        rivals = np.linalg.lstsq(rows, middle[known])[0]
        look = {"colour": "ideal", "linestyle": style.DASHES[dashes]}
        style.theory(times, n, line @ rivals, rival, **look)
        if terms == 2:
            flat = np.full(2, rivals[0] / sum(rivals))
            style.theory(fractions, (2, sizes[-1]), flat, "Amdahl: flat", **look)
    for size, runs in seconds.items():
        style.measured(times, [size] * len(runs), runs, colour="ring", hollow=size > fitted)
    for size, fraction in zip(sizes[1:], serial, strict=True):
        style.measured(fractions, [size], [fraction], colour="ring", hollow=size > fitted)
    for axes, ticks in ((times, sizes), (fractions, sizes[1:])):
        style.power_axis(axes, [*ticks])
        axes.set(xlabel="workers", ylim=(0, None))
    times.set_ylabel("time of a step, in s")
    fractions.set_ylabel("Karp–Flatt fraction e")
    style.percent_axis(fractions.yaxis)
    off = np.abs(middle / (a + b / sizes + c * (sizes - 1)) - 1)[~known].max()
    verdict = "passed" if off <= limit else "failed"
    finding = f"Predictions off by up to {100 * off:.1f} %: {verdict}"
    detail = f"dots: fitted; dashed: predicted; rings: measured; test: within {_percent(limit)}"
    style.headline(times, finding, detail)
    finding = f"Karp–Flatt: e {'rises' if (np.diff(serial) > 0).all() else 'goes'}"
    finding += f" from {_percent(serial[0])} to {_percent(serial[-1])}"
    return style.finish(fractions, finding, "of the medians; above 100 %: slower than one worker")
