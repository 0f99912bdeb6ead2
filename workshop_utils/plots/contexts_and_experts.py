"""Figures of long contexts, experts and pipelines without bubbles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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

# Ways to attend to a long context, the same in every figure.
WAYS = {"whole matrix": "#882255", "one rank": "one process", "ring": "ring", "Ulysses": "#117733"}

# What balances a router, the same in every figure.
BALANCING = {"nothing": "#882255", "loss": "#0072B2", "bias": "#117733"}
WORDS = {"nothing": "no balancing", "loss": "balancing loss", "bias": "bias"}
LAST = 20  # steps, of which a training's end is the mean
Trainings = Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]]


def kept_by_length(kept: Mapping[str, Mapping[int, float]], room: float, ranks: int) -> Figure:
    """Bytes of activations that a rank keeps for a backward pass, by length of the context.

    Args:
        kept: of the "whole matrix", of "one rank" without it, and of a "ring", by tokens; they begin at one length.
        room: how many bytes a rank may have.
        ranks: of the ring.
    """
    _, axes = style.figure(7.8, 4.0)
    lengths = np.array(sorted(kept["one rank"]))
    names = {"whole matrix": "1 rank, scores kept", "one rank": "1 rank", "ring": f"{ranks} ranks"}
    for (name, series), marker in zip(kept.items(), style.MARKERS, strict=False):
        shortest = min(series)
        linear = (series if name == "ring" else kept["one rank"])[shortest]
        line = linear * lengths / shortest + (series[shortest] - linear) * (lengths / shortest) ** 2
        style.theory(axes, lengths, line, names[name], colour=WAYS[name])
        style.measured(
            axes, list(series), list(series.values()), colour=WAYS[name], marker=marker, markersize=7
        )
    axes.axhline(room, color=style.QUIET, linewidth=1, linestyle=(0, (4, 2)))
    axes.set_yscale("log")
    style.power_axis(axes, lengths.tolist())
    words = f"the limit, {room / 1e6:.0f} MB"
    style.note(axes, words, (lengths[0], room), (0, 4), color=style.QUIET)
    axes.set(xlabel="tokens of the context", ylabel="kept by a rank")
    style.unit_axis(axes.yaxis, "B")
    longest = int(lengths[-1])
    one, share = (kept[name][longest] for name in ("one rank", "ring"))
    keeps = f"one rank keeps {one / 1e6:.0f} MB, each of {ranks} ranks {share / 1e6:.0f} MB"
    finding = f"Of {longest:,} tokens {keeps}"
    detail = "points: counted; lines: from the shortest context, in proportion to L, and for scores to L²"
    return style.finish(axes, finding, detail)


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
    grid[-1, 0].set_xlabel("keys")
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


def context_bytes(
    counted: Mapping[str, Mapping[int, float]],
    formulas: Mapping[str, Callable[[int, int], float]],
    nbytes: int,
) -> Figure:
    """Bytes that a rank sends for one attention, by number of ranks: counted, and by formula.

    Args:
        counted, formulas: of the "ring" and of "Ulysses"; a formula is of (ranks, nbytes).
        nbytes: size of the keys of a rank's own tokens.
    """
    _, axes = style.figure(7.2, 3.7)
    most = max(counted["ring"])
    line = np.arange(1, most + 1)
    for (name, series), marker in zip(counted.items(), style.MARKERS, strict=False):
        sent = [formulas[name](int(ranks), nbytes) / nbytes for ranks in line]
        style.theory(axes, line, sent, name, colour=WAYS[name])
        points = [each / nbytes for each in series.values()]
        style.measured(axes, list(series), points, colour=WAYS[name], marker=marker, markersize=7)
    axes.set(
        xlabel="ranks N, each with as many tokens",
        ylabel="sent by a rank, in sizes of its keys",
        ylim=(0, None),
    )
    axes.set_xticks(list(counted["ring"]))
    times = counted["ring"][most] / counted["Ulysses"][most]
    finding = f"Among {most} ranks the ring sends {times:.3g} times as much as Ulysses"
    return style.finish(
        axes, finding, "forward and backward; points: counted, lines: 6(N − 1)K and 8(N − 1)/N · K"
    )


def all_to_all_by_ranks(
    nbytes: int, link: Link, clock: Mapping[str, Mapping[int, float]], detail: str
) -> Figure:
    """Seconds of an all-to-all and of a ring all-reduce of `nbytes` a rank by closed form; points of the `clock`.

    `clock` has simulated seconds by number of ranks, of the all-to-all "direct" and by "Bruck".
    """
    ranks, hop = np.arange(2, 1025), (link.latency_seconds, link.bandwidth_bytes_per_second)
    _, axes = style.figure(7.6, 4.2)
    style.theory(
        axes,
        ranks,
        [ring_seconds(int(size), nbytes, *hop) for size in ranks],
        "ring\nall-reduce",
        colour="ring",
    )
    direct, bruck = WAYS["Ulysses"], style.MUTED[1]
    seconds = [all_to_all_seconds(int(size), nbytes, *hop) for size in ranks]
    style.theory(axes, ranks, seconds, "all-to-all,\ndirect", colour=direct)
    style.measured(axes, [*clock["direct"]], [*clock["direct"].values()], colour=direct)
    style.measured(
        axes, [*clock["Bruck"]], [*clock["Bruck"].values()], "all-to-all,\nBruck", colour=bruck, marker="s"
    )
    axes.set(yscale="log", xlabel="ranks", ylabel="time")
    style.power_axis(axes, [2, 4, 16, 64, 256, 1024])
    style.log_ticks(axes.yaxis)
    style.unit_axis(axes.yaxis, "s")
    axes.yaxis.set_minor_formatter(NullFormatter())
    most = nbytes / link.latency_seconds / link.bandwidth_bytes_per_second
    return style.finish(
        axes, f"Beyond {most:.0f} ranks an all-to-all pays more for latency than for bytes", detail
    )


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
    off = max(abs(row.measured / (row.exchanges + row.compute) - 1) for row in rows)
    times, most = last.measured / first.measured, 100 * last.share
    detail = f"points: measured, at most {100 * off:.0f} % off the prediction; the first without a favourite"
    return style.finish(
        axes, f"With {most:.0f} % on one expert a step takes {times:.1f} times as long", detail
    )


def balance(trainings: Trainings) -> Figure:
    """Load of the busiest expert by step, and the loss at the end, by what balances the router.

    Args:
        trainings: by seed, and by key of BALANCING: losses (steps,) and loads (steps, layers, experts).
    """
    figure, (left, right) = style.figure(10.8, 4.0, columns=2, width_ratios=(2, 1))
    ends, count = {}, min(LAST, len(next(iter(trainings[0].values()))[0]))
    for place, way in enumerate(trainings[0]):
        busiest = np.array(
            [(loads.max(-1) / loads.mean(-1)).mean(-1) for _, loads in (each[way] for each in trainings)]
        )
        last = np.array([losses[-count:].mean() for losses, _ in (each[way] for each in trainings)])
        ends[way] = busiest[:, -count:].mean(), last
        steps = range(1, busiest.shape[1] + 1)
        for seed in busiest:
            style.theory(left, steps, seed, colour=BALANCING[way], linewidth=0.6, alpha=0.5)
        style.theory(left, steps, busiest.mean(0), WORDS[way], colour=BALANCING[way], linewidth=2)
        look: dict[str, Any] = {"colour": BALANCING[way], "marker": style.MARKERS[place], "markersize": 7}
        for seed, loss in enumerate(last):
            style.measured(right, [place + 0.15 * (seed - (len(last) - 1) / 2)], [loss], **look)
    left.axhline(1, color=style.QUIET, linewidth=1, linestyle=(0, (4, 2)))
    left.set(xlabel="step", ylabel="busiest expert / mean load", ylim=(0, None))
    right.set(ylabel=f"loss, mean of the last {count} steps (nats a byte)", xlim=(-0.5, len(ends) - 0.5))
    right.set_xticks(range(len(ends)), [WORDS[way] for way in ends])
    means = ", ".join(f"{WORDS[way]} {load:.1f}" for way, (load, _) in ends.items())
    of_way = np.array([last.mean() for _, last in ends.values()])
    of_seed = np.array([last for _, last in ends.values()]).mean(0)
    apart = f"means of ways differ by {np.ptp(of_way):.3f} nats, of seeds by {np.ptp(of_seed):.3f}"
    detail = f"{len(trainings)} seeds, thin; thick: their mean. At the end {apart}"
    return style.finish(figure, f"Times the mean load on the busiest expert: {means}", detail)


def dropped(trainings: Trainings, dropped_share: Callable[[Any, float], float]) -> Figure:
    """Share of rows that a capacity drops over the last steps of `balance`, by factor; each layer is counted alone."""
    import torch

    _, axes = style.figure(7.8, 3.8)
    factors, at = np.linspace(1, 4, 25), {}
    for way in trainings[0]:
        ends = [torch.from_numpy(each[way][1][-LAST:]).flatten(0, 1) for each in trainings]
        shares = np.array([[dropped_share(loads, factor) for factor in factors] for loads in ends])
        for seed in shares:
            style.theory(axes, factors, seed, colour=BALANCING[way], linewidth=0.6, alpha=0.5)
        style.theory(axes, factors, shares.mean(0), WORDS[way], colour=BALANCING[way], linewidth=2)
        at[way] = np.mean([dropped_share(loads, 1.25) for loads in ends])
    style.mark(axes, 1.25, "1.25")
    axes.set(xlabel="capacity factor", ylabel="rows dropped", xlim=(1, None), ylim=(0, None))
    style.percent_axis(axes.yaxis)
    means = ", ".join(f"{WORDS[way]} {100 * share:.0f} %" for way, share in at.items())
    last = f"of at most {LAST} steps at the end"
    detail = f"from the loads {last}, {len(trainings)} seeds; thick: their mean"
    return style.finish(axes, f"Dropped at a factor of 1.25: {means}", detail)
