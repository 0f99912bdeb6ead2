"""Lesson 06: how TensorFlow's forms of data parallelism train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from workshop_utils.plots import style

# The forms of the prediction, and what the lesson runs beside them.
FORMS = {
    "MirroredStrategy, fit": ("#AA4499", "o"),
    "MultiWorkerMirroredStrategy": ("multi_worker_mirrored", "o"),
    "JAX, jit": ("#88CCEE", "o"),
    "in-graph": ("#332288", "o"),
    "SyncReplicas, as shipped": ("#DDAA33", "D"),
    "asynchronous": ("#CC6677", "P"),
    "ParameterServerStrategy": ("parameter_server", "X"),
}
BESIDE = {
    "SyncReplicas, no initial tokens": ("#DDAA33", "D"),
    "JAX, jit, weights cut": ("#88CCEE", "o"),
    "Keras on JAX, fit": ("#88CCEE", "o"),
}
Step = tuple[int, int, float, bool]  # of a worker: see `means`


def distances(distances: Mapping[str, Sequence[float]], tolerance: float, other_seed: float) -> Figure:
    """How far each form's weights end from those of one process, a point for each seed; hollow: not predicted."""
    _, axes = style.figure(8.2, 3.8)
    forms = [form for form in FORMS if form in distances]
    beside = [form for form in BESIDE if form in distances]
    places = [*range(len(forms)), *(len(forms) + 0.6 + row for row in range(len(beside)))]
    for form, row in zip([*forms, *beside], places, strict=True):
        colour, marker = (FORMS | BESIDE)[form]
        seeds = row + np.linspace(-0.2, 0.2, len(distances[form]))
        look: dict[str, Any] = {"colour": colour, "marker": marker, "markersize": 5, "hollow": form in BESIDE}
        style.measured(axes, distances[form], seeds, **look)
    style.mark(axes, tolerance, "tolerance")
    style.mark(axes, other_seed, "two seeds")
    style.rows(axes, [*forms, *beside], (places[-1] + 0.5, -1.2), places)
    if beside:
        axes.axhline(len(forms) - 0.2, color=style.FAINT)
    highest = max(other_seed, *map(max, distances.values()))
    axes.set(xscale="log", xlim=(2e-8, 6 * highest), xlabel="largest difference of a weight from one process")
    same = sum(max(distances[form]) < tolerance for form in forms)
    finding = f"{same} of {len(forms)} forms compute the weights of one process"
    detail = f"{max(map(len, distances.values()))} seeds a row; hollow: run beside the {len(forms)}"
    return style.finish(axes, finding, detail)


def means(runs: Mapping[str, Sequence[Sequence[Sequence[Step]]]], updates: int = 10) -> Figure:
    """Whose gradients made the first `updates`: numbered tiles in a worker's colour, and below them what came too late.

    `runs` are, by name and seed, the steps of every worker. Of a step: the update for which its gradient was computed,
    its staleness, when it ended, and whether the gradient was in the update's mean.
    """
    names = [(name, seed) for name, seeds in runs.items() for seed in range(len(seeds))]
    figure, axes = style.figure(9.2, 0.8 + 0.72 * len(names))
    counts = {name: [0, 0] for name in runs}
    for row, (name, seed) in enumerate(names):
        workers, count = runs[name][seed], counts[name]
        made: dict[
            int, list[tuple[bool, int, int]]
        ] = {}  # for an update: those too late, workers, numbers of steps
        for worker, steps in enumerate(workers):
            for number, (update, *_, used) in enumerate(steps, 1):
                made.setdefault(update, []).append((not used, worker, number))
        for update, tiles in made.items():
            came_in = {worker for late, worker, _ in tiles if not late}
            if came_in:  # there was such an update
                count[0] += sum(late for late, *_ in tiles)
                count[1] += len(workers) - len(came_in)
            for place, (late, worker, number) in enumerate(sorted(tiles) if update <= updates else ()):
                fill, low = "white" if late else f"worker {worker}", row - 0.4 + 0.2 * place + 0.04 * late
                look = {"color": style.colour_of(fill), "edgecolor": style.colour_of(f"worker {worker}")}
                axes.bar(update, 0.18, 0.86, low, **look)
                style.inside(axes, update, low + 0.09, str(number), fill, fontsize=7.5)
    style.rows(axes, [f"{name}, seed {seed}" for name, seed in names], (len(names) - 0.5, -0.6))
    for worker in range(len(workers)):
        colour, middle = f"worker {worker}", row - 0.31 + 0.2 * worker
        axes.bar(updates + 1.3, 0.18, 1.2, middle - 0.09, color=style.colour_of(colour))
        style.inside(axes, updates + 1.3, middle, colour, colour, fontsize=7.5)
    axes.grid(visible=False)
    axes.set(xlim=(0.4, updates + 2), xticks=range(1, updates + 1), xlabel="update")
    (first, (lost, stolen)), *others = counts.items()
    words = f"{first[:1].upper()}{first[1:]}: {lost} gradients too late, {stolen} slot{'s' * (stolen != 1)} stolen"
    finding = "; ".join([words, *(f"{name}: {each} and {other}" for name, (each, other) in others)])
    detail = "tiles: a worker's steps, by number; filled: in the mean of this update; hollow: thrown away"
    return style.finish(figure, finding, detail)


def progress(seconds: Mapping[str, Sequence[Sequence[float]]], late_seconds: float) -> Figure:
    """How many steps each worker has made, by panel; worker 1's gradients take `late_seconds`."""
    figure, panels = style.panels(seconds, 9.6, 3.3, sharex=True, sharey=True)
    rates = []
    for axes, workers in zip(panels, seconds.values(), strict=True):
        for index, own in reversed(list(enumerate(workers))):
            look: dict[str, Any] = {"marker": style.MARKERS[index], "markersize": (4, 8)[index]}
            label = f"worker {index}" + ", late" * index
            style.measured(axes, own, np.arange(1, len(own) + 1), label, colour=f"worker {index}", **look)
        rates.append((len(workers[0]) - 1) / (workers[0][-1] - workers[0][0]))
        axes.set_xlabel("seconds")
        axes.margins(x=0.3)
    panels[0].set(ylabel="steps of a worker", xlim=(0, None), ylim=(0, None))
    finding = "Beside a late worker, worker 0 makes {:.0f} steps a second if synchronous, {:.0f} if not"
    detail = f"a gradient of worker 1 takes {late_seconds * 1000:g} ms; one run each"
    return style.finish(figure, finding.format(*rates), detail)
