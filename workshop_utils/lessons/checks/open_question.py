"""A question without one right answer: predict a number, measure it, explain the difference.

    where_it_stops = OpenQuestion("workers", (2, 64), "The server's link is full: W* = (c + r) / s.")
    where_it_stops(predicted=8, measured=10, why="each worker also waits for its pull")
    # Answered: you predicted 8 workers and measured 10 workers, 1.25 times as much. You wrote: ... Compare: ...

No program judges an explanation. The check makes sure that there is one, and that the measurement could be one; a
person reads the rest, and grading keeps the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from workshop_utils.lessons.checks import Verdict, is_missing

FEWEST_WORDS = 8  # of an explanation


@dataclass(frozen=True)
class OpenQuestion:
    """Asks for a number of `unit` that is predicted and measured, and for the reason why they differ or agree.

    `plausible` are the smallest and largest number that such a measurement can give on any machine; `ours` is an
    explanation to compare with, which learners read once they have written theirs.
    """

    unit: str
    plausible: tuple[float, float]
    ours: str
    is_counted: bool = False  # such a measurement is a whole number

    def __call__(self, predicted: Any = None, measured: Any = None, why: Any = None) -> Verdict:
        """The verdict "answered" on two positive numbers and a sentence; "not yet" while one of them is missing."""
        if any(is_missing(given) for given in (predicted, measured, why)):
            return Verdict(
                "not yet", "predict a number first, then measure, then write in a sentence or two why."
            )
        low, high = self.plausible
        for name, value in (("predicted", predicted), ("measured", measured)):
            if isinstance(value, bool) or not isinstance(value, Real):
                return Verdict("wrong", f"`{name}` is {value!r}; it must be a number of {self.unit}.")
            if not math.isfinite(value) or value <= 0:
                return Verdict("wrong", f"`{name}` is {value}; it must be a positive number of {self.unit}.")
        if not low <= measured <= high:
            between = f"a measurement gives something between {low:,g} and {high:,g} {self.unit}"
            return Verdict("wrong", f"`measured` is {measured:,g}; {between}.")
        if self.is_counted and measured != int(measured):
            return Verdict("wrong", f"`measured` is {measured:,g}; {self.unit} are counted: a whole number.")
        words = why.split() if isinstance(why, str) else []
        if len(set(words)) < FEWEST_WORDS:
            return Verdict("wrong", f"`why` has {len(words)} words; explain the number in a sentence or two.")
        compared = f"you predicted {predicted:,.4g} {self.unit} and measured {measured:,.4g}"
        factor = f"{measured / predicted:.2g} times what you predicted"
        return Verdict("answered", f"{compared}, {factor}. You wrote: “{why.strip()}” Compare: {self.ours}")
