"""A question without one right answer: predict a number, measure it, explain the difference.

    @measured
    def where_it_stops(results):          # its unit and our answer: in questions.yaml, by the lesson's module
        runs = runs_of(results, "train_together", network="100Mbit")
        return ...                        # the number that these runs measured

    where_it_stops(8, results, "each worker also waits for its pull")
    # Answered: you predicted 8 workers and measured 10, 1.25 times what you predicted. You wrote: “each worker
    # also waits for its pull”. No program judges a reason; compare it with ours: The server's link is full.

What was measured is computed from what the learner's own run returned, and refused where that was another experiment.
In some lessons the learner still gives a number (`question`). A person reads the reason, and grading keeps the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from workshop_utils.lessons.checks import NotYet, Verdict, Wrong, is_missing, number_of, of_lesson, refuse
from workshop_utils.network import Network
from workshop_utils.ranks.results import Results

FEWEST_LETTERS = 24  # of an explanation, in any script
FEWEST_DIFFERENT = 8  # of its letters: “because because because” has 6
FARTHEST = 10  # a prediction may be so many times off what can be measured


@dataclass(frozen=True)
class OpenQuestion:
    """Asks for a number of `unit` that is predicted and measured, and for the reason why they differ or agree.

    `measure` computes what was measured from the learner's results, and raises Wrong where they are not those of the
    experiment; without it the learner gives a number. `plausible` are the smallest and largest that such a measurement
    can give on any machine, `predictable` those that a prediction can be (by default ten times as far), and `whole`
    says that it counts something; `slips` say what is wrong with numbers that a mistake gives; `ours` is an explanation
    to compare with, read once theirs is written.
    """

    unit: str
    ours: str
    plausible: tuple[float, float] = (0, math.inf)
    predictable: tuple[float, float] | None = None
    whole: bool = False
    slips: Mapping[float, str] = field(default_factory=dict)
    measure: Callable[[Any], float] | None = None

    def __call__(self, predicted: Any = None, measured: Any = None, why: Any = None) -> Verdict:
        """The verdict "answered" on a positive number, what was measured and a sentence; "not yet" without one."""
        if any(is_missing(given) for given in (predicted, measured, why)):
            return Verdict(
                "not yet", "predict a number first, then measure, then write in a sentence or two why."
            )
        try:
            prediction = self._number("predicted", predicted)
            low, high = self.plausible
            least, most = self.predictable or (low / FARTHEST, high * FARTHEST)
            reach = f"from {least:,g} to {most:,g} {self.unit}"
            worth = f"`predicted` is {prediction:,g}; a prediction worth measuring is {reach}."
            if self.measure is None:
                measurement = self._number("measured", measured)
                between = f"a measurement gives something between {low:,g} and {high:,g} {self.unit}"
                refuse(not low <= measurement <= high, f"`measured` is {measurement:,g}; {between}.")
                slip = self.slips.get(measurement)
                refuse(slip, f"`measured` is {measurement:,g}, {slip}.")
                refuse(not least <= prediction <= most, worth)
            else:
                refuse(not least <= prediction <= most, worth)
                measurement = self.measure(measured)
                between = f"the lesson's own runs give something between {low:,g} and {high:,g} {self.unit}"
                outside = f"`results` measures {_short(measurement)}; {between}"
                refuse(not low <= measurement <= high, f"{outside}.")
            for name, number in (("predicted", prediction), ("measured", measurement)) if self.whole else ():
                counts = f"it counts {self.unit}, so it is a whole number"
                refuse(number != int(number), f"`{name}` is {number:,g}; {counts}.")
        except Wrong as wrong:
            return Verdict("wrong", str(wrong))
        except NotYet as missing:
            return Verdict("not yet", str(missing))
        except Exception as error:  # of results that a program of the learner's own gave
            return Verdict("wrong", f"`results` cannot be read: {type(error).__name__}: {error}.")
        letters = [each for each in why if each.isalpha()] if isinstance(why, str) else []
        if len(letters) < FEWEST_LETTERS or len(set(letters)) < FEWEST_DIFFERENT:
            needed = f"at least {FEWEST_LETTERS} letters, not always the same ones"
            return Verdict("wrong", f"`why` is no explanation yet; write a sentence or two, {needed}.")
        done = "simulated" if isinstance(measurement, Simulated) else "measured"
        compared = f"you predicted {_short(prediction)} {self.unit} and {done} {_short(measurement)}"
        factor = measurement / prediction
        times = f"{factor:.3g}" if factor >= 1 else f"{factor:.2g}"  # 1.05 and 0.54
        off = "as predicted" if times == "1" else f"{times} times what you predicted"
        judged = "No program judges a reason; compare it with ours"
        return Verdict(
            "answered", f"{compared}, {off}. You wrote: “{why.strip().rstrip('.')}”. {judged}: {self.ours}"
        )

    def _number(self, name: str, value: Any) -> float:
        """A positive number of `unit`. Raises Wrong for anything else."""
        value = value.item() if getattr(value, "size", 0) == 1 else value  # of an array
        if isinstance(value, bool) or not isinstance(value, Real):
            raise Wrong(f"`{name}` is {value!r}; it must be a number of {self.unit}.")
        try:
            number = float(value)
        except OverflowError:
            raise Wrong(f"`{name}` is too large; it must be a positive number of {self.unit}.") from None
        positive = f"`{name}` is {value}; it must be a positive number of {self.unit}"
        refuse(not 0 < number < math.inf, f"{positive}.")
        return number


class Simulated(float):
    """A number that comes from the simulated clock, since this machine cannot measure it; the verdict says so."""


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def question(module: str, name: str) -> OpenQuestion:
    """The question `name` of the lesson of `module`, whose fields and texts stand in `questions.yaml`."""
    return OpenQuestion(**of_lesson("questions.yaml", module)[name])


def measured(measure: Callable[[Any], float]) -> OpenQuestion:
    """The question of this name, whose measured number `measure(results)` computes; it raises Wrong and NotYet."""
    return OpenQuestion(**of_lesson("questions.yaml", measure.__module__)[measure.__name__], measure=measure)


def runs_of(
    results: Any, program: str, ranks: int | None = None, network: str | Sequence[str | None] | None = None
) -> list[Results]:
    """All runs in `results`, which is one or a list or dictionary of them, at any depth.

    Args:
        results: what the learner gives.
        program: the name of the function that they must have called.
        ranks: on how many ranks; None if that varies.
        network: over which links, or over one of which, as `on_ranks` takes them; None is full speed.

    Raises:
        NotYet: if there are none.
        Wrong: if something else is among them, or a run is of another experiment; the message says in what.
    """
    runs = [*_flat(results)]
    if not runs:
        raise NotYet("`results` is empty: give what your runs returned.")
    several = [network] if isinstance(network, str | None) else network
    asked = [Network.parse(each) if each else None for each in several]
    for run in runs:
        of = f"`{run.program}`" if run.program else "a cell"
        refuse(run.program != program, f"`results` has a run of {of}; it must be of `{program}`.")
        given = number_of(len(run), "rank")
        refuse(ranks not in (None, len(run)), f"`results` has a run on {given}; it must be on {ranks}.")
        over, *wanted = (str(each or "full speed") for each in (run.links, *asked))
        is_asked = _link(run.links) in map(_link, asked)
        refuse(not is_asked, f"`results` has a run at {over}; it must be at {' or '.join(wanted)}.")
    return runs


def _link(network: Network | None) -> Any:
    """What two networks have in common that are the same, however their rates are written."""
    if network is None:
        return None
    seconds, rate = network.latency_seconds, network.bandwidth_bytes_per_second
    return rate, seconds, network.racks, network.spine, network.exceptions


def _flat(given: Any) -> Iterable[Results]:
    if isinstance(given, Results):
        yield given
    elif isinstance(given, Mapping | list | tuple):
        for each in given.values() if isinstance(given, Mapping) else given:
            yield from _flat(each)
    else:
        what = "give what `on_ranks` returned, without `.values`, or a list or dictionary of that"
        raise Wrong(f"`results` holds {type(given).__name__}; {what}.")
