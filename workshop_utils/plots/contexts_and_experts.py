"""Figures of long contexts, experts and pipelines without bubbles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from workshop_utils.comm.all_to_all import all_to_all_seconds
from workshop_utils.comm.ring import ring_seconds
from workshop_utils.comm.topology import Link
from workshop_utils.plots import style

Spans = Sequence[Sequence[tuple[float, float]]]  # by rank and step, seconds at which it began and ended

# What balances a router, the same in every figure.
BALANCING = {"nothing": "#882255", "loss": "#0072B2", "bias": "#117733"}
WORDS = {"nothing": "no balancing", "loss": "balancing loss", "bias": "bias"}
DASHES = "-", (0, (4, 2))  # of a way's first strength, and of its second
LAST = 20  # steps, of which a training's end is the mean
Trainings = Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]]


def causal_ring(
    shares: Mapping[str, Sequence[Sequence[int]]], spans: Mapping[str, Spans], predicted: Mapping[str, float]
) -> Figure:
    """Which pairs of a causal mask each rank computes, and when it did.

    Args:
        shares: by way of dealing out tokens, the places of each rank's.
        spans: by way, when each rank computed in each step of the ring.
        predicted: by way, seconds of a whole ring.
    """
    size = len(next(iter(shares.values())))
    figure, grid = style.figure(
        10.4,
        1.0 + 2.0 * len(shares),
        rows=len(shares),
        columns=2,
        squeeze=False,
        gridspec_kw={"width_ratios": (1, 3.2)},
    )
    took = {
        name: max(rank[-1][1] for rank in each) - min(rank[0][0] for rank in each)
        for name, each in spans.items()
    }
    for row, name in zip(grid, shares, strict=True):
        _pairs(row[0], shares[name])
        row[0].set_xlabel("keys")
        busy = sum(end - start for rank in spans[name] for start, end in rank)
        idle = 1 - busy / (size * took[name])
        row[1].set_title(f"{name}: {100 * idle:.0f} % idle", fontsize=10, loc="left", pad=3)
        zero = min(rank[0][0] for rank in spans[name])
        for rank, steps in enumerate(spans[name]):
            for step, (start, end) in enumerate(steps):
                colour = style.tint(f"worker {rank}", 0.85)
                row[1].barh(rank, end - start, 0.8, left=start - zero, color=colour, edgecolor="white")
                if end - start > 0.02 * max(took.values()):
                    style.inside(row[1], (start + end) / 2 - zero, rank, str(step), colour)
        style.mark(row[1], predicted[name])
        row[1].set_xlim(0, 1.04 * max(*took.values(), *predicted.values()))
        style.rows(row[1], [str(rank) for rank in range(size)], (size - 0.5, -0.5))
        style.unit_axis(row[1].xaxis, "s")
        row[1].set_ylabel("rank")
    grid[-1, 1].set_xlabel("time")
    (first, seconds), *others = took.items()
    finding = f"{first} shares: {seconds:.2f} s, predicted {predicted[first]:.2f} s"
    for name, less in others:
        times, due = seconds / less, predicted[first] / predicted[name]
        finding = f"{name} shares are {times:.2f} times as fast, predicted {due:.2f}"
    numbers = "numbers: the ring's step; dashed: predicted end"
    return style.finish(
        figure, finding[0].upper() + finding[1:], f"left: the pairs that each rank computes; {numbers}"
    )


def _pairs(axes: Axes, shares: Sequence[Sequence[int]]) -> None:
    """The pairs of query and key that a causal mask leaves, in the colour of the rank that has the query."""
    length = sum(map(len, shares))
    owner = np.empty(length)
    for rank, places in enumerate(shares):
        owner[list(places)] = rank
    keys = np.arange(length)
    pairs = np.where(keys[None, :] <= keys[:, None], owner[:, None], np.nan)
    colours = [style.tint(f"worker {rank}", 0.85) for rank in range(len(shares))]
    axes.imshow(
        pairs, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(shares) - 0.5, interpolation="nearest"
    )
    axes.set(xticks=[], yticks=[], ylabel="queries")
    axes.grid(visible=False)


def all_to_all_by_ranks(nbytes: int, link: Link, clock: Mapping[int, float], detail: str) -> Figure:
    """Seconds of an all-to-all and of a ring all-reduce of `nbytes` a rank by closed form; points of the `clock`.

    `clock` has simulated seconds of the all-to-all by number of ranks.
    """
    ranks, hop = np.arange(2, 1025), (link.latency_seconds, link.bandwidth_bytes_per_second)
    _, axes = style.figure(7.0, 3.3)
    for seconds_of, words, colour in (
        (ring_seconds, "ring\nall-reduce", "ring"),
        (all_to_all_seconds, "all-to-all", style.MUTED[2]),
    ):
        seconds = [seconds_of(int(size), nbytes, *hop) for size in ranks]
        style.theory(axes, ranks, seconds, words, colour=colour)
    style.measured(axes, [*clock], [*clock.values()], colour=style.MUTED[2])
    axes.set(yscale="log", xlabel="ranks", ylabel="time")
    style.power_axis(axes, [2, 4, 16, 64, 256, 1000])
    style.log_ticks(axes.yaxis)
    style.unit_axis(axes.yaxis, "s")
    axes.yaxis.set_minor_formatter(NullFormatter())
    most = nbytes / link.latency_seconds / link.bandwidth_bytes_per_second
    finding = f"One message after another: beyond {most:.0f} ranks latency outweighs bytes"
    return style.finish(axes, finding, detail)


class SkewedStep(NamedTuple):
    """One step of a layer of experts: the favourite's share of all rows, and seconds."""

    share: float
    measured: float
    exchanges: float
    compute: float


def skewed_steps(steps: Sequence[Sequence[float]]) -> Figure:
    """Seconds of a step by the favourite's share of all rows: predicted as areas and a line, measured as points.

    Args:
        steps: fields of SkewedStep, the first without a favourite.
    """
    _, axes = style.figure(7.8, 4.0)
    rows = [SkewedStep(*step) for step in sorted(steps, key=lambda step: step[0])]
    shares = [row.share for row in rows]
    exchanges = np.array([row.exchanges for row in rows])
    whole = exchanges + [row.compute for row in rows]
    axes.fill_between(shares, exchanges, color=style.tint("send", 0.35), linewidth=0)
    axes.fill_between(shares, exchanges, whole, color=style.tint("compute", 0.35), linewidth=0)
    for words, low, high in (
        ("four all-to-alls", 0 * whole, exchanges),
        ("the busiest rank computes", exchanges, whole),
    ):
        middle = (np.interp(0.8, shares, low) + np.interp(0.8, shares, high)) / 2
        style.inside(axes, 0.8, middle, words, "#FFFFFF")
    style.theory(axes, shares, whole, "predicted")
    style.measured(axes, shares, [row.measured for row in rows], colour=style.INK, markersize=7)
    axes.set(
        xlabel="share of all rows that go to expert 0", ylabel="a step, forward and backward", ylim=(0, None)
    )
    style.percent_axis(axes.xaxis)
    style.unit_axis(axes.yaxis, "s")
    first, last = rows[0], rows[-1]
    times, most = last.measured / first.measured, 100 * last.share
    detail = "points: measured, the first without a favourite"
    return style.finish(
        axes, f"With {most:.0f} % on one expert a step takes {times:.1f} times as long", detail
    )


def balance(trainings: Trainings) -> Figure:
    """Load of the busiest expert by step, by what balances the router and how strongly; the title is of the end.

    Args:
        trainings: by seed, and by way: losses (steps,) and loads (steps, layers, experts). A way is a key of
            BALANCING, with its strength if it has one: "nothing", "loss 0.01".
    """
    ways = {kind: [way for way in trainings[0] if way.split()[0] == kind] for kind in BALANCING}
    drawn, panels = style.panels(
        [WORDS[kind] for kind in ("loss", "bias")], 8.2, 3.3, sharey=True, layout="constrained"
    )
    ends = {}
    for axes, kind in zip(panels, ("loss", "bias"), strict=True):
        for way, dashes in zip(ways["nothing"] + ways[kind], (DASHES[0], *DASHES[::-1]), strict=True):
            loads = [seed[way][1] for seed in trainings]
            busiest = np.array([(load.max(-1) / load.mean(-1)).mean(-1) for load in loads])
            colour, words = BALANCING[way.split()[0]], way.split()[-1]
            steps = range(1, busiest.shape[1] + 1)
            axes.fill_between(steps, busiest.min(0), busiest.max(0), color=colour, linewidth=0, alpha=0.15)
            style.theory(axes, steps, busiest.mean(0), words, colour=colour, linewidth=2, linestyle=dashes)
            ends[way] = busiest[:, -LAST:].mean()
        axes.axhline(1, color=style.QUIET, linewidth=1, linestyle=(0, (1, 2)))
        axes.set(xlabel="step", ylim=(0, None))
    panels[0].set_ylabel("busiest expert / mean load")
    balanced = [load for way, load in ends.items() if way != "nothing"]
    finding = f"Last {LAST} steps: the busiest expert has {ends['nothing']:.1f} times the mean load"
    finding += f", balanced {min(balanced):.1f} to {max(balanced):.1f}"
    detail = f"by strength; lines: mean of {len(trainings)} seeds, bands: from the least to the most"
    return style.finish(drawn, finding, detail)
