"""Lesson 06: how TensorFlow's and JAX's forms of data parallelism train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from workshop_utils.plots import style

# The colours of the forms in the prediction, and of what the lesson also runs.
FORMS = {
    "MirroredStrategy, fit": "#AA4499",
    "MultiWorkerMirroredStrategy": "multi_worker_mirrored",
    "JAX, jit": "#88CCEE",
    "in-graph": "#332288",
    "SyncReplicas, as shipped": "#DDAA33",
    "asynchronous": "#CC6677",
    "ParameterServerStrategy": "parameter_server",
}
ALSO_RUN = {
    "SyncReplicas, no initial tokens": "#DDAA33",
    "JAX, jit, weights cut": "#88CCEE",
    "Keras on JAX, fit": "#88CCEE",
}
ReplicaStep = tuple[int, int, float, bool]  # of a worker: see `means`


def distances(distances: Mapping[str, Sequence[float]], tolerance: float, other_seed: float) -> Figure:
    """How far each form's weights end from those of one process, a point for each seed; hollow: not predicted."""
    if unknown := distances.keys() - (FORMS | ALSO_RUN).keys():
        raise ValueError(f"lesson 06 has no form {sorted(unknown)}, only {[*FORMS, *ALSO_RUN]}")
    figure, axes = style.figure(8.2, 3.8)
    forms = [form for form in FORMS if form in distances]
    also = [form for form in ALSO_RUN if form in distances]
    places = [*range(len(forms)), *(len(forms) + 0.6 + row for row in range(len(also)))]
    for form, row in zip([*forms, *also], places, strict=True):
        seeds = row + np.linspace(-0.2, 0.2, len(distances[form]))
        look: dict[str, Any] = {"colour": (FORMS | ALSO_RUN)[form], "markersize": 5, "hollow": form in also}
        style.measured(axes, distances[form], seeds, **look)
    style.mark(axes, tolerance, "tolerance")
    style.mark(axes, other_seed, "two seeds of\none process")
    style.rows(axes, [*forms, *also], (places[-1] + 0.5, -1.2), places)
    if also:
        axes.axhline(len(forms) - 0.2, color=style.FAINT)
    highest = max(other_seed, *map(max, distances.values()))
    axes.set(
        xscale="log", xlim=(2e-8, 20 * highest), xlabel="largest difference of a weight from one process"
    )
    same = sum(max(distances[form]) < tolerance for form in forms)
    finding = f"{same} of {len(forms)} forms compute the weights of one process"
    detail = (
        f"a point: one of {max(map(len, distances.values()))} seeds; hollow: not among the {len(forms)}; "
        "the last two of the 7: from one process with one batch per update"
    )
    return style.finish(figure, finding, detail)


def means(runs: Mapping[str, Mapping[str, Sequence[Sequence[ReplicaStep]]]], updates: int = 10) -> Figure:
    """Whose gradients made the first `updates`, and which were thrown away: tiles in the workers' colours.

    `runs` are, by setting and by kind of workers, the steps of each worker. Of a step: the update for which its
    gradient was computed, its staleness, when it ended, and whether the gradient was in the update's mean.
    """
    names = [(setting, kind) for kind in next(iter(runs.values())) for setting in runs]
    figure, axes = style.figure(9.6, 1.2 + 0.85 * len(names))
    losses: dict[str, set[str]] = {setting: set() for setting in runs}
    for row, (setting, kind) in enumerate(names):
        tiles = [
            (update, not used, worker, number)
            for worker, steps in enumerate(runs[setting][kind])
            for number, (update, *_, used) in enumerate(steps, 1)
            if update <= updates
        ]
        took = [tile[0::2] for tile in tiles if not tile[1]]
        if stolen := len(took) - len({*took}):
            losses[setting].add("slots stolen")
            quiet = {"va": "center", "color": style.QUIET}
            style.note(axes, f"slots stolen: {stolen}", (updates + 0.43, row - 0.15), (6, 0), **quiet)
        for update, thrown in product(range(1, updates + 1), (False, True)):
            own = [tile[2:] for tile in tiles if tile[:2] == (update, thrown)]
            width = 0.86 / len(own) if thrown and own else 0.86
            for place, (worker, number) in enumerate(own):
                level, middle = row - 0.28 + 0.25 * place, float(update)
                if thrown:
                    level, middle = row + 0.29, update - 0.43 + width * (place + 0.5)
                colour = style.colour_of(f"worker {worker}")
                fill, edge, line = ("white", colour, (0, (2, 1.5))) if thrown else (colour, "white", "solid")
                look = {"color": fill, "edgecolor": edge, "linestyle": line}
                axes.bar(middle, 0.23, width - 0.05 * thrown, level - 0.115, **look)
                style.inside(axes, middle, level, str(number), fill)
        if last := max((tile[0] for tile in tiles if tile[1]), default=0):
            losses[setting].add("gradients thrown away")
            style.note(axes, "thrown away", (last + 0.43, row + 0.29), (4, 0), va="center", color=style.QUIET)
    style.rows(axes, [f"{kind},\n{setting}" for setting, kind in names], (len(names) - 0.45, -1.05))
    for worker in range(len(next(iter(runs[setting].values())))):
        colour = f"worker {worker}"
        axes.bar(1.5 + 2 * worker, 0.23, 1.5, -0.915, color=style.colour_of(colour))
        style.inside(axes, 1.5 + 2 * worker, -0.8, colour, colour)
    axes.grid(visible=False)
    label = "update: it applies the mean of the filled gradients above"
    axes.set(xlim=(0.4, updates + 2.2), xticks=range(1, updates + 1), xlabel=label)
    words = (f"{setting}, {' and '.join(sorted(lost))}" for setting, lost in losses.items() if lost)
    detail = f"first {updates} updates; a tile: a worker's gradient, with the number of its step"
    return style.finish(figure, ("; ".join(words) or "nothing is thrown away or stolen").capitalize(), detail)
