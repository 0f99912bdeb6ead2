"""Lesson 01: where one worker's time and memory go, and why one worker is not enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
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


def roofline(layers: Mapping[int, tuple[float, float]], roofs: tuple[float, float]) -> Figure:
    """A linear layer at several batches below the roofs of the device (Williams, Waterman and Patterson 2009).

    `layers` has, by batch, operations a byte and operations a second; `roofs` are bytes a second that can be read, and
    operations a second.
    """
    _, axes = style.figure(7.6, 4.4)
    bandwidth, fastest = roofs
    ridge = fastest / bandwidth
    low = min(intensity for intensity, _ in layers.values()) / 2
    high = 2 * max(intensity for intensity, _ in layers.values())
    style.theory(axes, [low, ridge], [low * bandwidth / 1e9, fastest / 1e9])
    style.theory(axes, [ridge, high], [fastest / 1e9] * 2)
    read = f"moving: {bandwidth / 1e9:.1f} GB/s"
    middle = np.sqrt(low * ridge)
    style.note(axes, read, (middle, middle * bandwidth / 1e9), (-8, 4), ha="right")
    multiplied = f"multiplying: {fastest / 1e9:,.0f} GFLOP/s"
    style.note(axes, multiplied, (high, fastest / 1e9), (0, 5), ha="right")
    floor = low * bandwidth / 1e9
    style.mark(axes, ridge)
    style.note(axes, f"ridge: {ridge:.0f} FLOP/byte", (ridge, floor), (5, -4), color=style.QUIET)
    for batch, (intensity, rate) in layers.items():
        style.measured(axes, [intensity], [rate / 1e9], colour="compute", markersize=8)
        if batch == min(layers):
            style.note(axes, f"batch {batch}", (intensity, rate / 1e9), (2, -15))
        else:
            style.note(axes, f"{batch}", (intensity, rate / 1e9), (0, -15), ha="center")
    axes.set(xscale="log", xlabel="operations for each byte moved, in FLOP/byte")
    axes.set(yscale="log", ylabel="speed, in GFLOP/s", xlim=(low, high), ylim=(floor / 2, 2 * fastest / 1e9))
    for axis in (axes.xaxis, axes.yaxis):
        style.log_ticks(axis)
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    shares = [_percent(layers[batch][1] / fastest) for batch in (min(layers), max(layers))]
    finding = (
        f"Batch {min(layers)} reaches {shares[0]} of the core's arithmetic; batch {max(layers)}, {shares[1]}"
    )
    return style.finish(
        axes, finding, "points: a linear layer; lines: how fast one core moves bytes, and multiplies"
    )


# What stands in memory, from the bottom up, and how it is drawn.
KINDS = {
    "parameters": "compute",
    "optimizer's state": "#9DB0BF",
    "activations": "load",
    "gradients": "send",
    "gradients of activations": style.tint("send", 0.45),
    "temporary": "wait",
}


def memory(rows: Sequence[Mapping[str, Any]], rule: float) -> Figure:
    """Memory after each operation of a step: areas are tensors, by kind, points the process.

    `rows` are those of `training.memory.StepMemory.table`; `rule` is the bytes that a rule of thumb gives. Operations
    that change little are left out, but for the first of a phase.
    """
    totals = np.array([_held(row) for row in rows])
    moves = np.diff(totals, prepend=0)
    first = [index for index, row in enumerate(rows) if not index or row["phase"] != rows[index - 1]["phase"]]
    kept = sorted({*first, *np.flatnonzero(np.abs(moves) > 0.01 * totals.max()).tolist()})
    _, axes = style.figure(9.6, 4.6)
    rows, held, moves = [rows[index] for index in kept], totals[kept], moves[kept]
    _areas(axes, rows)
    ends = (-0.5, len(rows) - 0.5)
    style.theory(axes, ends, [rule / 1e6] * 2, f"rule: {rule / 1e6:.0f} MB", linestyle=style.DASHES[1])
    top, process = int(held.argmax()), [row["process"] / 1e6 for row in rows]
    style.note(axes, f"tensors: {held[top]:.0f} MB", (top + 0.5, held[top]), (4, -6))
    style.note(axes, f"process: {process[top]:.0f} MB", (top + 0.5, process[top]), (4, -4))
    phases = [row["phase"] for row in rows]
    for phase in dict.fromkeys(phases):
        style.mark(axes, phases.index(phase) - 0.5, phase)
    axes.set(xlim=ends, ylabel="memory, in MB", ylim=(0, 1.15 * max(process)))
    axes.grid(visible=False, axis="x")
    # What frees memory is not named, since a tensor goes before the next operation begins.
    ticks = [
        row["operation"] if at > 0 and moves[at] > 0.01 * held.max() else "" for at, row in enumerate(rows)
    ]
    axes.set_xticks(range(len(rows)), ticks, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_xlabel("operations that allocate, in their order; those that free are not named")
    over, where = 100 * (held[top] / (rule / 1e6) - 1), phases[top] + " pass" * (phases[top] != "update")
    detail = "areas: PyTorch's tensors; points: the process, with its matrix library's buffers"
    return style.finish(
        axes, f"In this step tensors peak {over:.0f} % above the rule, in the {where}", detail
    )


def _held(row: Mapping[str, Any]) -> float:
    """MB of all tensors."""
    return float(sum(row["tensors"].values()) / 1e6)


def _areas(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """The tensors of each row, one kind upon the other, and points for the process."""
    edges, bottom = np.arange(len(rows) + 1) - 0.5, np.zeros(len(rows))
    for kind, colour in KINDS.items():
        height = np.array([row["tensors"].get(kind, 0) for row in rows]) / 1e6
        axes.stairs(bottom + height, edges, baseline=bottom, fill=True, color=style.colour_of(colour))
        if height.any():
            tallest = np.flatnonzero(height >= 0.99 * height.max())
            x = tallest[(len(tallest) - 1) * 3 // 4]  # not on a line
            label = kind.replace(" of ", "\nof ")
            style.inside(axes, x, bottom[x] + height[x] / 2, label, colour, fontsize=8.5)
        bottom += height
    process = [row["process"] / 1e6 for row in rows]
    style.measured(axes, range(len(rows)), process, colour="server", marker="D", markersize=5)


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
    return style.finish(efficiencies, finding, "g: the share of the N workers' time that is not shared")


def step_times(
    seconds: Mapping[int, Sequence[float]], model: tuple[float, float, float], fitted: int
) -> Figure:
    """Steps of several workers over a + b/N + c(N − 1) and rivals; Karp and Flatt's fraction over (a + cN)/(a + b).

    `seconds` are those of each run, by number of workers from 1 on; `model` is a, b, c, from the medians up to `fitted`
    workers, as the rivals are.
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
    last = [a + b / n[-1] + c * (n[-1] - 1)]  # what the model and its rivals predict of the most workers
    for rival, terms, dashes in (("Amdahl: a + b/N", 2, 2), ("a + b/N + c log₂ N", 3, 3)):
        rows, line = (
            np.stack([each**0, 1 / each, np.log2(each)][:terms], axis=1) for each in (sizes[known], n)
        )
        rivals = np.linalg.lstsq(rows, middle[known])[0]
        look = {"colour": "ideal", "linestyle": style.DASHES[dashes]}
        style.theory(times, n, line @ rivals, rival, **look)
        last.append((line @ rivals)[-1])
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
    own, _, other = (100 * abs(each / middle[-1] - 1) for each in last)
    finding = f"{sizes[-1]} workers: c(N − 1) is {own:.1f} % off, c log₂ N {other:.0f} %"
    detail = "dots: fitted; dashed: predicted; rings: measured"
    style.headline(times, finding, detail)
    finding = f"Karp–Flatt: e {'rises' if (np.diff(serial) > 0).all() else 'goes'}"
    finding += f" from {_percent(serial[0])} to {_percent(serial[-1])}"
    return style.finish(fractions, finding, "of the medians; above 100 %: slower than one worker")
