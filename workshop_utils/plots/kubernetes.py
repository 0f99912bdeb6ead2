"""Figures of lesson 12: who holds a cluster's places, and what the loss of a pod costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style

Held = tuple[str, bool] | None  # by which job, and whether that trains


def places(histories: Mapping[str, Sequence[Sequence[Held]]], finding: str, detail: str) -> Figure:
    """Who holds each place of a cluster at each step, a panel for each scheduler of `histories`."""
    jobs = sorted({held[0] for history in histories.values() for step in history for held in step if held})
    figure, panels = style.panels(list(histories), width=9.6, height=2.9)
    for axes, history in zip(panels, histories.values(), strict=True):
        for place, column in enumerate(zip(*history, strict=True)):
            start = 0
            for held, group in groupby(column):
                length = len(list(group))
                if held:
                    colour, middle = style.MUTED[jobs.index(held[0])], start + length / 2
                    fill = colour if held[1] else style.tint(colour, 0.25)
                    hatch = None if held[1] else "///"
                    axes.barh(place, length, 0.8, start, color=fill, hatch=hatch, edgecolor="white")
                    style.inside(axes, middle, place, held[0] if held[1] else f"{held[0]} waits", fill)
                start += length
        count = len(history[0])
        style.rows(axes, [f"place {place}" for place in range(count)], (count - 0.4, -0.6))
        axes.set(xlabel="step", xlim=(0, len(history)))
    return style.finish(figure, finding, detail)


def lost_pod(metrics: pd.DataFrame, lost: float, pod: str) -> Figure:
    """Rank 0's steps against time, around the loss of a `pod` at `lost`, in the run's seconds."""
    steps = metrics[metrics["rank"].eq(0) & metrics["loss"].notna()]
    seconds, step = steps["seconds"].to_numpy() - lost, steps["step"].to_numpy()
    before = seconds <= seconds[np.argmax(np.diff(seconds))]
    again = ~before & (step <= step[before].max())
    _, axes = style.figure(8.4, 3.6)
    for chosen, hollow in ((~again, False), (again, True)):
        points = seconds[chosen], step[chosen]
        style.measured(axes, *points, colour=style.WORKERS[0], hollow=hollow, markersize=4)
    style.mark(axes, 0, f"{pod} is lost")
    axes.set(xlabel="seconds since the pod was deleted", ylabel="step", ylim=(0, None))
    gap = seconds[~before].min() - seconds[before].max()
    finding = f"{gap:.1f} s without a step, and then {again.sum()} steps repeated"
    return style.finish(axes, finding, "one run; a point: a step of rank 0; hollow: a step that is repeated")
