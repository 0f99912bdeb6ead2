"""Figures of the lesson on PyTorch: what hides behind the backward pass, and what each rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETLEFT, CARETRIGHT

from workshop_utils.plots import style
from workshop_utils.scaling.memory import mixed_precision_adam, sharded, training_memory


class Step(NamedTuple):
    """A rank's step, in seconds: when which part ended, and its all-reduces, each with start, end and bytes."""

    start: float
    forward: float
    backward: float  # the last gradient has been computed
    end: float  # all gradients have been reduced
    sent: Sequence[tuple[float, float, int]]

    @property
    def exposed(self) -> float:
        """Communication that the backward pass does not hide."""
        return self.end - self.backward


def steps_with_communication(panels: Mapping[str, Sequence[Step]], finding: str, detail: str) -> Figure:
    """Two lanes a rank, what it computes and what it sends, in one step; a panel for each of `panels`."""
    ranks = max(len(steps) for steps in panels.values())
    figure, grid = style.panels(
        panels, 9.6, 0.95 + (0.5 * ranks + 0.5) * len(panels), below=True, sharex=True
    )
    last = max(step.end - step.start for steps in panels.values() for step in steps)
    for axes, steps in zip(grid, panels.values(), strict=True):
        for row, step in enumerate(steps):
            _row(axes, row, step, last)
        style.rows(axes, [f"rank {rank}" for rank in range(len(steps))], (len(steps) - 0.45, -0.55))
    axes.set(xlim=(0, 1.02 * last), xlabel="time since the step began")
    style.unit_axis(axes.xaxis, "s")
    return style.finish(figure, finding, detail)


def _row(axes: Axes, row: int, step: Step, last: float) -> None:
    """The upper lane computes, then waits; the lower one has the all-reduces, those under way at once in turn."""
    compute, wait = style.colour_of("compute"), style.colour_of("wait")
    edges = np.array([step.start, step.forward, step.backward, step.end]) - step.start
    for name, colour, left, right in zip(
        ("forward", "backward", "exposed"),
        (style.tint(compute, 0.45), compute, wait),
        edges,
        edges[1:],
        strict=False,
    ):
        words = f"{1000 * (right - left):.0f} ms" if name == "exposed" else name
        _bar(axes, row - 0.37, left, right, colour, words if right - left > 0.07 * last else "")
    done = 0.0
    for number, (start, end, _) in enumerate(step.sent, 1):
        # One bucket is sent after the other: one that is handed over waits until those before it are done.
        left, right = max(start - step.start, done), end - step.start
        done = right
        _bar(axes, row + 0.01, left, right, style.colour_of("send"), f"{number}")


def _bar(
    axes: Axes, top: float, left: float, right: float, colour: str, words: str, height: float = 0.36
) -> None:
    axes.barh(top, right - left, height, left, align="edge", color=colour, edgecolor="white")
    style.inside(axes, (left + right) / 2, top + height / 2, words, colour, fontsize=8.5)


# Of a step: "gather", "forward", "backward" or "reduce", its unit's number from 0 on, its start and its end.
Piece = tuple[str, int, float, float]
LANES = {"gather": 0, "forward": 1, "backward": 1, "reduce": 2}


def steps_by_unit(
    panels: Mapping[str, tuple[Sequence[Piece], Sequence[Piece]]], finding: str, detail: str
) -> Figure:
    """Three lanes, what a rank gathers, computes and reduces in one step; a panel for each of `panels`.

    A panel has the pieces that were measured, as bars with their units' numbers, and those that were predicted, as
    thin bars below; all in seconds since the step began. Grey is where the rank waits, with the milliseconds.
    """
    figure, grid = style.panels(panels, 9.6, 0.95 + 1.85 * len(panels), below=True, sharex=True)
    compute, send, wait = (style.colour_of(name) for name in ("compute", "send", "wait"))
    colours = {"gather": send, "forward": style.tint(compute, 0.45), "backward": compute, "reduce": send}
    last = max(end for both in panels.values() for pieces in both for *_, end in pieces)
    for axes, (measured, predicted) in zip(grid, panels.values(), strict=True):
        for kind, unit, start, end in measured:
            _bar(axes, LANES[kind] - 0.28, start, end, colours[kind], f"{unit + 1}", 0.5)
        for kind, _, start, end in predicted:
            _bar(axes, LANES[kind] + 0.25, start, end, style.INK, "", 0.13)
        for kind in ("forward", "backward"):
            begin = min(start for each, _, start, _ in measured if each == kind)
            style.note(axes, kind, (begin, 0.72), (0, 2), fontsize=8.5)
        busy = sorted((start, end) for kind, _, start, end in measured if LANES[kind] == LANES["forward"])
        for left, right in np.reshape([0, *np.ravel(busy), max(end for *_, end in measured)], (-1, 2)):
            words = f"{1000 * (right - left):.0f}" if right - left > 0.02 * last else ""
            _bar(axes, 0.72, left, right, wait, words, 0.5)
        style.rows(axes, ["gathers", "computes", "reduces"], (2.55, -0.45))
    axes.set(xlim=(0, 1.01 * last), xlabel="time since the step began")
    style.unit_axis(axes.xaxis, "s")
    return style.finish(figure, finding, detail)


def memory_by_ranks(
    counts: Sequence[int], held: Mapping[str, Mapping[str, tuple[int, Sequence[float]]]]
) -> Figure:
    """Bytes a parameter that a rank holds between two steps: ZeRO's stages as lines, and as points.

    A panel for float32, one for mixed precision. For each, `held` has by name of the way its stage, and the bytes a
    parameter that were measured with each of `counts`. In stage 3 FSDP2's triangle points there from the left, that
    of our own way from the right.
    """
    figure, grid = style.panels(held, 8.4, 3.2, sharey=True)
    most, saved = 2 * max(counts), []
    ranks, wholes = np.geomspace(1, most), (training_memory(1), mixed_precision_adam(1))
    colours = ("one process", *style.MUTED[:3])
    markers: tuple[Any, ...] = (*style.MARKERS[:3], CARETRIGHT, CARETLEFT)
    for axes, whole, ways in zip(grid, wholes, held.values(), strict=True):
        for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2, formula", "ZeRO-3")):
            line = sharded(whole, ranks, stage).total + 0 * ranks
            style.theory(axes, ranks, line, name, colour=colours[stage])
        for name, (stage, nbytes) in ways.items():
            ours, colour = name.startswith("our "), colours[stage]
            style.measured(axes, counts, nbytes, colour=colour, marker=markers[stage + ours], markersize=9)
            if stage == 3 and axes is grid[0]:
                key, height = ("◀", 4) if ours else ("▶", 17)
                style.note(axes, f"{key} {name}", (1, 0), (2, height), color=colour)
        last = {stage: nbytes[-1] for stage, nbytes in ways.values()}
        saved.append(1 - last[1] / last[0])
        style.power_axis(axes, sorted({1, *counts, most}))
        axes.set(xlabel="ranks, N", ylim=(0, 1.1 * whole.total))
    style.plain_ticks(grid[0].yaxis, range(0, 17, 4))
    grid[0].set_ylabel("held by a rank, bytes a parameter")
    shares = " and ".join(f"{share:.0%} in {name}" for share, name in zip(saved, held, strict=True))
    finding = f"ZeRO-1 saves {shares} with {counts[-1]} ranks"
    case = "Adam, between two steps; lines: formulas, points: measured; DDP with gradient_as_bucket_view=True"
    return style.finish(figure, finding, case)
