"""A run in a notebook, drawn in place while it happens: what each worker does, its loss, its throughput.

    with Local().launch(job) as run:
        live.watch(run)             # returns when the run has ended, as `run.wait` does

A lane is a row for a worker, from left to right in seconds since the launch. What it shows is what the worker reports:

- Nothing yet: from the launch until the process comes to its first line (`place.here`), it is starting and importing.
- `compute_seconds`, `send_seconds` and `wait_seconds` (`comm.activity`): between two reports, how high a colour is says
  what share of that time it had. With `compute_seconds` and `communication_seconds`, sending and waiting are one.
- A step and no such times, as from most frameworks: a pale band from the first report to the last, a stroke for each.

White is time of which nothing was reported.

Drawing costs little: at most two pictures a second, and fewer where a picture is expensive, so that all take at most a
twentieth of one core. The last one is an ordinary figure: one PNG with its alternative text, which stays wherever the
notebook is shown. Where nobody watches (papermill, tests), there are the first and the last alone.
"""

from __future__ import annotations

import io
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from PIL import Image

from workshop_utils.plots import alternative, style
from workshop_utils.runs import Run, RunState

LEAST_SECONDS = 0.5  # between two pictures
SHARE = 0.05  # of one core, for all pictures but the first and the last
MOST_LANES = 16
MOST_SPANS = 200  # of a lane: beyond, neighbours are drawn as one
MOST_POINTS = 1000  # of a line: beyond, every second one is left out
LIVE_DPI = 100

# What is reported, by its name; how it is called, and its colour.
PARTS = {
    "compute_seconds": ("compute", "compute"),
    "send_seconds": ("send", "send"),
    "communication_seconds": ("send and wait", "send"),
    "wait_seconds": ("wait", "wait"),
}
STARTING = ("start", "load")


class Strip(NamedTuple):
    """A rectangle of a lane: what was done, its colour, from when until when, and its share of the height."""

    name: str
    colour: str
    left: float
    right: float
    low: float = 0.0
    high: float = 1.0


@dataclass
class Lane:
    """What one worker has told so far; times in seconds since the launch."""

    started: float | None = None
    reports: list[float] = field(default_factory=list)
    spans: list[tuple[float, dict[str, float]]] = field(
        default_factory=list
    )  # its end, and its parts' seconds
    loss: list[tuple[int, float]] = field(default_factory=list)  # by step
    speed: list[tuple[int, float]] = field(default_factory=list)

    def take(self, record: dict[str, Any], launched_at: float) -> None:
        """One more metric record."""
        moment = record["time"] - launched_at
        parts = {name: record[name] for name in PARTS if record.get(name) is not None}
        if sum(parts.values()) > 0:
            self.spans.append((moment, parts))
            if len(self.spans) >= MOST_SPANS:  # an even number, so that each has a neighbour
                self.spans = [_joined(*two) for two in zip(self.spans[::2], self.spans[1::2], strict=False)]
        self.reports.append(moment)
        for name, line in (("loss", self.loss), ("samples_per_second", self.speed)):
            if record.get(name) is not None:
                line.append((record["step"], record[name]))
                if len(line) > MOST_POINTS:
                    del line[1:-1:2]

    def strips(self) -> list[Strip]:
        """What it did between its reports, as far as it told."""
        found = []
        for end, parts in self.spans:
            whole, low = sum(parts.values()), 0.0
            for name, seconds in parts.items():
                high = low + seconds / whole
                found.append(Strip(*PARTS[name], max(0.0, end - whole), end, low, high))
                low = high
        return found


def _joined(first: tuple[float, dict[str, float]], second: tuple[float, dict[str, float]]) -> Any:
    names = [name for name in PARTS if name in first[1] or name in second[1]]
    return second[0], {name: first[1].get(name, 0.0) + second[1].get(name, 0.0) for name in names}


class Picture:
    """The figure of a run, drawn again and again; `update` takes in what is new."""

    def __init__(self, run: Run) -> None:
        self._run, self._taken = run, 0
        self.lanes = {worker: Lane() for worker in run.workers}
        shown = min(len(self.lanes), MOST_LANES)
        high = max(0.7, 0.3 * shown)
        height = high + 3.55
        # Not through pyplot, whose figures a notebook shows once more at the end of a cell; and laid out by hand, since
        # working out a layout takes longer than all the drawing.
        with matplotlib.rc_context(style.RC | {"figure.constrained_layout.use": False}):
            self.figure = Figure(figsize=(7.6, height), dpi=LIVE_DPI)
            bottom = (height - 0.95 - high) / height
            self._top = self.figure.add_axes((0.12, bottom, 0.85, high / height))
            self._loss = self.figure.add_axes((0.12, 0.48 / height, 0.30, 1.45 / height))
            self._speed = self.figure.add_axes((0.63, 0.48 / height, 0.27, 1.45 / height))
        self._title = self.figure.suptitle("", x=0.012, y=1 - 0.06 / height, ha="left", va="top",
                                           fontsize=12.5, fontweight="bold")  # fmt: skip
        self._detail = self.figure.text(
            0.012, 1 - 0.33 / height, "", fontsize=9.5, color=style.QUIET, va="top"
        )
        self._strips, self._strokes = (
            PolyCollection([], linewidth=0, antialiased=False),
            LineCollection([], linewidth=0.8),
        )
        self._prepare(shown)

    def _prepare(self, shown: int) -> None:
        top = self._top
        top.add_collection(self._strips)
        top.add_collection(self._strokes)
        top.set(ylim=(shown - 0.45, -0.55), xlabel="seconds since the launch")
        top.set_yticks(range(shown), [*self.lanes][:shown])
        top.grid(visible=False)
        self._named: tuple[str, ...] = ()
        for axes, name in ((self._loss, "loss"), (self._speed, "samples/s")):
            axes.set(xlabel="step", ylabel=name)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(4))
        self._speed.yaxis.set_major_formatter("{x:,.0f}")
        self._lines: dict[tuple[str, Axes], Line2D] = {}
        for index, worker in enumerate(self.lanes):
            for axes in (self._loss, self._speed):
                look: dict[str, Any] = {"color": style.colour_of(worker), "label": worker, "linewidth": 1.6}
                look["linestyle"] = style.DASHES[index % len(style.DASHES)]
                (self._lines[worker, axes],) = axes.plot([], [], **look)

    def update(self) -> None:
        """Take in what was reported since, and set everything up to be drawn."""
        run = self._run
        running = run.state is RunState.RUNNING  # before the records: the last picture is to have them all
        for start in run.starts:
            lane = self.lanes.setdefault(start["worker"], Lane())
            lane.started = lane.started if lane.started is not None else start["time"] - run.launched_at
        records = run.records
        for record in records[self._taken :]:
            self.lanes.setdefault(record["worker"], Lane()).take(record, run.launched_at)
        self._taken = len(records)
        self._draw_lanes(run.seconds)
        for (worker, axes), line in self._lines.items():
            lane = self.lanes[worker]
            points = lane.loss if axes is self._loss else lane.speed
            line.set_data([step for step, _ in points], [value for _, value in points])
        for axes in (self._loss, self._speed):
            axes.relim()
            axes.autoscale_view()
        self._title.set_text(f"{run.name}: {run.state}{' for' if running else ' after'} {run.seconds:.1f} s")
        self._detail.set_text(self._summary())

    def finish(self) -> None:
        """Name the lines, once they grow no more."""
        for axes, name in ((self._loss, "loss"), (self._speed, "speed")):
            drawn = [line for line in axes.get_lines() if np.size(line.get_xdata())]
            if not drawn:
                axes.text(
                    0.5,
                    0.5,
                    f"no {name} was reported",
                    transform=axes.transAxes,
                    ha="center",
                    color=style.QUIET,
                )
            for line in axes.get_lines():
                if line not in drawn or len(drawn) > 4:
                    line.set_label(f"_{line.get_label()}")
            style.label_ends(axes, fontsize=8.5, gap_points=10)

    def _draw_lanes(self, seconds: float) -> None:
        corners, colours, strokes = [], [], []
        named: dict[str, str] = {}
        for row, (worker, lane) in enumerate([*self.lanes.items()][:MOST_LANES]):
            strips = lane.strips()
            begun = [moment for moment in (lane.started, *lane.reports[:1]) if moment is not None]
            strips.append(Strip(*STARTING, 0.0, min(begun, default=seconds)))
            if not lane.spans and len(lane.reports) > 1:
                pale = style.tint(worker, 0.35)
                strips.append(Strip("train (a stroke: a report)", pale, lane.reports[0], lane.reports[-1]))
                every = 1 + len(lane.reports) // MOST_SPANS
                strokes += [[(at, row - 0.38), (at, row + 0.38)] for at in lane.reports[::every]]
            for strip in strips:
                bottom, top = (row + 0.38 - 0.76 * share for share in (strip.low, strip.high))
                left, right = strip.left, strip.right
                corners.append(np.array([(left, bottom), (left, top), (right, top), (right, bottom)]))
                colours.append(style.colour_of(strip.colour))
                named.setdefault(strip.name, colours[-1])
        self._strips.set_verts(corners)
        self._strips.set_facecolor(colours)
        self._strokes.set_segments(strokes)
        self._strokes.set_color(style.INK)
        self._top.set_xlim(0, max(seconds, 0.1))
        if tuple(named) != self._named:
            self._named = tuple(named)
            handles = [Patch(color=colour, label=name) for name, colour in named.items()]
            self._top.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.005, 0.97), ncols=5,
                             fontsize=9, handlelength=0.9, columnspacing=1.4, borderpad=0.2)  # fmt: skip

    def _summary(self) -> str:
        lanes = self.lanes.values()
        facts = [f"{len(lanes)} processes" + (f", {MOST_LANES} drawn" if len(lanes) > MOST_LANES else "")]
        losses = [lane.loss for lane in lanes if lane.loss]
        if losses:
            first, last = (sum(loss[at][1] for loss in losses) / len(losses) for at in (0, -1))
            facts.append(f"mean loss {first:.3g} → {last:.3g}")
        speeds = [lane.speed[-1][1] for lane in lanes if lane.speed]
        if speeds:
            facts.append(f"{sum(speeds):,.0f} samples/s in all")
        spent = {
            name: sum(parts.get(name, 0.0) for lane in lanes for _, parts in lane.spans) for name in PARTS
        }
        whole = sum(spent.values())
        facts += [f"{PARTS[name][0]} {part / whole:.0%}" for name, part in spent.items() if part]
        return " · ".join(facts)


class Pace:
    """When the next picture is due: `LEAST_SECONDS` after the last one, or later where that one was expensive."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = clock() + LEAST_SECONDS

    def drawn(self, core_seconds: float) -> None:
        """A picture has just been drawn, and took so long on one core."""
        self._due = self._clock() + max(LEAST_SECONDS, core_seconds / SHARE - core_seconds)

    @property
    def seconds_left(self) -> float:
        """Until the next one; 0 if it is due."""
        return max(0.0, self._due - self._clock())


def watch(run: Run, live: bool | None = None) -> Run:
    """Draw `run` in place in this notebook until it has ended, and leave its last picture; returns the run.

    An interrupt stops the run and leaves what there was. In plain Python, without a notebook, it only waits.

    Args:
        run: of any place.
        live: whether to draw in between. By default where somebody can watch: in Jupyter and VS Code, and not in batch.

    Raises:
        RunFailed: if it failed, as `run.wait`; its picture stays all the same.
    """
    from IPython.core.getipython import get_ipython

    if get_ipython() is None:
        return run.wait()
    if live is None:
        live = bool(os.environ.get(alternative.STARTED_BY_SERVER) or os.environ.get("VSCODE_PID"))
    picture, show = Picture(run), _display()
    try:
        picture.update()
        show(*_frame(picture.figure))
        pace = Pace()
        while not _ended(run, pace.seconds_left if live else None):
            began = time.thread_time()
            picture.update()
            show(*_frame(picture.figure))
            pace.drawn(time.thread_time() - began)
    except KeyboardInterrupt:
        run.stop()
        raise
    finally:
        picture.update()
        picture.finish()
        show(*alternative.bundle(picture.figure))
    return run


def _ended(run: Run, seconds: float | None) -> bool:
    """Wait so long for `run` to end (None: as long as it takes); whether it has. Raises RunFailed as `run.wait`."""
    try:
        run.wait(seconds)
    except TimeoutError:
        return False
    return True


def _display() -> Callable[[dict[str, str], dict[str, Any]], None]:
    """What shows a MIME bundle: the first in a place of its own, each later one in the same."""
    from IPython.display import display, update_display

    place = uuid.uuid4().hex
    shown = False

    def show(data: dict[str, str], metadata: dict[str, Any]) -> None:
        nonlocal shown
        call = update_display if shown else display
        call(data, raw=True, metadata=metadata, display_id=place)
        shown = True

    return show


def _frame(figure: Figure) -> tuple[dict[str, Any], dict[str, Any]]:
    """A quick PNG of `figure`, for a second's use, as a MIME bundle."""
    buffer = io.BytesIO()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # `savefig` would draw it twice
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    drawn.save(buffer, "png", compress_level=1)
    size = {"width": drawn.width, "height": drawn.height, "alt": figure.get_suptitle()}
    return {"image/png": buffer.getvalue(), "text/plain": figure.get_suptitle()}, {"image/png": size}
