"""Figures of the lesson on PyTorch: what hides behind the backward pass, and what each rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop_utils.plots import style
from workshop_utils.scaling.memory import TrainingMemory
from workshop_utils.scaling.overlap import Phase

Timeline = Mapping[int, Sequence[Phase]]

PHASES = {"forward": style.tint("compute", 0.45), "backward": "compute", "wait": "wait", "all-reduce": "send"}


def steps_with_communication(timelines: Mapping[str, Timeline], finding: str, detail: str) -> Figure:
    """Two lanes a rank, what it computes and what it sends, in one step of each of `timelines`, on one time axis."""
    ranks = max(len(timeline) for timeline in timelines.values())
    titles = [f"{name}{_waited(timeline)}" for name, timeline in timelines.items()]
    height = 0.95 + (0.5 * ranks + 0.5) * len(timelines)
    figure, grid = style.panels(titles, 9.6, height, below=True, sharex=True)
    ends = [max(phase.end for each in timeline.values() for phase in each) for timeline in timelines.values()]
    for axes, timeline, end in zip(grid, timelines.values(), ends, strict=True):
        for row, phases in enumerate(timeline.values()):
            _row(axes, row, phases, max(ends))
        style.mark(axes, end)
        style.rows(axes, [f"rank {rank}" for rank in timeline], (len(timeline) - 0.45, -0.55))
    axes.set(xlim=(0, 1.03 * max(ends)), xlabel="time since the step began")
    style.unit_axis(axes.xaxis, "s")
    return style.finish(figure, finding, detail)


def _waited(timeline: Timeline) -> str:
    """How long the ranks waited on the mean, for a title; nothing where that was not reported."""
    waiting = [phase for phases in timeline.values() for phase in phases if phase.kind == "wait"]
    waits = [phase.end - phase.start for phase in waiting]
    return f": waited {1000 * np.mean(waits):.0f} ms for gradients" if waits else ""


def _row(axes: Axes, row: int, phases: Sequence[Phase], last: float) -> None:
    """The upper lane computes or waits; the lower one communicates, in lanes of its own where all-reduces overlap."""
    free: list[float] = []  # when each of the lower lanes is free again
    lanes = []
    for phase in phases:
        if phase.kind == "all-reduce":
            lane = next((lane for lane, until in enumerate(free) if until <= phase.start), len(free))
            free[lane : lane + 1] = [phase.end]
            lanes.append((lane, phase))
            continue
        colour, width = style.colour_of(PHASES[phase.kind]), phase.end - phase.start
        _bar(axes, phase, row - 0.37, 0.36, colour)
        if row == 0 and width > 0.07 * last:
            style.inside(axes, phase.start + width / 2, row - 0.19, phase.kind, colour, fontsize=8.5)
    height = 0.36 / max(1, len(free))
    for lane, phase in lanes:
        _bar(axes, phase, row + 0.01 + lane * height, height, style.colour_of(PHASES["all-reduce"]))


def _bar(axes: Axes, phase: Phase, top: float, height: float, colour: str) -> None:
    left, width = phase.start, phase.end - phase.start
    axes.barh(top, width, height, left, align="edge", color=colour, edgecolor="white", linewidth=0.8)


class Held(NamedTuple):
    """What a rank was measured to hold, in bytes, and what it should by a formula."""

    measured: float
    expected: TrainingMemory
    ours: bool = True


def memory_per_rank(ways: Mapping[str, Held], workers: int, parameters: int) -> Figure:
    """What each rank holds between two steps: bars of the formula, in its parts, and diamonds of what was measured."""
    _, axes = style.figure(8.2, 0.52 * len(ways) + 1.9)
    colours = {"parameters": "compute", "gradients": "send", "optimizer": "#9DB0BF"}
    parts = {part: [getattr(held.expected, part) / 1e6 for held in ways.values()] for part in colours}
    style.stacked(axes, parts, colours, 0.6)
    for row, held in enumerate(ways.values()):
        own = "one process" if held.ours else "torch_ddp"
        style.measured(axes, [held.measured / 1e6], [row], colour=own, marker="D", markersize=8)
    style.rows(axes, list(ways))
    largest = max(max(held.measured, held.expected.total) for held in ways.values()) / 1e6
    axes.set(xlabel="held by one rank, in MB", xlim=(0, 1.08 * largest))
    totals = [held.expected.total for held in ways.values()]
    finding = f"Sharding all three, a rank holds 1/{max(totals) / min(totals):.2g} of what it held"
    case = f"Adam, {parameters / 1e6:.1f} million parameters, N = {workers}"
    return style.finish(axes, finding, f"{case}; bars: ZeRO's formulas, diamonds: measured")
