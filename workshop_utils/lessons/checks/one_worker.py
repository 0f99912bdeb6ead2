"""Checks of lesson 01, one worker; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

from workshop_utils.lessons.checks import compare, exercise, questions, recognise
from workshop_utils.scaling import laws

__getattr__ = questions(__name__)

_OTHER_LAWS = {
    "that is Gustafson's law, in which the work grows with the workers; here the same work is shared.": (
        lambda s, n: s + (1 - s) * n
    ),
    "that is the ceiling, of endlessly many workers; where does their number come in?": lambda s, n: 1 / s,  # noqa: ARG005
    "that is the time, if one worker needs 1; the speed-up is one over it.": lambda s, n: s + (1 - s) / n,
    "the parts are swapped: the workers share 1 − s, and not s.": (lambda s, n: 1 / (1 - s + s / n)),
    "brackets: the whole sum, s + (1 − s) / N, belongs below the line.": lambda s, n: 1 / s + (1 - s) / n,
    "here only the shared part takes time; the serial part s has to be added.": (lambda s, n: n / (1 - s)),
    "that is the number of workers: it would be right if nothing were serial.": lambda s, n: n,  # noqa: ARG005
}


@exercise
def amdahl(answer: Callable[[float, float], float]) -> str:
    """`answer(serial_fraction, workers)` is Amdahl's speed-up."""
    recognise(answer, [(0.05, 8), (0.3, 64)], _OTHER_LAWS)
    speedup = "speed-up with serial fraction {} and {:,} workers"
    cases = [
        ("speed-up with 1 worker", "one worker is as fast as itself", 0.05, 1),
        (speedup, "everything is shared", 0, 8),
        (speedup, "nothing can be shared", 1, 8),
        (speedup, "the serial part takes 0.05 of the time, the rest 0.95 / 1,000", 0.05, 1000),
        *((speedup, "", serial, workers) for serial, workers in ((0.5, 2), (0.1, 7), (0.3, 64))),
    ]
    compare(answer, laws.amdahl_speedup, cases)
    return "that is Amdahl's law."
