"""Checks of lesson 01, one worker; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

from workshop_utils.lessons.checks import compare, exercise, mistakes, questions, recognise
from workshop_utils.scaling import laws

__getattr__ = questions(__name__)


@exercise
def amdahl(answer: Callable[[float, float], float]) -> str:
    """`answer(serial_fraction, workers)` is Amdahl's speed-up."""
    recognise(answer, [(0.05, 8), (0.3, 64)], mistakes(__name__, "amdahl"))
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
