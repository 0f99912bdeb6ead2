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

import contextlib
import io
import os
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from workshop_utils.plots import alternative, style
from workshop_utils.runs import Run, RunState

LEAST_SECONDS = 0.5  # between two pictures
SHARE = 0.05  # of one core, for all pictures but the first and the last
MOST_LANES = 16
MOST_SPANS = 200  # of a lane: beyond, neighbours are drawn as one
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


def _strips(reports: pd.DataFrame) -> Iterator[Strip]:
    """What one worker did between its reports, as far as it told; many reports are drawn a few at a time."""
    parts = reports.reindex(columns=list(PARTS)).dropna(axis="columns", how="all").fillna(0.0)
    parts = parts[parts.sum(axis="columns") > 0]
    together = np.arange(len(parts)) // (1 + len(parts) // MOST_SPANS)
    ends = reports["seconds"].reindex(parts.index).groupby(together).last()
    for end, seconds in zip(ends, parts.groupby(together).sum().to_dict("records"), strict=True):
        whole, low = sum(seconds.values()), 0.0
        for name, part in seconds.items():
            high = low + part / whole
            yield Strip(*PARTS[str(name)], max(0.0, end - whole), end, low, high)
            low = high


class Picture:
    """The figure of a run, drawn again and again; `update` takes in what is new."""

    def __init__(self, run: Run) -> None:
        self._run = run
        shown = min(len(run.workers), MOST_LANES)
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
        below = 1 - 0.33 / height
        self._detail = self.figure.text(0.012, below, "", fontsize=9.5, color=style.QUIET, va="top")
        self._strips = PolyCollection([], linewidth=0, antialiased=False)
        self._strokes = LineCollection([], linewidth=0.8, color=style.INK)
        for collection in (self._strips, self._strokes):
            self._top.add_collection(collection)
        style.rows(self._top, run.workers[:shown], (shown - 0.45, -0.55))
        self._top.set_xlabel("seconds since the launch")
        self._top.grid(visible=False)
        self._named: list[str] = []  # in the legend
        self._lines: dict[tuple[str, Axes], Line2D] = {}
        for axes, name in ((self._loss, "loss"), (self._speed, "samples/s")):
            axes.set(xlabel="step", ylabel=name)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            for worker, dashes in zip(run.workers, cycle(style.DASHES), strict=False):
                line = style.theory(axes, [], [], worker, colour=worker, linestyle=dashes)
                self._lines[worker, axes] = line
        self._speed.yaxis.set_major_formatter("{x:,.0f}")

    def update(self) -> None:
        """Take in what was reported since, and set everything up to be drawn."""
        run = self._run
        running = run.state is RunState.RUNNING  # before the records: the last picture is to have them all
        metrics = run.metrics
        self._draw_lanes(metrics, run.seconds)
        for axes, name in ((self._loss, "loss"), (self._speed, "samples_per_second")):
            for worker, rows in metrics.dropna(subset=[name]).groupby("worker"):
                if line := self._lines.get((str(worker), axes)):
                    line.set_data(rows["step"], rows[name])
            axes.relim()
            axes.autoscale_view()
        self._title.set_text(f"{run.name}: {run.state}{' for' if running else ' after'} {run.seconds:.1f} s")
        self._detail.set_text(self._summary(metrics))

    def finish(self) -> None:
        """Name the lines, once they grow no more."""
        for axes, name in ((self._loss, "loss"), (self._speed, "speed")):
            drawn = [line for line in axes.get_lines() if np.size(line.get_xdata())]
            if not drawn:
                words: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "color": style.QUIET}
                axes.text(0.5, 0.5, f"no {name} was reported", **words)
            for line in axes.get_lines():
                if line not in drawn or len(drawn) > 4:
                    line.set_label(f"_{line.get_label()}")
            style.label_ends(axes, fontsize=8.5, gap_points=10)

    def _draw_lanes(self, metrics: pd.DataFrame, seconds: float) -> None:
        corners, colours, strokes = [], [], []
        named: dict[str, str] = {}
        launched = self._run.launched_at
        started = {start["worker"]: [start["time"] - launched] for start in self._run.starts[::-1]}
        for row, worker in enumerate(self._run.workers[:MOST_LANES]):
            rows = metrics[metrics["worker"] == worker]
            reports = rows["seconds"].to_numpy()
            strips = [*_strips(rows)]
            first = min([*started.get(worker, []), *reports[:1]], default=seconds)
            strips.append(Strip(*STARTING, 0.0, first))
            if len(strips) == 1 and len(reports) > 1:
                pale = style.tint(worker, 0.35)
                strips.append(Strip("train (a stroke: a report)", pale, reports[0], reports[-1]))
                every = 1 + len(reports) // MOST_SPANS
                strokes += [[(at, row - 0.38), (at, row + 0.38)] for at in reports[::every]]
            for strip in strips:
                bottom, top = (row + 0.38 - 0.76 * share for share in (strip.low, strip.high))
                left, right = strip.left, strip.right
                corners.append(np.array([(left, bottom), (left, top), (right, top), (right, bottom)]))
                colours.append(style.colour_of(strip.colour))
                named.setdefault(strip.name, colours[-1])
        self._strips.set_verts(corners)
        self._strips.set_facecolor(colours)
        self._strokes.set_segments(strokes)
        self._top.set_xlim(0, max(seconds, 0.1))
        if [*named] != self._named:
            self._named = [*named]
            handles = [Patch(color=colour, label=name) for name, colour in named.items()]
            self._top.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.005, 0.97), ncols=5,
                             fontsize=9, handlelength=0.9, columnspacing=1.4, borderpad=0.2)  # fmt: skip

    def _summary(self, metrics: pd.DataFrame) -> str:
        workers = len({*self._run.workers, *metrics["worker"]})
        facts = [f"{workers} processes" + (f", {MOST_LANES} drawn" if workers > MOST_LANES else "")]
        by_worker = metrics.groupby("worker")
        first, last = by_worker["loss"].first().mean(), by_worker["loss"].last().mean()
        if not np.isnan(last):
            facts.append(f"mean loss {first:.3g} → {last:.3g}")
        if speed := by_worker["samples_per_second"].last().sum():
            facts.append(f"{speed:,.0f} samples/s in all")
        spent = metrics.reindex(columns=list(PARTS)).sum()
        shares = zip(PARTS.values(), spent / spent.sum() if spent.any() else spent, strict=True)
        facts += [f"{name} {share:.0%}" for (name, _), share in shares if share]
        return " · ".join(facts)


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
    from IPython.display import DisplayHandle

    if get_ipython() is None:
        return run.wait()
    if live is None:
        live = bool(os.environ.get(alternative.STARTED_BY_SERVER) or os.environ.get("VSCODE_PID"))
    picture, place = Picture(run), DisplayHandle()
    show = place.display
    try:
        while True:
            began = time.thread_time()
            picture.update()
            data, metadata = _frame(picture.figure)
            show(data, raw=True, metadata=metadata)
            spent = time.thread_time() - began
            show = place.update
            with contextlib.suppress(TimeoutError):
                return run.wait(max(LEAST_SECONDS, spent / SHARE - spent) if live else None)
    except KeyboardInterrupt:
        run.stop()
        raise
    finally:
        picture.update()
        picture.finish()
        data, metadata = alternative.bundle(picture.figure)
        place.update(data, raw=True, metadata=metadata)


def _frame(figure: Figure) -> tuple[dict[str, Any], dict[str, Any]]:
    """A quick PNG of `figure`, for a second's use, as a MIME bundle."""
    buffer, words = io.BytesIO(), figure.get_suptitle()
    canvas = FigureCanvasAgg(figure)
    canvas.print_png(buffer, pil_kwargs={"compress_level": 1})  # `savefig` would draw it twice
    width, height = canvas.get_width_height()
    size = {"width": width, "height": height, "alt": words}
    return {"image/png": buffer.getvalue(), "text/plain": words}, {"image/png": size}
