"""A run in a notebook, drawn in place while it happens: what each worker does, its loss, its throughput.

    with Local().launch(job) as run:
        live.watch(run)             # returns when the run has ended, as `run.wait` does

A lane is a row for a worker, from left to right in seconds since the launch. What it shows is what the worker reports:

- Nothing yet: from the launch until the process comes to its first line (`place.here`), it is starting and importing.
- `compute_seconds`, `send_seconds` and `wait_seconds` (`comm.activity`): between two reports, how high a colour is says
  what share of that time it had. With `compute_seconds` and `communication_seconds`, sending and waiting are one.
- A step and no such times, as from most frameworks: a pale band from the first report to the last, a line for each.

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
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from workshop_utils.plots import alternative, style
from workshop_utils.runs import Run, RunState, stopped_by_interrupts

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


class Strip(NamedTuple):
    """A coloured rectangle of a lane: `left` and `right` in seconds, `low` and `high` as shares of its height."""

    name: str
    colour: str
    left: float
    right: float
    low: float = 0.0
    high: float = 1.0


def draw(run: Run) -> Figure:
    """The run as it is now: its lanes, loss and throughput. Lines are named once it has ended and they grow no more."""
    running = run.state is RunState.RUNNING  # before the records: the last picture is to have them all
    metrics, seconds = run.metrics, run.seconds
    lanes = max(0.7, 0.3 * min(len(run.workers), MOST_LANES))
    height = lanes + 3.55
    # Not through pyplot, whose figures a notebook shows once more at the end of a cell; and laid out by hand, since
    # working out a layout takes longer than all the drawing.
    with matplotlib.rc_context(style.RC | {"figure.constrained_layout.use": False}):
        figure = Figure(figsize=(7.6, height), dpi=LIVE_DPI)
        top = figure.add_axes((0.12, (height - 0.95 - lanes) / height, 0.85, lanes / height))
        low, high = 0.48 / height, 1.45 / height
        loss, speed = (figure.add_axes((x, low, wide, high)) for x, wide in ((0.12, 0.30), (0.63, 0.27)))
    state = f"{run.state}{' for' if running else ' after'} {seconds:.1f} s"
    look: dict[str, Any] = {"ha": "left", "va": "top", "fontsize": 12.5, "fontweight": "bold"}
    figure.suptitle(f"{run.name}: {state}", x=0.012, y=1 - 0.06 / height, **look)
    summary = _summary(run, metrics)
    figure.text(0.012, 1 - 0.33 / height, summary, fontsize=9.5, color=style.QUIET, va="top")
    _draw_lanes(top, run, metrics, seconds)
    _draw_curves(loss, run, metrics, "loss", "loss")
    _draw_curves(speed, run, metrics, "samples_per_second", "samples/s")
    speed.set_ylim(bottom=0)  # so that a few per cent look like a few per cent
    speed.yaxis.set_major_formatter("{x:,.0f}")
    for axes, name in () if running else ((loss, "loss"), (speed, "speed")):
        if not axes.lines:
            words: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "color": style.QUIET}
            axes.text(0.5, 0.5, f"no {name} was reported", **words)
        if len(axes.lines) <= 4:
            style.label_ends(axes, fontsize=8.5, gap_points=10)
    return figure


def _draw_curves(axes: Axes, run: Run, metrics: pd.DataFrame, column: str, name: str) -> None:
    """What each worker has reported in `column`, by step."""
    reported = dict(list(metrics.dropna(subset=[column]).groupby("worker")))
    for worker, dashes in zip(run.workers, cycle(style.DASHES), strict=False):
        if worker in reported:
            rows = reported[worker]
            x, y = rows["step"].to_numpy(), rows[column].to_numpy()
            style.theory(axes, x, y, worker, colour=worker, linestyle=dashes)
    axes.set(xlabel="step", ylabel=name)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _draw_lanes(axes: Axes, run: Run, metrics: pd.DataFrame, seconds: float) -> None:
    corners, colours, strokes = [], [], []
    named: dict[str, str] = {}
    workers = run.workers[:MOST_LANES]
    for row, worker in enumerate(workers):
        rows = metrics[metrics["worker"] == worker]
        reports = rows["seconds"].to_numpy()
        started = [start["time"] - run.launched_at for start in run.starts if start["worker"] == worker]
        strips = [*_strips(rows)]
        if not strips and len(reports) > 1:
            strips = [
                Strip("train (black line: a report)", style.tint("compute", 0.35), reports[0], reports[-1])
            ]
            every = 1 + len(reports) // MOST_SPANS
            strokes += [[(at, row - 0.38), (at, row + 0.38)] for at in reports[::every]]
        first = min([*started, *reports[:1]], default=seconds)
        for strip in [Strip("start", "load", 0.0, first), *strips]:
            left, right = strip.left, strip.right
            bottom, top = (row + 0.38 - 0.76 * share for share in (strip.low, strip.high))
            corners.append(np.array([(left, bottom), (left, top), (right, top), (right, bottom)]))
            colours.append(named.setdefault(strip.name, style.colour_of(strip.colour)))
    axes.add_collection(PolyCollection(corners, facecolor=colours, linewidth=0, antialiased=False))
    axes.add_collection(LineCollection(strokes, linewidth=0.8, color=style.INK))
    style.rows(axes, workers, (len(workers) - 0.45, -0.55))
    axes.set(xlabel="seconds since the launch", xlim=(0, max(seconds, 0.1)))
    axes.grid(visible=False)
    handles = [Patch(color=colour, label=name) for name, colour in named.items()]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.005, 0.97), ncols=5,
                fontsize=9, handlelength=0.9, columnspacing=1.4, borderpad=0.2)  # fmt: skip


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


def _summary(run: Run, metrics: pd.DataFrame) -> str:
    workers = len({*run.workers, *metrics["worker"]})
    counted = f"{workers} process{'es' * (workers > 1)}"
    facts = [counted + (f", {MOST_LANES} drawn" if workers > MOST_LANES else "")]
    facts += [run.device] if run.device else []
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


def watch(run: Run) -> Run:
    """Draw `run` in place in this notebook until it has ended, and leave its last picture; returns the run.

    It is drawn in between where somebody can watch: in Jupyter and VS Code, and not in batch. An interrupt stops the
    run and leaves what there was. In plain Python, without a notebook, it only waits.

    Raises:
        RunFailed: if it failed, as `run.wait`; its picture stays all the same.
    """
    from IPython.core.getipython import get_ipython
    from IPython.display import DisplayHandle

    if get_ipython() is None:
        return run.wait()
    live = os.environ.get(alternative.STARTED_BY_SERVER) or os.environ.get("VSCODE_PID")
    place = DisplayHandle()
    show = place.display
    try:
        with stopped_by_interrupts(run):
            while True:
                began = time.thread_time()
                data, metadata = _frame(draw(run))
                show(data, raw=True, metadata=metadata)
                spent = time.thread_time() - began
                show = place.update
                with contextlib.suppress(TimeoutError):
                    return run.wait(max(LEAST_SECONDS, spent / SHARE - spent) if live else None)
    finally:
        data, metadata = alternative.bundle(draw(run))
        place.update(data, raw=True, metadata=metadata)


def _frame(figure: Figure) -> tuple[dict[str, Any], dict[str, Any]]:
    """A quick PNG of `figure`, for a second's use, as a MIME bundle."""
    buffer, words = io.BytesIO(), figure.get_suptitle()
    canvas = FigureCanvasAgg(figure)
    canvas.print_png(buffer, pil_kwargs={"compress_level": 1})  # `savefig` would draw it twice
    width, height = canvas.get_width_height()
    size = {"width": width, "height": height, "alt": words}
    return {"image/png": buffer.getvalue(), "text/plain": words}, {"image/png": size}
