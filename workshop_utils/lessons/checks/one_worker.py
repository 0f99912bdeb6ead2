"""Checks of lesson 01, one worker; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import NotYet, Wrong, compare, exercise, is_missing, mistakes, recognise
from workshop_utils.lessons.checks.open_question import question
from workshop_utils.scaling.laws import amdahl_speedup, gustafson_speedup, karp_flatt

Function = Callable[..., Any]

# A law's cases: the first two are compared with typical mistakes.
FRACTIONS: list[tuple[float, ...]] = [(0.05, 8), (0.3, 64), (0.2, 1), (0, 8), (1, 8), (0.001, 1000), (0.1, 7)]
FRACTIONS += [(0.6, 16), (0.5, 2), (0.9, 3)]
SECONDS: list[tuple[float, ...]] = [(10, 4, 4), (3, 1, 5), (2, 1, 2), (1.28, 0.6, 4), (10, 2, 4), (5, 7, 8)]
SECONDS += [(10, 6, 2), (9, 5, 3), (100, 20, 64), (1.28, 2.4, 16), (1, 7, 3)]
# Numbers of workers that cannot tell a, b and c apart: one or two different ones.
TOO_FEW = [(1, 4), (2, 2, 8, 8), (2, 2, 2), (2, 2, 2, 8, 8, 8), (1, 4) * 6, (3, 5, 5), (6,), (12, 16, 12, 12)]


@exercise
def laws(answer: tuple[Function, Function, Function]) -> str:
    """`answer` is Amdahl's speed-up, Gustafson's scaled speed-up, and the fraction of Karp and Flatt."""
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise Wrong("give three functions: (my_amdahl, my_gustafson, my_karp_flatt).")
    references: tuple[Function, ...] = (amdahl_speedup, gustafson_speedup, karp_flatt)
    for own, name, law, cases in zip(
        answer,
        ("my_amdahl({}, {})", "my_gustafson({}, {})", "my_karp_flatt({}, {}, {})"),
        references,
        (FRACTIONS, FRACTIONS, SECONDS),
        strict=True,
    ):
        if is_missing(own):
            raise NotYet(f"write `{name.partition('(')[0]}`, then run this again.")
        recognise(own, cases[:2], mistakes(__name__, name.partition("(")[0]))
        compare(own, law, [(name, "", *case) for case in cases])
    return "Amdahl and Gustafson are one law: with s = g / (g + (1 − g) N) they give the same speed-up."


def fitted(workers: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """a, b and c of a + b/N + c(N − 1), by least squares."""
    rows = np.stack([workers**0, 1 / workers, workers - 1], axis=1)
    return np.linalg.lstsq(rows, seconds)[0]


@exercise
def fit(answer: Function) -> str:
    """`answer(workers, seconds)` is `fitted`, or raises ValueError where there are fewer than three different N."""
    cases = []
    for a, b, c, *sizes in (
        (0.1, 1.2, 0.07, 4, 1, 2, 2, 1, 8, 4),
        (0.1, 1.2, 0.07, 2, 6, 12, 3, 24),
        (-0.1, 1.2, 0.07, 1, 2, 4),  # whole numbers
        (0.1, 1.2, 0.07, 16, 3, 8, 5),
        (0.1, 1.2, 0.07, 4, 5, 6),  # neighbours: nearly alike, but not quite
        (0.1, 1.2, 0.07, 10, 8, 9),
        (0.9, 1.2, -0.2, 1, 2, 4, 4, 2, 1, 1, 2, 4),  # three numbers of workers only
        (2.0, -1.2, 0.07, 3, 8, 2, 5, 1, 6),
        (0.1, 1.2, 0.07, 3, 1, 16, 2, 8, 4, 1, 12, 6, 2, 24),
    ):
        workers = np.array(sizes, dtype=int if sizes == [1, 2, 4] else float)
        noise = np.random.default_rng(0).normal(size=len(sizes))
        noise[-1] *= 20  # a run that was disturbed counts as any other
        seconds = a + b / workers + c * (workers - 1) + 0.02 * noise * (len(sizes) > 4)
        cases.append((workers, np.round(seconds, 3)))
    recognise(answer, cases[:2], mistakes(__name__, "fit", fitted=fitted))
    because = "a, b, c by least squares of all times"
    for case in reversed(cases):
        compare(answer, fitted, [("my_fit({}, {})", because, *case)], tolerance=1e-4)
        given = copy.deepcopy(case)
        answer(*given)
        _refuse_changes(given, case)
    for few in TOO_FEW:
        case = np.array(few, dtype=float), 0.1 + 1.2 / np.array(few)
        given = copy.deepcopy(case)
        try:
            got = answer(*given)
        except ValueError:
            _refuse_changes(given, case)
            continue
        with np.printoptions(precision=3):
            gave = f"of the workers {few} it gave {got}"
        raise Wrong(
            f"{gave}; one or two different numbers of workers cannot tell three unknowns apart, so infinitely "
            "many fits are equally good: raise ValueError."
        )
    return "it finds a, b and c from any three or more numbers of workers, and refuses to guess from fewer."


def _refuse_changes(given: tuple[np.ndarray, ...], case: tuple[np.ndarray, ...]) -> None:
    if not all(map(np.array_equal, given, case)):
        raise Wrong("the numbers are right, but it changes the arrays that it is given: compute with copies.")


where_it_stops = question(__name__, "where_it_stops")
