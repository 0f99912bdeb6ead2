"""Figures of silent bugs: what catches them, and losses that do not show them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
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


def matrix(table: pd.DataFrame, false_alarms: Mapping[str, int] | None = None, right: int = 0) -> Figure:
    """Which check catches which bug: filled where it does, hollow where not, a dash where it cannot be stated.

    Args:
        table: a row for each bug, with its name as index, its "class", and a column for each check: "caught", "missed",
            "outside", or what went wrong.
        false_alarms: of the same checks, among so many `right` runs; written below the columns.
    """
    table = table.sort_values("class", kind="stable")
    checks = [name for name in table.columns if name != "class"]
    caught = {name: int((table[name] == "caught").sum()) for name in checks}
    height = 1.6 + 0.2 * len(table) + 0.3 * bool(false_alarms)
    drawn, axes = style.figure(8.8, height, layout="constrained")
    for column, name in enumerate(checks):
        _column(axes, column, list(table[name]))
        words = f"{CHECKS.get(name, name)}\n{caught[name]} of {len(table)}"
        axes.text(column, -0.8, words, ha="center", va="bottom", fontsize=9.5, color=style.INK)
        if false_alarms:
            number = str(false_alarms[name])
            axes.text(column, len(table) + 0.35, number, ha="center", va="center", fontsize=9.5)
    style.rows(axes, [name.replace("_", " ") for name in table.index], (len(table) - 0.5, -0.5))
    if false_alarms:
        places, names = (
            [*range(len(table)), len(table) + 0.35],
            [*table.index, f"alarms in {right} right runs"],
        )
        style.rows(axes, [name.replace("_", " ") for name in names], (len(table) + 0.8, -0.5), places)
    _classes(axes, list(table["class"]), len(checks))
    axes.set(xticks=[], xlim=(-0.6, len(checks) + 3.4))
    axes.tick_params(axis="y", length=0, labelsize=8.5)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    best = max(checks, key=lambda name: caught[name])
    by_any = int((table[checks] == "caught").any(axis=1).sum())
    called = CHECKS.get(best, best).replace("\n", " ")
    finding = f"No check catches all {len(table)} bugs; together they catch {by_any}"
    if caught[best] == len(table):
        finding = f"“{called}” catches all {len(table)} bugs"
    detail = "filled: caught; hollow: missed; dash: cannot be stated"
    style.headline(drawn, finding, detail)
    return drawn


def _column(axes: Axes, column: int, verdicts: Sequence[str]) -> None:
    rows = np.arange(len(verdicts))
    looks = {
        "caught": ("s", CAUGHT, CAUGHT),
        "missed": ("s", "white", "#B5B5B5"),
        "outside": ("_", style.QUIET, style.QUIET),
    }
    kinds = np.array([verdict if verdict in looks else "error" for verdict in verdicts])
    for kind, (marker, face, edge) in {**looks, "error": ("x", WRONG, WRONG)}.items():
        own = rows[kinds == kind]
        axes.plot(
            np.full(len(own), column), own, marker, markersize=7.5, markerfacecolor=face, markeredgecolor=edge
        )


def _classes(axes: Axes, classes: Sequence[str], right: float) -> None:
    """The class of each group of rows, right of the columns, with a line above each group."""
    first = [row for row in range(len(classes)) if row == 0 or classes[row] != classes[row - 1]]
    for row, end in zip(first, [*first[1:], len(classes)], strict=True):
        axes.axhline(row - 0.5, color=style.FAINT, linewidth=0.8, zorder=0)
        words = textwrap.fill(classes[row], 36 if end - row > 1 else 60)
        axes.text(right - 0.4, (row + end - 1) / 2, words, va="center", fontsize=8, color=style.QUIET)


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


def by_class(table: pd.DataFrame, alarms: Mapping[str, int], right: int) -> Figure:
    """How many bugs of each class a check catches, the darker the more; below, its alarms in so many `right` runs.

    `table` is that of `matrix`; a dash stands where a check can state no bug of the class.
    """
    checks = [name for name in table.columns if name != "class"]
    counts = table["class"].value_counts(sort=False)
    drawn, axes = style.figure(6.2, 1.4 + 0.2 * len(counts), layout="constrained")
    for column, name in enumerate(checks):
        for row, (kind, number) in enumerate(counts.items()):
            verdicts = list(table.loc[table["class"] == kind, name])
            caught = verdicts.count("caught")
            colour = style.tint(CAUGHT, caught / number) if caught else "white"
            axes.barh(row, 0.94, 0.88, left=column - 0.47, color=colour)
            words = "–" if {*verdicts} == {"outside"} else str(caught)
            style.inside(axes, column, row, words, colour, fontsize=8)
        of_all = list(table[name]).count("caught")
        axes.text(
            column, -0.65, f"{CHECKS.get(name, name)}\n{of_all}", ha="center", va="bottom", fontsize=7.5
        )
        axes.text(column, len(counts), str(alarms[name]), ha="center", va="center", fontsize=8)
    names = [f"{kind} ({number})" for kind, number in counts.items()]
    style.rows(axes, [*names, f"alarms in {right} right runs"], (len(counts) + 0.5, -0.5))
    axes.set(xticks=[], xlim=(-0.6, len(checks) - 0.4))
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.spines[:].set_visible(False)
    found = {name: list(table[name]).count("caught") for name in checks}
    best = max(checks, key=lambda name: found[name])
    most = found[best]
    finding = f"A falling loss shows none of {len(table)} bugs, the best check {most}"
    if most == len(table):
        finding = f"Only “{CHECKS.get(best, best)}” finds all {len(table)} bugs"
    style.headline(drawn, finding, "bugs found, by class; a dash: the check cannot state them")
    return drawn
