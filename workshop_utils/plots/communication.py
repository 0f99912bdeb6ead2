"""Figures of collectives: chunks that move, who sends what when, and time against workers and against size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import Communicator, Event
from workshop_utils.comm.subset import Subset
from workshop_utils.plots import style

if TYPE_CHECKING:
    from workshop_utils.ranks.results import Results

AllReduce = Callable[[Communicator, Any], None]


class _Photographed(Subset):
    """All ranks of `inner`; `before` keeps what was in `array` before each of this rank's messages."""

    def __init__(self, inner: Communicator, array: np.ndarray) -> None:
        super().__init__(inner, range(inner.size))
        self._array = array
        self.before: list[np.ndarray] = []

    def _exchange(self, to: int | None, outgoing: Any, source: int | None, incoming: Any) -> None:
        self.before.append(self._array.copy())
        super()._exchange(to, outgoing, source, incoming)


def contributions(all_reduce: AllReduce, size: int) -> np.ndarray:
    """Run `all_reduce` on `size` threads over one element a chunk; what each rank holds after each of its sends.

    Element [rank, step, chunk, r] is how often rank r's contribution is in that chunk; step 0 is the start. Meant for
    algorithms that send and receive in every step, such as the ring.
    """

    def program(communicator: Communicator) -> list[np.ndarray]:
        array = np.full(size, 16**communicator.rank, np.int64)
        photographed = _Photographed(communicator, array)
        all_reduce(photographed, array)
        return [*photographed.before, array]

    # Exact sums of powers of 16, one a rank.
    return np.array(threads.run(size, program))[..., None] // 16 ** np.arange(size) % 16


def ring_steps(all_reduce: AllReduce, size: int) -> Figure:
    """The chunks of a ring all-reduce moving, step by step, as they did when it was run on threads.

    A panel a step, a row a rank, a column a chunk; each cell holds the contributions of the ranks in their colours.
    """
    held = contributions(all_reduce, size)
    steps = held.shape[1]
    columns = (steps + 1) // 2
    figure, grid = style.figure(2.35 * columns, 5.25, columns=columns, rows=2)
    for step, axes in enumerate(grid.flat):
        axes.axis("off")
        if step < steps:
            name = f"reduce-scatter {step}" if step < size else f"all-gather {step - size + 1}"
            _panel(axes, held[:, step], held[:, max(0, step - 1)], name if step else "start")
    finding = f"Each chunk makes {size - 1} hops to be summed, and {size - 1} more to be shared"
    framed = "framed: just came from the left neighbour"
    detail = f"rows: ranks; columns: chunks; colours: whose gradients are in a chunk; {framed}"
    return style.finish(figure, finding, detail)


def _panel(axes: Axes, held: np.ndarray, before: np.ndarray, name: str) -> None:
    """What all ranks hold, as [rank, chunk, contribution]; what is not as `before` is framed."""
    size = len(held)
    axes.set(xlim=(-0.55, size + 0.1), ylim=(size + 0.05, -0.35), aspect="equal")
    axes.set_title(name, fontsize=10, fontweight="normal", pad=2)
    for rank in range(size):
        axes.text(rank + 0.5, -0.08, f"{rank}", ha="center", fontsize=9, color=style.QUIET)
        axes.text(-0.12, rank + 0.5, f"{rank}", ha="right", va="center", fontsize=9, color=style.QUIET)
        for chunk in range(size):
            _cell(axes, (chunk, rank), held[rank, chunk])
            if (held[rank, chunk] != before[rank, chunk]).any():
                look: dict[str, Any] = {"linewidth": 2.2, "edgecolor": style.INK, "zorder": 4}
                axes.add_patch(Rectangle((chunk + 0.03, rank + 0.03), 0.94, 0.94, fill=False, **look))


def _cell(axes: Axes, corner: tuple[float, float], counts: np.ndarray) -> None:
    """A square with a stripe for each rank, coloured if its contribution is in."""
    size, (x, y) = len(counts), corner
    width = 0.86 / size
    for rank, count in enumerate(counts):
        colour, left = style.colour_of(f"worker {rank}") if count else "#F2F2F2", x + 0.07 + rank * width
        axes.add_patch(Rectangle((left, y + 0.07), width, 0.86, facecolor=colour, linewidth=0))


Traces = Mapping[str, Sequence[Sequence[Event]]]  # by algorithm, of each rank


def message_timelines(traces: Traces, way: str, finding: str, detail: str) -> Figure:
    """Who sent what when: a row an algorithm, all on one time axis; `way` says how they ran.

    Time 0 is when the first rank began. The bars are the sends of each rank (from `communicator.trace`), pale from when
    the sender was done with it until it had been received. A dashed line is where the last rank was ready.
    """
    traces = {name: _from_zero(ranks) for name, ranks in traces.items()}
    size = max(map(len, traces.values()))
    longest = max(event.end for ranks in traces.values() for events in ranks for event in events)
    high = 0.75 + (0.21 * size + 0.45) * len(traces)
    figure, grid = style.figure(9.6, high, rows=len(traces), sharex=True, squeeze=False)
    for axes, (name, ranks) in zip(grid[:, 0], traces.items(), strict=True):
        _timeline(axes, ranks, f"{name.replace('_', '-')}, {way}", longest)
        axes.set_ylabel("rank")
    axes.set_xlim(0, longest * 1.02)
    axes.set_xlabel("time")
    style.unit_axis(axes.xaxis, "s")
    return style.finish(figure, finding, detail)


def timeline(results: Results) -> Figure:
    """Who sent what when in `on_ranks`: a row for each rank, from when the first one began to send or receive."""
    events = [event for each in results for event in each.trace]
    if not any(event.kind == "send" for event in events):
        figure, axes = style.figure(9.6, 1.2)
        axes.axis("off")
        return style.finish(figure, "No message went through the workshop's communicator", "nothing to draw")
    name = ", ".join(dict.fromkeys(event.collective or "send and receive" for event in events))
    way = f"{results.network.split()[0]}/s" if results.network else "full speed"
    count, nbytes = (sum(getattr(each, what) for each in results) for what in ("messages", "bytes_sent"))
    size = EngFormatter(unit="B", places=1 if nbytes >= 1000 else 0)(nbytes)
    finding = f"{len(results)} ranks sent {count:,} message{'s' * (count > 1)}, {size} in all"
    detail = "a bar: a call that sends, until it returns; arrow: to which rank; pale: until it is received"
    if count > sum(event.kind == "send" for event in events):
        detail = f"the first events of each rank; {detail}"
    return message_timelines({name: [each.trace for each in results]}, way, finding, detail)


def _from_zero(ranks: Sequence[Sequence[Event]]) -> list[list[Event]]:
    begin = min(event.start for events in ranks for event in events)
    return [
        [replace(event, start=event.start - begin, end=event.end - begin) for event in events]
        for events in ranks
    ]


def _timeline(axes: Axes, ranks: Sequence[Sequence[Event]], name: str, longest: float) -> None:
    for event in _sends(ranks):
        colour, duration = style.colour_of("send"), event.end - event.start
        axes.barh(event.rank, duration, 0.74, event.start, color=colour, edgecolor="white", linewidth=0.6)
        if duration > 0.022 * longest:
            style.inside(axes, event.start + duration / 2, event.rank, f"→{event.peer}", colour, fontsize=8)
        if event.end_received - event.end > 1e-3 * longest:
            pale, on_its_way = style.tint("send", 0.3), event.end_received - event.end
            axes.barh(event.rank, on_its_way, 0.74, left=event.end, color=pale, linewidth=0, zorder=0.5)
    finish = max(event.end for events in ranks for event in events)
    style.mark(axes, finish)
    seconds = f"{finish:.2f} s" if finish >= 1 else f"{1000 * finish:.0f} ms"
    axes.set_title(f"{name}: {seconds}", fontsize=10, loc="left", pad=3)
    style.rows(axes, [str(rank) for rank in range(len(ranks))], (len(ranks) - 0.4, -0.6))


def _sends(ranks: Sequence[Sequence[Event]]) -> Iterable[Any]:
    """Each send, with `end_received`, when it had been received: messages from one rank to another keep their order."""
    events = [{"rank": rank, **vars(event)} for rank, events in enumerate(ranks) for event in events]
    messages = pd.DataFrame(events).dropna(subset=["peer"]).astype({"peer": int})
    messages["number"] = messages.groupby(["kind", "rank", "peer"]).cumcount()
    sent, received = (messages[messages["kind"] == kind] for kind in ("send", "recv"))
    received = received.rename(columns={"rank": "peer", "peer": "rank"})
    both = sent.merge(received, "left", on=["rank", "peer", "number"], suffixes=("", "_received"))
    return both[both["nbytes"] > 0].itertuples()


# Colour and marker of each way to all-reduce.
LOOKS = {
    "ring": ("ring", "o"),
    "central": ("server", "s"),
    "Gloo": ("torch_ddp", "^"),
    "recursive doubling": (style.MUTED[1], "s"),
    "halving-doubling": (style.MUTED[2], "D"),
    "one ring": ("ring", "o"),
    "eight rings": ("#44AA99", "D"),
    "two levels": ("#882255", "^"),
}
Curves = Mapping[str, npt.ArrayLike]  # by the name of an all-reduce


def against_ranks(ranks: Sequence[int], seconds: Curves, theory: Curves, detail: str) -> Figure:
    """Seconds by number of ranks: points measured, lines theory. A series with too few points is left out."""
    _, axes = style.figure(7.4, 4.0)
    whole = {name: np.asarray(each) for name, each in seconds.items() if np.size(each) == len(ranks)}
    for index, (name, each) in enumerate(whole.items()):
        colour, marker = LOOKS[name]
        dashes = style.DASHES[index % len(style.DASHES)]  # so that each is seen where they agree
        style.theory(axes, ranks, np.asarray(theory[name]), name, colour=colour, linestyle=dashes)
        # Outlines of different sizes, so that each is seen where they agree.
        outline: dict[str, Any] = {"markerfacecolor": "none", "markersize": 6 + 3 * index}
        style.measured(axes, ranks, each, colour=colour, marker=marker, hollow=True, **outline)
    axes.set(xlabel="ranks", xticks=ranks, ylabel="seconds", ylim=(0, None))
    axes.margins(x=0.02)
    times = ", ".join(f"{name} ×{each[-1] / each[0]:.3g}" for name, each in whole.items())
    return style.finish(axes, f"From {ranks[0]} to {ranks[-1]} ranks: {times}", detail)


def against_size(
    nbytes: npt.ArrayLike, panels: Mapping[str, tuple[Curves, Curves]], finding: str, detail: str
) -> Figure:
    """Times as long as the fastest line at each size: a panel for each cluster, its lines and, for some, points.

    Lines without points beside others that have some are dashed. A title names the fastest from small to large arrays;
    who is within 2 % of the fastest stays in front.
    """
    sizes = np.asarray(nbytes)
    figure, grid = style.figure(10.4, 4.1, columns=len(panels), sharey=True, squeeze=False)
    for axes, (cluster, (lines, points)) in zip(grid.flat, panels.items(), strict=True):
        fastest = np.min([np.asarray(line) for line in lines.values()], axis=0)
        for name, line in lines.items():
            colour, marker = LOOKS[name]
            dashes = "solid" if name in points or not points else style.DASHES[1]
            style.theory(axes, sizes, np.divide(line, fastest), name, colour=colour, linestyle=dashes)
            if name in points:
                style.measured(axes, sizes, np.divide(points[name], fastest), colour=colour, marker=marker)
        axes.set(xscale="log", yscale="log", ylim=(0.85, None), xlabel="size of the array")
        style.unit_axis(axes.xaxis, "B")
        axes.minorticks_off()
        axes.margins(x=0.015)  # so that names at the ends of lines stand beside the axes
        title = f"{cluster}, fastest from small to large:\n{', '.join(_in_front(lines))}"
        axes.set_title(title, fontsize=10, loc="left", pad=3)
    grid[0, 0].set_ylabel("times as long as the fastest")
    style.plain_ticks(grid[0, 0].yaxis, [1, 2, 3, 5, 8])
    return style.finish(figure, finding, detail)


def _in_front(lines: Curves) -> list[str]:
    """Which line is lowest, from left to right; a leader stays so until another is more than 2 % lower."""
    leaders: list[str] = []
    for place in zip(*(np.asarray(each) for each in lines.values()), strict=True):
        seconds = dict(zip(lines, place, strict=True))
        best = min(seconds, key=seconds.__getitem__)
        if not leaders or seconds[leaders[-1]] > 1.02 * seconds[best]:
            leaders.append(best)
    return leaders


def overlap(
    ratios: Sequence[float],
    seconds: Mapping[str, Sequence[float]],
    theory: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]],
    detail: str,
) -> Figure:
    """Seconds a step by communication over backward pass, of "after the backward pass" and "overlapped"."""
    _, axes = style.figure(7.2, 3.8)
    for (name, each), (colour, marker) in zip(
        seconds.items(), (("compute", "o"), ("send", "s")), strict=True
    ):
        where, line = theory[name]
        style.theory(axes, np.asarray(where), np.asarray(line), name, colour=colour)
        style.measured(axes, ratios, each, colour=colour, marker=marker)
    axes.set(xscale="log", ylim=(0, None), ylabel="seconds a step", xlabel="communication / backward pass")
    style.plain_ticks(axes.xaxis, ratios)
    before, after = seconds.values()
    gains = np.divide(before, after)
    best = int(np.argmax(gains))
    seconds_in_theory = [np.interp(ratios[best], np.asarray(x), np.asarray(y)) for x, y in theory.values()]
    expected = seconds_in_theory[0] / seconds_in_theory[1]
    finding = f"Overlap: a step up to {gains[best]:.3g} times as fast, in theory {expected:.3g}"
    return style.finish(axes, finding, detail)
