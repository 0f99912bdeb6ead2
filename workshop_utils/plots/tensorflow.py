"""Lesson 06: how TensorFlow's forms of data parallelism train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from workshop_utils.plots import style

# Each form has one colour and one marker throughout. Equal points lie on each other: synchronous forms are discs, the
# larger ones below the smaller.
FORMS = {
    "in-graph": ("#332288", "o", 18),
    "between-graph, synchronous": ("#44AA99", "o", 14),
    "MirroredStrategy, fit": ("#AA4499", "o", 10.5),
    "MultiWorkerMirroredStrategy": ("multi_worker_mirrored", "o", 7),
    "JAX, shard_map": ("#88CCEE", "o", 3.5),
    "between-graph, asynchronous": ("#CC6677", "P", 10),
    "ParameterServerStrategy": ("parameter_server", "X", 6),
}
SAME = 1e-3  # nats


def distances(distances: Mapping[str, Sequence[float]], tolerance: float, other_seed: float) -> Figure:
    """How far each form's weights end from those of one process, a point for each seed."""
    _, axes = style.figure(8.2, 3.4)
    ordered = [form for form in FORMS if form in distances]
    for row, form in enumerate(ordered):
        colour, marker, _ = FORMS[form]
        style.measured(
            axes,
            distances[form],
            row + np.linspace(-0.2, 0.2, len(distances[form])),
            colour=colour,
            marker=marker,
            markersize=5,
        )
    style.mark(axes, tolerance, "tolerance")
    style.mark(axes, other_seed, "two seeds")
    style.rows(axes, ordered, (len(ordered) - 0.5, -1.2))
    highest = max(other_seed, *map(max, distances.values()))
    axes.set(xscale="log", xlim=(2e-8, 6 * highest), xlabel="largest difference of a weight from one process")
    same = sum(max(each) < tolerance for each in distances.values())
    finding = f"{same} of {len(ordered)} forms compute the weights of one process"
    seeds = max(map(len, distances.values()))
    detail = f"after the last epoch; {seeds} seeds a row; asynchronous: from one process, each batch"
    return style.finish(axes, finding, detail)


def test_losses(
    curves: Mapping[str, Sequence[Sequence[float]]], updates: Mapping[str, np.ndarray], images: np.ndarray
) -> Figure:
    """Test loss against updates, and against images: `curves` are by form and seed, after every epoch.

    Names that begin with "one process" are references, drawn as lines.
    """
    figure, panels = style.figure(10.6, 4.0, columns=2, sharey=True)
    references = [name for name in curves if name.startswith("one process")]
    means = {name: np.mean(curve, axis=0)[1:] for name, curve in curves.items()}
    for axes, x_of in zip(panels, (updates.__getitem__, lambda _: images), strict=True):
        for name, colour, dashes in zip(references, ("one process", "theory"), style.DASHES, strict=False):
            style.theory(axes, x_of(name)[1:], means[name], f"_{name}", colour=colour, linestyle=dashes)
            low, high = (pick(curves[name], axis=0)[1:] for pick in (np.min, np.max))
            shade: dict[str, Any] = {"color": style.colour_of(colour), "alpha": 0.12, "linewidth": 0}
            axes.fill_between(x_of(name)[1:], low, high, **shade)
        for form in (form for form in FORMS if form in curves):
            colour, marker, size = FORMS[form]
            low, high = (abs(pick(curves[form], axis=0)[1:] - means[form]) for pick in (np.min, np.max))
            bars: dict[str, Any] = {"linestyle": "none", "color": style.colour_of(colour), "elinewidth": 1}
            axes.errorbar(x_of(form)[1:], means[form], (low, high), **bars)
            look: dict[str, Any] = {"colour": colour, "marker": marker, "markersize": size}
            style.measured(axes, x_of(form)[1:], means[form], f"_{form}", **look)
    lowest = 0.8 * float(np.min([np.min(curve) for curve in curves.values()]))
    panels[0].set(xlabel="updates", ylabel="test loss (nats)", yscale="log", ylim=(lowest, None))
    panels[1].set(xlabel="images seen by all workers together")
    for axes in panels:
        style.plain_ticks(axes.yaxis, [tick for tick in (0.1, 0.2, 0.3, 0.5, 1, 2) if tick > lowest])
    lines = [line for line in panels[1].get_lines() if str(line.get_label())[1:] in curves]
    names = [str(line.get_label())[1:] for line in lines]
    panels[1].legend(lines, names, loc="center left", bbox_to_anchor=(1.0, 0.5))
    whole = references[0]
    alike = [
        form
        for form in FORMS
        if form in curves and np.max(np.abs(np.subtract(curves[form], curves[whole]))) < SAME
    ]
    forms = "form lies" if len(alike) == 1 else "forms lie"
    finding = f"{len(alike)} {forms} on the line of {whole}, to {SAME:g} nats"
    detail = (
        f"each epoch, means of {len(curves[whole])} seeds; bars (below discs) and bands: smallest to largest"
    )
    return style.finish(figure, finding, detail)


def progress(seconds: Mapping[str, Sequence[Sequence[float]]], late_seconds: float) -> Figure:
    """How many steps each worker has made, by panel; worker 1 sleeps before each step."""
    figure, panels = style.panels(seconds, 9.6, 3.3, sharex=True, sharey=True)
    for axes, workers in zip(panels, seconds.values(), strict=True):
        for index, own in reversed(list(enumerate(workers))):
            look: dict[str, Any] = {
                "colour": f"worker {index}",
                "marker": style.MARKERS[index],
                "markersize": (4, 8)[index],
            }
            label = f"worker {index}" + ", late" * index
            style.measured(axes, own, np.arange(1, len(own) + 1), label, **look)
        count = np.arange(1, len(workers[1]) + 1)
        style.theory(axes, count * late_seconds, count, "_sleeps alone")
        high = len(count) * 4 // 5  # there worker 0 has gone by
        style.note(axes, "sleeps alone", (late_seconds * high, high), (-8, 4), ha="right", color=style.QUIET)
        axes.set_xlabel("seconds")
        axes.margins(x=0.3)
        axes.set(xlim=(0, None), ylim=(0, 1.15 * len(workers[0])))  # the names of the ends need the height
    panels[0].set_ylabel("steps of a worker")
    ends = [workers[0][-1] for workers in seconds.values()]
    finding = (
        f"With a late worker, worker 0 ends at {ends[0]:.2g} s if synchronous, at {ends[1]:.2g} s if not"
    )
    return style.finish(
        figure, finding, f"worker 1 sleeps {late_seconds * 1000:g} ms before each step; one run each"
    )
