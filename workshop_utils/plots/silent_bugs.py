"""Figures of silent bugs: what catches them, and losses that do not show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style

CAUGHT = "#0072B2"
WRONG = style.MUTED[1]
# What a column of the matrix is called, above it.
CHECKS = {
    "falls": "loss\nfalls",
    "loss_equals": "loss\nequals",
    "gradients": "gradients\nequal",
    "invariants": "invariants",
    "types": "types",
    "bytes": "bytes\nsent",
    "verify": "verify",
}


def curves(runs: Mapping[str, Sequence[float]]) -> Figure:
    """Losses by step of the right run, which comes first, and of wrong ones; all of the same weights and batches."""
    _, axes = style.figure(5.4, 2.7)
    for number, (name, losses) in enumerate(runs.items()):
        steps = range(1, len(losses) + 1)
        colour = style.INK if number == 0 else style.MUTED[(number - 1) % len(style.MUTED)]
        dashes = style.DASHES[number % len(style.DASHES)]
        style.theory(
            axes, steps, losses, name, colour=colour, linestyle=dashes, linewidth=2.4 - 1.2 * (number > 0)
        )
    axes.set(xlabel="step", ylabel="loss in nats a byte")
    right, *wrong = [float(losses[-1]) for losses in runs.values()]
    apart = max(abs(each / right - 1) for each in wrong)
    fallen = 1 - min(right, *wrong) / float(next(iter(runs.values()))[0])
    finding = f"{len(wrong)} wrong runs end within {100 * apart:.1f} % of the right one"
    return style.finish(
        axes, finding, f"all losses fall, by {100 * fallen:.0f} % at most, from the same weights and batches"
    )


def tolerances(errors: Mapping[str, Mapping[str, Sequence[float]]], tolerance: float) -> Figure:
    """Relative errors of gradients, a point for each number: by precision, of a right run and of a wrong one.

    Args:
        errors: by precision, and by what the run is, "right" or the bug's name.
        tolerance: a line across all precisions.
    """
    _, axes = style.figure(6.6, 3.0)
    random = np.random.default_rng(0)
    for place, by_run in enumerate(errors.values()):
        for side, (name, values) in enumerate(by_run.items()):
            x = place + 0.4 * side - 0.2 + random.uniform(-0.12, 0.12, len(values))
            colour = WRONG if side else style.QUIET
            floor = np.maximum(values, 1e-17)  # those that are equal have a place, too
            style.measured(axes, x, floor, colour=colour, markersize=3, markeredgewidth=0)
            if place == 0:
                style.note(axes, name, (0.4 * side - 0.2, min(values)), (0, -18), ha="center", color=colour)
    axes.axhline(tolerance, color=style.INK, linewidth=1, linestyle=(0, (4, 2)))
    written = f"{tolerance:.0e}".replace("e-0", "e-")
    style.note(axes, written, (len(errors) - 0.55, tolerance), (2, 4))
    axes.set(yscale="log", ylabel="error / largest gradient", xlim=(-0.6, len(errors) - 0.35))
    axes.set_ylim(1e-18, 20)
    axes.set_xticks(range(len(errors)), list(errors))
    (first, *_), (*_, last) = errors, errors
    _, wrong = errors[first].values()
    right, _ = errors[last].values()
    passes = [f"passes a bug in {first}"] * (max(wrong) < tolerance)
    rejects = [f"rejects what is right in {last}"] * (max(right) > tolerance)
    finding = f"{written} {' and '.join(passes + rejects) or 'does in all precisions'}"
    return style.finish(axes, finding, "a point: a parameter of a small GPT, its worst seed")


def by_class(
    table: pd.DataFrame,
    alarms: Mapping[str, int],
    right: int,
    fresh: Mapping[str, pd.DataFrame] | None = None,
) -> Figure:
    """How many bugs of each class a check catches, the darker the more; a dash where it can state none of them.

    Args:
        table: that of `gauntlet.matrix.matrix`, for bugs.
        alarms: of each check, among so many `right` runs; at the bottom.
        fresh: tables of bugs that no check was written for, by when they were measured; a row each, of all classes.
    """
    fresh = fresh or {}
    checks = [name for name in table.columns if name != "class"]
    groups = dict([*table.groupby("class", sort=False)])
    groups |= {f"fresh bugs, {when}": each for when, each in fresh.items()}
    places = np.arange(len(groups) + 1.0)
    places[len(groups) - len(fresh) :] += 0.3
    found = {name: list(table[name]).count("caught") for name in checks}
    drawn, axes = style.figure(6.8, 1.4 + 0.2 * len(groups), layout="constrained")
    for column, name in enumerate(checks):
        for place, group in zip(places, groups.values(), strict=False):
            verdicts = list(group[name])
            caught = verdicts.count("caught")
            colour = style.tint(CAUGHT, caught / len(group)) if caught else "white"
            axes.barh(place, 0.94, 0.88, left=column - 0.47, color=colour)
            words = "–" if {*verdicts} == {"outside"} else str(caught)
            style.inside(axes, column, place, words, colour, fontsize=8)
        axes.text(
            column, -0.65, f"{CHECKS.get(name, name)}\n{found[name]}", ha="center", va="bottom", fontsize=7.5
        )
        axes.text(column, places[-1], str(alarms[name]), ha="center", va="center", fontsize=8)
    names = [f"{kind} ({len(group)})" for kind, group in groups.items()]
    style.rows(axes, [*names, f"alarms in {right} right runs"], (places[-1] + 0.5, -0.5), places)
    axes.set(xticks=[], xlim=(-0.6, len(checks) - 0.4))
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.spines[:].set_visible(False)
    best = max(checks, key=lambda name: found[name])
    finding = f"A falling loss shows none of {len(table)} bugs, the best check {found[best]}"
    if found[best] == len(table):
        finding = f"Only “{CHECKS.get(best, best)}” finds all {len(table)} bugs"
    if fresh:
        when, each = next(iter(fresh.items()))
        finding += f"; {when}, {list(each[best]).count('caught')} of {len(each)} fresh ones"
    style.headline(drawn, finding, "bugs found, by class; a dash: the check cannot state them")
    return drawn
