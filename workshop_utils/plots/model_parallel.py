"""Figures of tensor and pipeline parallelism: what is sent and kept, and who waits when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop_utils.parallel.schedule import Timeline, bubble
from workshop_utils.plots import style

Work = tuple[str, float, float]  # its kind, and when it began and ended

# What crosses in each direction of a mesh, the same in every figure.
DIRECTIONS = {"tensor": "model parallel", "data": "data parallel", "pipeline": "mpi"}
FORMS = {"tensor parallel": "model parallel", "with sequence parallelism": "#999933"}
FORWARD, BACKWARD, WEIGHT = "#5B8DB8", "#E0A75E", "#7FB285"
SHOWN_NAMES = {"naive": "naive", "gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved": "interleaved 1F1B"}
SHOWN_NAMES |= {"zb_h1": "ZB-H1", "zbv": "ZBV"}
COLOURS = {"gpipe": "#882255", "one_f_one_b": "#0072B2"}
MARKERS = {"gpipe": "s", "one_f_one_b": "o"}


def schedule_timelines(runs: Mapping[str, tuple[Timeline, Timeline]]) -> Figure:
    """What each rank did when: thick bars as measured, thin ones below as predicted, all on one axis of time.

    Args:
        runs: by schedule, the predicted and the measured timeline, in seconds; one of them is "one_f_one_b".
    """
    ranks = max(len({timed.rank for timed in predicted}) for predicted, _ in runs.values())
    height = 0.9 + (0.27 * ranks + 0.42) * len(runs)
    figure, grid = style.panels(runs, 9.6, height, below=True, sharex=True)
    for axes, (name, (predicted, measured)) in zip(grid, runs.items(), strict=True):
        _timeline(axes, predicted, 0.36, 0.16)
        _timeline(axes, measured, -0.06, 0.62)
        style.rows(axes, [str(rank) for rank in range(ranks)], (ranks - 0.5, -0.5))
        idle = f"{100 * bubble(measured):.0f} % idle, predicted {100 * bubble(predicted):.0f} %"
        axes.set_title(f"{SHOWN_NAMES[name]}: {idle}", fontsize=10, loc="left", pad=3)
        axes.set_ylabel("rank")
    seconds = {name: _seconds(measured) for name, (_, measured) in runs.items()}
    grid[-1].set(xlabel="time", xlim=(0, 1.01 * max(seconds.values())))
    style.unit_axis(grid[-1].xaxis, "s")
    kinds = {timed.each.kind for _, measured in runs.values() for timed in measured}
    colours = "blue: forward, orange: backward" + ", green: weights" * ("weight" in kinds)
    detail = f"{colours}, a rank's second stage is darker; numbers: microbatches; thin: predicted"
    last = min(seconds.keys() - {"one_f_one_b"}, key=lambda name: _seconds(runs[name][0]))
    earlier = 100 * (1 - seconds[last] / seconds["one_f_one_b"])
    due = 100 * (1 - _seconds(runs[last][0]) / _seconds(runs["one_f_one_b"][0]))
    than = (
        f"{abs(earlier):.0f} % {'less' if earlier > 0 else 'more'} time than 1F1B, predicted {due:.0f} % less"
    )
    finding = f"{SHOWN_NAMES[last][0].upper()}{SHOWN_NAMES[last][1:]} takes {than}"
    return style.finish(figure, finding, detail)


def _seconds(timeline: Timeline) -> float:
    return max(timed.end for timed in timeline) - min(timed.start for timed in timeline)


def _timeline(axes: Axes, timeline: Timeline, below: float, height: float) -> None:
    """The passes of all ranks as bars, so far `below` the rank's place; tall ones with the microbatch's number."""
    zero = min(timed.start for timed in timeline)
    ranks = len({timed.rank for timed in timeline})
    for timed in timeline:
        start, seconds = timed.start - zero, timed.end - timed.start
        hue = {"forward": FORWARD, "backward": BACKWARD, "weight": WEIGHT}[timed.each.kind]
        colour = style.tint(hue, 0.65 if timed.each.stage < ranks else 1.0)
        place = timed.rank + below
        axes.barh(place, seconds, height, left=start, color=colour, edgecolor="white", linewidth=0.4)
        if height > 0.5 and seconds > 0.012 * _seconds(timeline):
            words, middle = str(timed.each.microbatch), start + seconds / 2
            style.inside(axes, middle, place, words, colour, fontsize=7.5, color=style.INK)


def held_bytes(
    counted: Mapping[tuple[str, bool], Sequence[float]], formulas: Mapping[tuple[str, bool], Sequence[float]]
) -> Figure:
    """The most bytes of activations that each rank kept at once, by schedule and whether it recomputes."""
    _, axes = style.figure(8.0, 3.6)
    for (name, recompute), nbytes in counted.items():
        colour, marker, label = COLOURS[name], MARKERS[name], SHOWN_NAMES[name] + ", recomputing" * recompute
        dashes = (0, (4, 2)) if recompute else "solid"
        style.theory(
            axes, range(len(nbytes)), formulas[name, recompute], label, colour=colour, linestyle=dashes
        )
        style.measured(
            axes, range(len(nbytes)), nbytes, colour=colour, marker=marker, hollow=recompute, markersize=7
        )
    ranks = max(len(nbytes) for nbytes in counted.values())
    axes.set_xticks(range(ranks))
    axes.set(xlabel="rank", ylabel="activations kept at once, at most", yscale="log")
    style.log_ticks(axes.yaxis)
    style.unit_axis(axes.yaxis, "B")
    shown = ("gpipe", False), ("one_f_one_b", False), ("gpipe", True)
    most = "Kept at most: GPipe {:.2g} MB, 1F1B {:.2g} MB, GPipe recomputing {:.2g} MB"
    finding = most.format(*(max(counted[each]) / 1e6 for each in shown))
    lines = "solid: microbatches held × bytes of one; dashed: × its input, and one whole"
    return style.finish(axes, finding, f"points: counted; {lines}")


def training(losses: Mapping[str, Sequence[float]], unigram: float) -> Figure:
    """Loss by step: the first series as a line, the others as points on it, beside the `unigram` entropy."""
    _, axes = style.figure(7.4, 3.3)
    (first, reference), *others = losses.items()
    steps = range(1, len(reference) + 1)
    style.theory(axes, steps, reference, first, colour="one process", linewidth=1)
    apart = max(1, len(reference) // 36)
    for index, (name, series) in enumerate(others):
        shown = slice(index * apart, None, apart * len(others))  # in turn, so that none hides another
        style.measured(
            axes,
            steps[shown],
            series[shown],
            name,
            colour=f"worker {index}",
            marker=style.MARKERS[index],
            hollow=True,
            markersize=4,
        )
    axes.axhline(unigram, color=style.QUIET, linewidth=1, linestyle=(0, (4, 2)))
    words = "bytes' frequencies alone"
    style.note(
        axes,
        words,
        (0.99, unigram),
        (0, 4),
        xycoords=axes.get_yaxis_transform(),
        ha="right",
        color=style.QUIET,
    )
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.legend(loc="upper right", fontsize=9)
    last = reference[-20:]
    end = float(np.mean(last))
    side = "below" if end < unigram else "above"
    finding = f"One curve, however the model is cut; it ends at {end:.2f} nats, {side} {unigram:.2f}"
    every = (
        f"; points: of each cut, one step in {apart * len(others)}; end: mean of the last {len(last)} steps"
    )
    return style.finish(axes, finding, f"a small GPT reads Python's manual{every}")


def bytes_sent(
    counted: Mapping[str, Mapping[int, float]],
    formulas: Mapping[str, Callable[[int], float]],
    nbytes: int,
    tokens: int,
) -> Figure:
    """Bytes that a rank sends in a step, by number of ranks, as multiples of `nbytes`: counted, and by formula.

    Args:
        counted, formulas: by name of the form.
        nbytes: size of the activations between two blocks.
        tokens: of a sequence, which the ranks must divide.
    """
    _, axes = style.figure(7.4, 3.3)
    most = max(ranks for series in counted.values() for ranks in series)
    line = np.array([ranks for ranks in range(2, 2 * most + 1) if tokens % ranks == 0])
    colours = FORMS.values()
    for name, colour, marker in zip(counted, colours, style.MARKERS, strict=False):
        style.theory(axes, line, [formulas[name](int(ranks)) / nbytes for ranks in line], name, colour=colour)
        sent = [value / nbytes for value in counted[name].values()]
        style.measured(axes, list(counted[name]), sent, colour=colour, marker=marker, markersize=7)
    axes.set(xlabel="tensor-parallel ranks N", ylabel="sent by a rank / one activation", ylim=(0, None))
    axes.set_xticks(line)
    plain, sequence = (sum(series.values()) for series in counted.values())
    more = f"{100 * (sequence / plain - 1):.0f} % more with sequence parallelism"
    finding = f"A rank's traffic levels off, and is {more}"
    activation = f"an activation, between two blocks, takes {nbytes / 1e3:,.0f} kB"
    return style.finish(axes, finding, f"points: counted, to {most} ranks; lines: formulas; {activation}")


def exchange_timelines(steps: Mapping[str, tuple[Sequence[Work], float]]) -> Figure:
    """What a rank's device and link did in a step, a panel for each of two `steps`: without overlap, and with it.

    Args:
        steps: by name, the pieces of work that were measured, in seconds since the step began, and the predicted end.
            "f" and "g" are on the link, the others on the device; grey is where it waits, with the milliseconds.
    """
    figure, grid = style.panels(steps, 8.8, 3.3, below=True, sharex=True)
    send, wait = style.colour_of("send"), style.colour_of("wait")
    colours = {"forward": FORWARD, "input": BACKWARD, "weight": WEIGHT, "f": send, "g": send, "wait": wait}
    waited = []
    for axes, (pieces, due) in zip(grid, steps.values(), strict=True):
        busy = sorted((start, end) for kind, start, end in pieces if kind not in "fg")
        last = max(end for *_, end in pieces)
        idle = [("wait", end, start) for (_, end), (start, _) in pairwise([*busy, (last, last)])]
        waited.append({operator: _waited(pieces, idle, operator) for operator in "fg"})
        for kind, start, end in [*pieces, *idle]:
            lane = 1 if kind in "fg" else 0
            axes.barh(
                lane, end - start, 0.8, left=start, color=colours[kind], edgecolor="white", linewidth=0.6
            )
            words = f"{1000 * (end - start):.0f}" if kind == "wait" else kind
            if end - start > 0.0078 * len(words) * due:
                style.inside(axes, (start + end) / 2, lane, words, colours[kind], fontsize=7.5)
        style.mark(axes, due, color=style.INK)
        style.rows(axes, ["device", "link"], (1.5, -0.5))
    style.note(grid[0], "predicted", (next(iter(steps.values()))[1], 1), (4, 0), va="center", fontsize=8.5)
    grid[-1].set(xlabel="time since the step began", xlim=(0, 1.09 * max(due for _, due in steps.values())))
    style.unit_axis(grid[-1].xaxis, "s")
    (f_before, g_before), (f_after, g_after) = ((1000 * each["f"], 1000 * each["g"]) for each in waited)
    for_g = f"{g_after:.0f} for g instead of {g_before:.0f}"
    finding = f"With overlap a rank waits {f_after:.0f} ms for f instead of {f_before:.0f}, and {for_g}"
    products = "products: forward, the input's gradient, the weight's gradient"
    return style.finish(figure, finding, f"{products}; f, g: all-reduces; grey: waiting, in ms")


def _waited(pieces: Sequence[Work], idle: Sequence[Work], operator: str) -> float:
    """The seconds of `idle` that lie within the operator's all-reduces."""
    crossing = [(start, end) for kind, start, end in pieces if kind == operator]
    both = [min(end, until) - max(start, since) for start, end in crossing for _, since, until in idle]
    return sum(max(0.0, seconds) for seconds in both)


def tensor_roofline(shares: Mapping[str, Mapping[str, Sequence[float]]], counts: Sequence[int]) -> Figure:
    """Seconds of all-reduces for each second of products, by the number of tensor-parallel ranks.

    Args:
        shares: by model and link, a value for each of `counts`.
    """
    _, axes = style.figure(8.0, 3.4)
    links = list(next(iter(shares.values())))
    colours = dict(zip(links, ("model parallel", "server"), strict=False))
    for dashes, (model, by_link) in zip(style.DASHES, shares.items(), strict=False):
        for link, values in by_link.items():
            style.theory(
                axes,
                counts,
                values,
                f"{model}, {link}: {values[-1]:.2g}",
                colour=colours[link],
                linestyle=dashes,
            )
    axes.axhline(1, color=style.QUIET, linewidth=1)
    style.note(axes, "as long as products", (1.2 * counts[0], 1), (0, -4), va="top", color=style.QUIET)
    style.power_axis(axes, list(counts))
    axes.set_yscale("log")
    style.log_ticks(axes.yaxis)
    axes.set(xlabel="tensor-parallel ranks N", ylabel="time of all-reduces / time of products")
    ratios = [" and ".join(f"{100 * values[link][-1]:.0f} %" for values in shares.values()) for link in links]
    finding = f"{counts[-1]} ranks over {links[0]}: all-reduces take {ratios[0]} of the products' time"
    form = "closed form: rings at full bandwidth, products at the peak, nothing overlaps"
    return style.finish(axes, finding, f"over {links[1]}: {ratios[1]}; {form}")


def bytes_by_tokens(
    formulas: Mapping[str, Mapping[str, Callable[[float], float]]],
    counted: Mapping[int, Mapping[str, float]],
    sequences: Sequence[int],
) -> Figure:
    """Bytes that a rank sends in a step in each direction, by the tokens of its replica's batch, a panel a model.

    Args:
        formulas: by model, then by direction, bytes for a number of tokens; "data" does not depend on it.
        counted: by number of tokens, then by direction, the bytes of the first model.
        sequences: of each model, the tokens of one sequence, where its axis begins.
    """
    figure, grid = style.panels(formulas, 9.2, 3.4)
    leads = []
    for axes, sent, sequence in zip(grid, formulas.values(), sequences, strict=True):
        lead = sent["data"](1) / sent["tensor"](1)  # both are one term
        seen = lead > sequence
        leads.append(f"from {float(f'{lead:.2g}'):,.0f} tokens on" if seen else "from one sequence on")
        tokens = np.geomspace(sequence, 100 * sequence, 9)
        for name, colour in DIRECTIONS.items():
            style.theory(axes, tokens, [sent[name](each) for each in tokens], name, colour=colour)
        axes.set(xscale="log", yscale="log", xlabel="tokens of a replica in a step")
        style.unit_axis(axes.xaxis, "")
        style.unit_axis(axes.yaxis, "B")
        if seen:
            style.mark(axes, lead)
    for name, colour in DIRECTIONS.items():
        sent_by = [directions[name] for directions in counted.values()]
        style.measured(grid[0], list(counted), sent_by, colour=colour, markersize=7)
    grid[0].set_ylabel("sent by a rank in a step")
    finding = f"Tensor ranks send most {leads[0]}, with the large model {leads[1]}"
    return style.finish(figure, finding, "lines: closed forms, points: counted; a rank's mean over stages")
