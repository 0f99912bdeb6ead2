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

# Of a step: "gather", "forward", "backward", "reduce" or "wait", its unit's number from 0 on, its start and its end.
Piece = tuple[str, int, float, float]
LANES = {"gather": 0, "forward": 1, "backward": 1, "wait": 1, "reduce": 2}


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

    def pieces(self) -> list[Piece]:
        """What the rank does, in seconds since the step began."""
        parts = zip(("forward", "backward", "wait"), self[:3], self[1:4], strict=True)
        pieces: list[Piece] = [
            (kind, 0, left - self.start, right - self.start) for kind, left, right in parts
        ]
        done = self.start
        for number, (start, end, _) in enumerate(self.sent):
            # One bucket is sent after the other: one that is handed over waits until those before it are done.
            pieces.append(("reduce", number, max(start, done) - self.start, end - self.start))
            done = end
        return pieces


def steps_with_communication(panels: Mapping[str, Sequence[Step]], finding: str, detail: str) -> Figure:
    """What a rank computes and what it sends in one step; a panel for each of `panels`."""
    return steps_by_unit({name: (step.pieces(), []) for name, (step,) in panels.items()}, finding, detail)


def steps_by_unit(
    panels: Mapping[str, tuple[Sequence[Piece], Sequence[Piece]]], finding: str, detail: str
) -> Figure:
    """A lane each for what a rank gathers, computes and reduces in one step; a panel for each of `panels`.

    A panel has the pieces that were measured, as bars with their units' numbers, and those that were predicted, as
    thin bars below; all in seconds since the step began. Grey is where the rank waits, with the milliseconds.
    """
    lanes = sorted({LANES[kind] for measured, _ in panels.values() for kind, *_ in measured})
    figure, grid = style.panels(panels, 9.6, 0.95 + 0.62 * len(lanes) * len(panels), below=True, sharex=True)
    compute, send, wait = (style.colour_of(name) for name in ("compute", "send", "wait"))
    colours = {"gather": send, "forward": style.tint(compute, 0.45), "backward": compute, "reduce": send}
    last = max(end for both in panels.values() for pieces in both for *_, end in pieces)
    for axes, (measured, predicted) in zip(grid, panels.values(), strict=True):
        busy = sorted((start, end) for kind, _, start, end in measured if LANES[kind] == LANES["wait"])
        idle = np.reshape([0, *np.ravel(busy), max(end for *_, end in measured)], (-1, 2))
        waits = [("wait", 0, start, end) for start, end in idle if end > start]
        kinds = [kind for kind, *_ in measured]
        for kind, unit, start, end in (*measured, *waits):
            share = (end - start) / last
            words = f"{unit + 1}" if kinds.count(kind) > 1 or kind == "reduce" else kind
            if kind == "wait":
                words = f"{1000 * (end - start):.0f}{' ms' if share > 0.07 else ''}"
            words = words if share > 0.01 * len(words) else ""
            _bar(axes, LANES[kind] - 0.28, start, end, colours.get(kind, wait), words, 0.5)
        for kind, _, start, end in predicted:
            _bar(axes, LANES[kind] + 0.25, start, end, style.INK, "", 0.13)
        for kind in ("forward", "backward"):
            if kinds.count(kind) > 1:
                begin = min(start for each, _, start, _ in measured if each == kind)
                style.note(axes, kind, (begin, 0.72), (0, 2), fontsize=8.5)
        names = [("gathers", "computes", "reduces")[lane] for lane in lanes]
        style.rows(axes, names, (lanes[-1] + 0.55, lanes[0] - 0.45), lanes)
    axes.set(xlim=(0, 1.01 * last), xlabel="time since the step began")
    style.unit_axis(axes.xaxis, "s")
    return style.finish(figure, finding, detail)


def _bar(axes: Axes, top: float, left: float, right: float, colour: str, words: str, height: float) -> None:
    axes.barh(top, right - left, height, left, align="edge", color=colour, edgecolor="white")
    style.inside(axes, (left + right) / 2, top + height / 2, words, colour, fontsize=8.5)


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
