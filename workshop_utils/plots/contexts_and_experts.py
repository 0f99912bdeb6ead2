"""Figures of long contexts, experts and pipelines without bubbles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
