"""Figures of parameter servers: what their links carry and how long, who pushes when, and what waiting costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style


def exchange_times(
    measured: Mapping[str, Mapping[int, float]],
    theory: Mapping[str, Callable[[np.ndarray], np.ndarray]],
    detail: str,
) -> Figure:
    """Seconds that a step communicates, against workers: lines by `theory`, and what was `measured`, in their order.

    One more is measured than there are lines: a ring, whose line is that of the last.
    """
    _, axes = style.figure(6.6, 4.2)
    workers = sorted({count for seconds in measured.values() for count in seconds})
    line = np.linspace(1, workers[-1], 200)
    for (name, seconds), colour in zip(theory.items(), style.MUTED, strict=False):
        style.theory(axes, line, seconds(line), name, colour=colour)
    *places, rings = measured.values()
    for index, times in enumerate(places):
        marker = ("D", "s", "^", "o")[index]
        style.measured(axes, [*times], [*times.values()], colour=style.MUTED[index], marker=marker)
    look: dict[str, Any] = {"colour": "ring", "hollow": True, "markerfacecolor": "none", "markersize": 10}
    style.measured(axes, [*rings], [*rings.values()], **look)
    axes.set(xlabel="workers", ylabel="communication, seconds a step", ylim=(0, None), xticks=[1, *workers])
    return style.finish(
        axes, "One server is a bottleneck; as many as workers, in pieces, beat a ring", detail
    )


def pushes(runs: Mapping[str, pd.DataFrame], seconds: float, straggler: int) -> Figure:
    """Who pushed when, in the first `seconds` of each run.

    Args:
        runs: by name, a row a push: pusher (the worker's number), push_seconds, late (1 if it was dropped).
        seconds: how much of the runs to show.
        straggler: the worker that is marked as slow.
    """
    figure, grid = style.panels(runs, 9.6, 0.75 + 1.15 * len(runs), below=True, sharex=True)
    for axes, table in zip(grid, runs.values(), strict=True):
        workers = sorted(int(worker) for worker in table["pusher"].unique())
        for (worker, late), mine in table.groupby(["pusher", "late"]):
            colour = style.colour_of(f"worker {worker:.0f}")  # a table with gaps has no whole numbers
            axes.plot(
                mine["push_seconds"], mine["pusher"], linestyle="none", marker="o", markersize=5,
                markerfacecolor="white" if late else colour, markeredgecolor=colour,
            )  # fmt: skip
        names = [f"{worker}, slow" if worker == straggler else f"{worker}" for worker in workers]
        style.rows(axes, names, (workers[-1] + 0.6, workers[0] - 0.6), workers)
        axes.set(xlim=(-0.01 * seconds, 1.01 * seconds), ylabel="worker")
    grid[-1].set_xlabel("seconds since the first push")
    detail = "a dot: a gradient reaches the server; hollow: it came too late and was dropped"
    return style.finish(figure, "How far workers drift apart is a choice", detail)


def seconds_to_loss(runs: Mapping[str, pd.DataFrame], target: float, limit: float) -> Figure:
    """When each mode's loss reached `target`, a panel for each of `runs`: dots are simulated seeds, diamonds are real.

    A row of a table is a mode: simulated (the seconds of each seed), real (those of the first seed), gradients (used in
    a second, mean of the seeds). Seconds are infinite where a run did not get there; it is then drawn at `limit`. The
    title compares modes with each other, but for the first, one worker.
    """
    rows = max(map(len, runs.values()))
    figure, panels = style.panels(runs, 8.8, 0.4 * rows + 1.5, sharex=True, sharey=True)
    factors, latest = [], 0.0
    for axes, table in zip(panels, runs.values(), strict=True):
        medians = [float(np.median(seconds)) for seconds in table["simulated"]]
        slowest, fastest = max(medians[1:]), min(medians[1:])
        factors.append("at least " * (slowest == np.inf) + f"{min(slowest, limit) / min(fastest, limit):.1f}")
        for row, (seconds, real, gradients) in enumerate(table.itertuples(index=False)):
            colour, middle = style.MUTED[min(row, 1)], medians[row]
            seen = np.minimum([*seconds, real], limit)
            if np.isfinite(middle):
                axes.plot([middle] * 2, [row - 0.2, row + 0.2], color=style.colour_of(colour), linewidth=2)
            style.measured(axes, seen[1:-1], [row] * len(seen[1:-1]), colour=colour, alpha=0.4)
            style.measured(axes, seen[:1], [row], colour=colour)
            style.measured(axes, seen[-1:], [row + 0.3], colour=colour, marker="D", hollow=True)
            words = f"{middle:.2f} s" if np.isfinite(middle) else "most never"
            look: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center"}
            style.note(axes, f"{words}, {gradients:.0f}/s", (1.02, row), (0, 0), **look)
            latest = max(latest, *seen)
        axes.set(xlabel=f"seconds to a loss of {target:.1f}")
        axes.grid(visible=False, axis="y")
    panels[0].set_xlim(0, 1.05 * latest)
    style.rows(panels[0], list(next(iter(runs.values())).index))
    found = f"Of four modes, the slowest takes {' and '.join(factors)} times as long as the fastest"
    detail = "dots: simulated seeds; stroke: their median; diamond: the dark one on real processes; "
    detail += "right: median; gradients used in a second"
    return style.finish(figure, found, detail)


def descents(curves: Mapping[float, Mapping[int, Sequence[float]]]) -> Figure:
    """x against updates, a panel a learning rate and a line a delay; those that run away are named where they do."""
    figure, panels = style.panels([f"learning rate {rate:g}" for rate in curves], 8.4, 3.0, sharey=True)
    for axes, lines in zip(panels, curves.values(), strict=True):
        for (delay, x), colour, dashes in zip(lines.items(), style.MUTED, style.DASHES, strict=False):
            runs_away = abs(x[-1]) > 2
            label = "_" if runs_away else f"delay {delay}"
            style.theory(axes, np.arange(len(x)), x, label, colour=colour, linestyle=dashes)
            if runs_away:
                at = int(np.argmax(np.abs(x) > 1.9))
                style.note(axes, f"delay {delay}", (at, x[at]), (6, -2), color=colour)
        axes.set(xlabel="updates", ylim=(-2.2, 2.2))
    panels[0].set_ylabel("x")
    return style.finish(figure, "Old gradients forbid large learning rates", "best is x = 0")


def full_link(
    updates: Mapping[int, float], alone: float, most: float, knee: float | None, detail: str
) -> Figure:
    """Updates a second of asynchronous workers, below the lower of W · `alone` and `most`; marked at `knee`.

    `updates` are by number of workers, `alone` is one worker's rate by formula, `most` what the link carries.
    """
    _, axes = style.figure(7.2, 3.8)
    workers = [*updates]
    line = np.array([0, most / alone, workers[-1] + 0.3])
    style.theory(axes, line, np.minimum(line * alone, most), "the link: 1/s")
    style.measured(axes, workers, [*updates.values()], colour="workshop_parameter_server")
    if knee is not None:
        style.mark(axes, knee, f"your W* = {knee:.2f}")
    style.plain_ticks(axes.xaxis, range(workers[-1] + 1))
    axes.set(
        xlabel="asynchronous workers", ylabel="updates per second", ylim=(0, 1.3 * most), xlim=(0, line[-1])
    )
    return style.finish(axes, "Once the link is full, more workers add nothing", detail)


def by_density(
    counted: Mapping[str, Mapping[float, float]], forms: Mapping[str, Callable[[np.ndarray], Any]]
) -> Figure:
    """Bytes that a rank sends in a step by the share of a table's rows that its batch touches.

    Args:
        counted: by exchange and share, bytes.
        forms: by exchange, bytes of an array of shares; the headline holds the first against the last.
    """
    _, axes = style.figure(6.8, 3.8)
    shares = np.array(sorted(next(iter(counted.values()))))
    line = np.geomspace(shares[0], shares[-1], 100)
    for index, (name, form) in enumerate(forms.items()):
        look: dict[str, Any] = {"colour": style.MUTED[index], "linestyle": style.DASHES[index]}
        style.theory(axes, line, np.broadcast_to(form(line), line.shape), name, **look)
        points = [counted[name][share] for share in shares]
        style.measured(axes, shares, points, colour=style.MUTED[index], marker=style.MARKERS[index])
    axes.set(xscale="log", yscale="log", xlabel="rows that a worker's batch touches, of all")
    axes.set_ylabel("bytes that a rank sends in a step")
    axes.minorticks_off()
    style.percent_axis(axes.xaxis)
    style.unit_axis(axes.yaxis, "B")
    (first, *_, last), share = forms, min(shares, key=lambda each: abs(np.log(each / 0.01)))
    part = counted[first][share] / counted[last][share]
    finding = f"Touching {share:.0%} of the rows takes {part:.1%} of {last}'s bytes"
    return style.finish(axes, finding, "points: counted on real processes; lines: formulas")


def crash(losses: Mapping[str, Sequence[float]], at: int) -> Figure:
    """The loss after each update: without a crash, with a replica, without one; a server dies in update `at`."""
    (calm, smooth), (kept, same), (lost, jump) = losses.items()
    _, axes = style.figure(6.8, 3.4)
    updates = np.arange(len(smooth))
    style.theory(axes, updates, smooth, colour="ideal", linewidth=6, alpha=0.5)
    style.theory(axes, updates, same, kept, colour=style.MUTED[0])
    style.theory(axes, updates, jump, lost, colour=style.MUTED[1])
    style.note(
        axes, calm, (updates[len(smooth) // 10], smooth[len(smooth) // 10]), (10, 0), color=style.QUIET
    )
    style.mark(axes, at, "a server is killed")
    axes.set(xlabel="updates", ylabel="test loss (nats)", ylim=(0, None), xlim=(0, updates[-1]))
    return style.finish(
        axes, "With a replica, a crash leaves no trace in the loss", "four servers, two workers"
    )
