"""Figures of silent bugs: what catches them, and how little losses show of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style

FLOOR = 1e-3  # in percent; below are differences of rounding
CAUGHT = "#0072B2"
WRONG = style.MUTED[1]
EQUAL = 1e-17  # where numbers that are equal to the bit have their place
# Parameters whose gradients are sums over tokens outside of matrix products: norms and embeddings.
SUMMED = re.compile("norm|token|position")
# What a column of the matrix is called, above it.
CHECKS = {
    "falls": "loss\nfalls",
    "loss_equals": "loss\nequals",
    "gradients": "gradients\nequal",
    "invariants": "invari-\nants",
    "types": "types",
    "bytes": "bytes\nsent",
    "verify": "verify",
}


def deviations(runs: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """How far losses of wrong runs are from those of the right run, which comes first: by seed and step, in percent."""
    _, axes = style.figure(5.4, 2.7)
    (_, right), *wrong = ((name, np.asarray(losses)) for name, losses in runs.items())
    steps = np.arange(1, right.shape[1] + 1)
    for number, (name, losses) in enumerate(wrong):
        apart = 100 * np.abs(losses / right - 1)
        # Before it acts, a bug leaves rounding alone.
        drawn = np.where(apart > FLOOR, apart, np.nan)
        look: dict[str, Any] = {"colour": style.MUTED[number], "linestyle": style.DASHES[number]}
        for seed, line in enumerate(drawn):
            style.theory(axes, steps, line, "_seed" if seed else name, linewidth=0.9, **look)
    axes.set(xlabel="step", ylabel="loss differs, %", yscale="log", xlim=(1, steps[-1]), ylim=(3e-3, 10))
    style.plain_ticks(axes.yaxis, (0.01, 0.1, 1, 10))
    apart = 100 * np.abs(np.stack([losses for _, losses in wrong]) / right - 1)
    finding = f"Wrong runs' losses: {apart.max():.1f} % off at most, {apart.mean():.1f} % on average"
    fallen = 100 * (1 - np.mean([losses[:, -1] / losses[:, 0] for _, losses in wrong]))
    detail = f"all losses fall, the wrong ones by {fallen:.0f} %; a line: one of {len(right)} seeds"
    return style.finish(axes, finding, detail)


def tolerances(errors: Mapping[str, Mapping[str, Mapping[str, float]]], tolerance: float) -> Figure:
    """Relative errors of gradients, by precision, of a right run and of a wrong one; rings for norms and embeddings.

    Args:
        errors: by precision, by what the run is ("right" or the bug's name), and by parameter.
        tolerance: a line across all precisions.
    """
    _, axes = style.figure(6.6, 3.0)
    random = np.random.default_rng(0)
    for place, by_run in enumerate(errors.values()):
        for side, (name, by_parameter) in enumerate(by_run.items()):
            colour, centre = WRONG if side else style.QUIET, place + 0.4 * side - 0.2
            floor = {each: max(error, EQUAL) for each, error in by_parameter.items()}
            for hollow in (False, True):
                heights = [error for each, error in floor.items() if bool(SUMMED.search(each)) == hollow]
                x = centre + random.uniform(-0.12, 0.12, len(heights))
                options: dict[str, Any] = (
                    {"markersize": 3.5} if hollow else {"markersize": 3, "markeredgewidth": 0}
                )
                style.measured(axes, x, heights, colour=colour, hollow=hollow, **options)
            style.note(axes, name, (centre, max(floor.values())), (0, 6), ha="center", color=colour)
    axes.axhline(tolerance, color=style.INK, linewidth=1, linestyle=(0, (4, 2)))
    written = f"{tolerance:.0e}".replace("e-0", "e-")
    style.note(axes, written, (len(errors) - 0.55, tolerance), (2, 4))
    axes.set(yscale="log", ylabel="error / largest gradient", xlim=(-0.6, len(errors) - 0.35))
    axes.set_ylim(EQUAL / 5, 100)
    axes.set_xticks(range(len(errors)), list(errors))
    (first, *_), (*_, last) = errors, errors
    _, wrong = errors[first].values()
    right, _ = errors[last].values()
    passes = [f"passes a bug in {first}"] * (max(wrong.values()) < tolerance)
    rejects = [f"rejects what is right in {last}"] * (max(right.values()) > tolerance)
    finding = f"{written} {' and '.join(passes + rejects) or 'does in all precisions'}"
    detail = "a point: a parameter's worst seed; rings: norms, embeddings; at 1e-17: equal"
    return style.finish(axes, finding, detail)


def by_class(
    table: pd.DataFrame,
    alarms: Mapping[str, int],
    right: int,
    fresh: Mapping[str, pd.DataFrame] | None = None,
    least: int = 1,
) -> Figure:
    """How many bugs of each class a check catches, the darker the more; "of" how many, if it cannot state them all.

    Args:
        table: that of `gauntlet.matrix.matrix`, for bugs.
        alarms: of each check, among so many `right` runs; at the bottom.
        fresh: tables of bugs that no check was written for, by when they were measured; a row each, of all classes.
        least: classes of fewer bugs share a row.
    """
    fresh = fresh or {}
    checks = [name for name in table.columns if name != "class"]
    sizes = table.groupby("class")["class"].transform("size")
    few = f"{table['class'][sizes < least].nunique()} other classes"
    groups = dict([*table.groupby(table["class"].where(sizes >= least, few), sort=False)])
    groups |= {few: groups.pop(few)} if few in groups else {}
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
            stated = len(verdicts) - verdicts.count("outside")
            words = f"{caught} of {stated}" if 0 < stated < len(verdicts) else str(caught) if stated else "–"
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
    finding = f"“{_words(best)}” finds {found[best]} of {len(table)} bugs"
    if found[best] == len(table):
        finding = f"Only “{_words(best)}” finds all {len(table)} bugs"
    elif len(checks) > 1:
        is_caught = table[checks] == "caught"
        either = {other: int((is_caught[best] | is_caught[other]).sum()) for other in checks if other != best}
        second = max(either, key=lambda name: either[name])
        finding += f", with “{_words(second)}” {either[second]}"
    if fresh:
        when, each = next(iter(fresh.items()))
        finding += f"; {when}, {list(each[best]).count('caught')} of {len(each)} fresh ones"
    style.headline(drawn, finding, "bugs found, by class; “of”: as many can be stated, a dash: none")
    return drawn


def _words(check: str) -> str:
    return CHECKS.get(check, check).replace("-\n", "").replace("\n", " ")
