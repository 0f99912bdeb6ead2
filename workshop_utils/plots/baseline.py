"""Lesson 01: where one worker's time and memory go, and why one worker is not enough."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from workshop_utils.plots import style
from workshop_utils.scaling.laws import training_flops
from workshop_utils.scaling.memory import TrainingMemory
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
        axes.text(1.01, row, f"{1000 * sum(seconds.values()):,.1f} ms", va="center", fontsize=9.5)
    style.rows(axes, [f"{batch:,}" for batch in medians])
    axes.set(xlim=(0, 1), xlabel="share of a step", ylabel="samples in a batch")
    style.percent_axis(axes.xaxis)
    axes.grid(visible=False)
    data = max(of_row["data"] for of_row in shares)
    small, large = (_percent(shares[index]["update"]) for index in (0, -1))
    finding = f"The update takes {small} of a small batch's step, {large} of a large one's"
    sliver = f"data, the yellow sliver, takes {100 * data:.1f} % at most"
    return style.finish(axes, finding, f"one core, medians; at the right the whole step; {sliver}")


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    return {phase: duration / sum(seconds.values()) for phase, duration in seconds.items()}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def memory(measured: Mapping[str, float], predicted: TrainingMemory) -> Figure:
    """Memory after each stage of a first step: what the process was seen to hold, over what the formulas say.

    `measured` are bytes above the start by stage: model, forward, backward, update.
    """
    parts = {
        "model": ("parameters",),
        "forward": ("parameters", "activations"),
        "backward": ("parameters", "gradients"),
        "update": ("parameters", "gradients", "optimizer"),
    }
    colours = {"parameters": "compute", "activations": "load", "gradients": "send", "optimizer": "#9DB0BF"}
    _, axes = style.figure(7.2, 4.2)
    named = set()
    for x, stage in enumerate(parts):
        bottom = 0.0
        for part in parts[stage]:
            height, colour = getattr(predicted, part) / 1e6, style.colour_of(colours[part])
            axes.bar(x, height, bottom=bottom, width=0.62, color=colour, edgecolor="white")
            if part not in named:
                label = "optimizer's\nstate" if part == "optimizer" else part
                style.inside(axes, x, bottom + height / 2, label, colour)
                named.add(part)
            bottom += height
    seen = [measured[stage] / 1e6 for stage in parts]
    style.measured(axes, range(len(parts)), seen, colour="one process", marker="D", markersize=8)
    style.note(axes, "measured", (0, seen[0]), (0, 10), ha="center")
    axes.set_xticks(range(len(parts)), ["model made", "after forward", "after backward", "after update"])
    axes.set(ylabel="memory, in MB", ylim=(0, 1.12 * max(*seen, bottom)))
    axes.grid(visible=False, axis="x")
    total = predicted.parameters + predicted.gradients + predicted.optimizer
    finding = f"Training holds {total / predicted.parameters:.0f} times the model, and the activations"
    detail = "bars: the formulas; diamonds: what the operating system counted for this process"
    return style.finish(axes, finding, detail)


def time_to_train() -> Figure:
    """Published training runs: device-years against 6 · N · D, over what devices at 40 % of their peak would need."""
    _, axes = style.figure(7.4, 4.6)
    flops = [training_flops(run.parameters, run.tokens) for run in TRAINING_RUNS]
    for device, peak in PEAK_FLOPS_PER_SECOND.items():
        own = [work for run, work in zip(TRAINING_RUNS, flops, strict=True) if run.device == device]
        span = np.array([min(own) / 3, max(own) * 2.5])
        needed = span / (UTILISATION * peak) / YEAR_SECONDS
        style.theory(axes, span, needed, f"{device} at {_percent(UTILISATION)}")
    for run, work in zip(TRAINING_RUNS, flops, strict=True):
        years = run.device_hours * 3600 / YEAR_SECONDS
        colour, marker = ("worker 0", "o") if run.device == "A100" else ("worker 5", "s")
        style.measured(axes, [work], [years], colour=colour, marker=marker, markersize=8)
        # The LLaMA points lie just under the line of their device, the others on theirs.
        offset, side = ((9, -9), "left") if run.name.startswith("LLaMA") else ((-9, 6), "right")
        style.note(axes, run.name, (work, years), offset, ha=side)
    axes.set(xscale="log", xlabel="training compute 6 · N · D, in floating-point operations")
    axes.set(yscale="log", ylabel="years on one GPU")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.set_xlim(right=max(flops) * 2.5)
    longest = max(run.device_hours for run in TRAINING_RUNS) * 3600 / YEAR_SECONDS
    detail = "points: GPU hours that were reported; lines: 6 · N · D at 40 % of the peak"
    return style.finish(axes, f"One GPU would have needed up to {float(f'{longest:.2g}'):,.0f} years", detail)
