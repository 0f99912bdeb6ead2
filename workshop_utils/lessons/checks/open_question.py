"""A question without one right answer: predict a number, measure it, explain the difference.

    where_it_stops = question(__name__, "where_it_stops")  # in questions.yaml, by the lesson's module
    where_it_stops(predicted=8, measured=10, why="each worker also waits for its pull")
    # Answered: you predicted 8 workers and measured 10, 1.25 times what you predicted. You wrote: “each worker
    # also waits for its pull”; ours: The server's link is full: W* = (c + r) / s.

No program judges an explanation. The check makes sure that there is one, and that the measurement could be one; a
person reads the rest, and grading keeps the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from workshop_utils.lessons.checks import Verdict, is_missing, of_lesson

FEWEST_LETTERS = 24  # of an explanation, in any script
FEWEST_DIFFERENT = 8  # of its letters: “because because because” has 6
FARTHEST = 10  # a prediction may be so many times off what can be measured


@dataclass(frozen=True)
class OpenQuestion:
    """Asks for a number of `unit` that is predicted and measured, and for the reason why they differ or agree.

    `plausible` are the smallest and largest number that such a measurement can give on any machine, `predictable`
    those that a prediction can be (by default ten times as far), and `whole` says that it counts something; `slips`
    say what is wrong with numbers that a mistake gives; `ours` is an explanation to compare with, read once theirs is
    written.
    """

    unit: str
    plausible: tuple[float, float]
    ours: str
    predictable: tuple[float, float] | None = None
    whole: bool = False
    slips: Mapping[float, str] = field(default_factory=dict)

    def __call__(self, predicted: Any = None, measured: Any = None, why: Any = None) -> Verdict:
        """The verdict "answered" on two positive numbers and a sentence; "not yet" while one of them is missing."""
        if any(is_missing(given) for given in (predicted, measured, why)):
            return Verdict(
                "not yet", "predict a number first, then measure, then write in a sentence or two why."
            )
        low, high = self.plausible
        numbers = []
        for name, value in (("predicted", predicted), ("measured", measured)):
            value = value.item() if getattr(value, "size", 0) == 1 else value  # of an array
            if isinstance(value, bool) or not isinstance(value, Real):
                return Verdict("wrong", f"`{name}` is {value!r}; it must be a number of {self.unit}.")
            try:
                number = float(value)
            except OverflowError:
                return Verdict(
                    "wrong", f"`{name}` is too large; it must be a positive number of {self.unit}."
                )
            if not 0 < number < math.inf:
                return Verdict("wrong", f"`{name}` is {value}; it must be a positive number of {self.unit}.")
            numbers.append(number)
        predicted, measured = numbers
        if not low <= measured <= high:
            between = f"a measurement gives something between {low:,g} and {high:,g} {self.unit}"
            return Verdict("wrong", f"`measured` is {measured:,g}; {between}.")
        if slip := self.slips.get(measured):
            return Verdict("wrong", f"`measured` is {measured:,g}, {slip}.")
        least, most = self.predictable or (low / FARTHEST, high * FARTHEST)
        if not least <= predicted <= most:
            reach = f"from {least:,g} to {most:,g} {self.unit}"
            return Verdict(
                "wrong", f"`predicted` is {predicted:,g}; a prediction worth measuring is {reach}."
            )
        for name, number in (("predicted", predicted), ("measured", measured)) if self.whole else ():
            if number != int(number):
                counts = f"it counts {self.unit}, so it is a whole number"
                return Verdict("wrong", f"`{name}` is {number:,g}; {counts}.")
        letters = [each for each in why if each.isalpha()] if isinstance(why, str) else []
        if len(letters) < FEWEST_LETTERS or len(set(letters)) < FEWEST_DIFFERENT:
            needed = f"at least {FEWEST_LETTERS} letters, not always the same ones"
            return Verdict("wrong", f"`why` is no explanation yet; write a sentence or two, {needed}.")
        compared = f"you predicted {predicted:,.4g} {self.unit} and measured {measured:,.4g}"
        factor = measured / predicted
        times = f"{factor:.3g}" if factor >= 1 else f"{factor:.2g}"  # 1.05 and 0.54
        off = "as predicted" if times == "1" else f"{times} times what you predicted"
        return Verdict("answered", f"{compared}, {off}. You wrote: “{why.strip()}”; ours: {self.ours}")


def question(module: str, name: str) -> OpenQuestion:
    """The question `name` of the lesson of `module`, whose fields and texts stand in `questions.yaml`."""
    return OpenQuestion(**of_lesson("questions.yaml", module)[name])
