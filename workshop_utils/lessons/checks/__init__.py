"""Checks of the lessons' exercises: each says what is wrong, not only that something is.

Learners pass in what they wrote and read a sentence. Nothing is raised, so a notebook with unsolved exercises still
runs to its end:

    one_worker.laws(...)                          # Not yet: put your answer in place of the dots, then run this again.
    one_worker.laws((amdahl, gustafson, flatt))   # Wrong: that is the number of workers: it would be right if nothing …

This module has what all lessons share; each lesson's own checks have a module beside it. A new check is a function
decorated with `exercise`. It takes the learner's answer, raises Wrong with a sentence on the first mistake, and returns
what to say when everything is right:

    @exercise
    def double(answer: Callable[[float], float]) -> str:
        '''`answer(x)` is 2 · x.'''
        got = result_of(answer, 3)                                        # not yet, where that is nothing
        refuse(got == 9, "that is the square; double it.")                # one mistake
        refuse_any("double(3)", {                                         # the first of several that is true
            " is no number.": not isinstance(got, int | float),
            f" is {got}, which is odd.": lambda: got % 2,                 # asked only where nothing before it is true
        })
        explain(got, {"that is three times as much.": 9})                 # a value that a mistake gives
        expect(got, 6, "double(3)", "it is 3 + 3")                        # anything else
        return "it doubles."

- Typical wrong formulas stand in `mistakes.yaml`, each with a sentence; `recognise` finds the one that agrees with a
  function in some cases, and `compare` compares a function with the right one.
- `questions.yaml` has the questions without one right answer; what was measured is computed from the learner's results
  by a function under `@measured` (`open_question`).
- On ranks: `processes.on_threads` and `processes.values_on_ranks` run a program that calls the learner's function. It
  may raise Wrong and NotYet there, too, by all of the above.
- In sentences: `number_of(3, "rank")` is "3 ranks", and `listed((1, 2, 5))` is "1, 2 and 5".
"""

from __future__ import annotations

import copy
import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import ArrayLike

from workshop_utils.setup import install

Outcome = Literal["not yet", "wrong", "right", "answered"]  # answered: no program can judge it


@dataclass(frozen=True, repr=False)
class Verdict:
    """The result of a check; a notebook shows it as one line of text below the cell."""

    state: Outcome
    text: str

    def __repr__(self) -> str:
        return f"{self.state.capitalize()}: {self.text}"


Check = Callable[[Any], Verdict]
Function = Callable[..., Any]


class Wrong(Exception):
    """An answer is wrong; the message tells the learner why."""


class NotYet(Exception):
    """There is no answer yet; the message says what to do."""


def refuse(wrong: object, sentence: str) -> None:
    """Raise Wrong with `sentence` where `wrong` is true. The sentence is always made: let it hold in any case."""
    if wrong:
        raise Wrong(sentence)


def refuse_any(where: str, mistakes: Mapping[str, object]) -> None:
    """Raise Wrong with the first sentence of `mistakes` that is true of the answer, behind the words `where`.

    The sentences are the keys. A value that is a function is called, only where nothing before it is true.
    """
    for sentence, wrong in mistakes.items():
        refuse(wrong() if callable(wrong) else wrong, f"{where}{sentence}")


def number_of(count: int, what: str, plural: str = "s") -> str:
    """Such as "1 rank" and "3 ranks"."""
    return f"{count} {what}{plural * (count != 1)}"


def listed(things: Iterable[object]) -> str:
    """Such as "1, 2 and 5"."""
    *first, last = [*map(str, things)] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def exercise(examine: Callable[[Any], str]) -> Check:
    """Turn `examine` into a check that never raises and returns a Verdict.

    An answer of None or `...`, or a function that returns one of them or raises NotImplementedError, counts as
    not yet written.
    """

    @functools.wraps(examine)
    def check(answer: Any = None) -> Verdict:
        try:
            if is_missing(answer):
                raise NotYet("put your answer in place of the dots, then run this again.")
            return Verdict("right", examine(answer))
        except Wrong as wrong:
            return Verdict("wrong", str(wrong))
        except NotYet as missing:
            return Verdict("not yet", str(missing))
        except NotImplementedError:
            return Verdict("not yet", "write the function, then run this again.")
        except Exception as error:
            line = _line_of(error, answer)
            return Verdict("wrong", f"it stopped with {type(error).__name__}: {error}{line}")

    return check


def expect(
    got: Any,
    expected: ArrayLike,
    what: str,
    because: str = "",
    tolerance: float = 1e-6,
    slips: Mapping[str, Any] | None = None,
) -> None:
    """Raise Wrong unless `got` is `expected` to a relative `tolerance`; `what` names it, `because` explains.

    Where `got` is one of the typical wrong values in `slips`, what stands there of it explains it better.

    Raises:
        NotYet: if `got` is None or `...`, the result of a function that is not written yet.
        Wrong: if it has another type, shape or value; the message holds both values.
    """
    if is_missing(got):
        raise NotYet(f"{what} gave nothing: write the function, then run this again.")
    reason = f"; {because}" if because else ""
    try:
        if np.asarray(got).dtype.kind in "bSU":  # NumPy would convert True and "7" to numbers
            raise TypeError
        values = np.asarray(got, dtype=float)
    except (TypeError, ValueError):
        raise Wrong(f"{what} gave {got!r}, which is no number{reason}.") from None
    target = np.asarray(expected, dtype=float)
    if values.shape != target.shape:
        raise Wrong(f"{what} has shape {values.shape}; it must be {target.shape}{reason}.")
    if not np.allclose(values, target, rtol=tolerance, atol=tolerance * float(np.abs(target).max(initial=0))):
        slip = next((slip for slip, value in (slips or {}).items() if _same(values, value)), "")
        reason = f"; {slip}" if slip else reason
        digits = next((each for each in (6, 9, 17) if formatted(values, each) != formatted(target, each)), 17)
        raise Wrong(
            f"{what} gave {formatted(values, digits)}; it must be {formatted(target, digits)}{reason}."
        )


def is_missing(answer: object) -> bool:
    return answer is None or answer is ...


def formatted(values: np.ndarray, digits: int = 6) -> str:
    if values.ndim == 0:
        return f"{float(values):.{digits}g}"
    return np.array2string(values, precision=digits - 2, threshold=20)


def result_of(answer: Function, *arguments: Any) -> Any:
    """The result of the learner's function. Raises NotYet if it is None or `...`."""
    got = answer(*arguments)
    if is_missing(got):
        raise NotYet("your function gave nothing: write it, then run this again.")
    return got


def _line_of(error: Exception, answer: object) -> str:
    """The line of the learner's own function at which it stopped, and of several functions, which one."""
    functions = answer if isinstance(answer, tuple | list) else (answer,)
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code in codes:
            name = "function" if len(functions) == 1 else f"`{frame.f_code.co_name}`"
            return f" (line {line - frame.f_code.co_firstlineno + 1} of your {name})"
    return ""


def mistakes(module: str, name: str, **names: Function) -> dict[str, Function]:
    """The typical wrong formulas of the check `name` in `mistakes.yaml`, as functions, by the sentence on each.

    They may use NumPy as `np`, and `names`, the lesson's own functions.
    """
    written = of_lesson("mistakes.yaml", module)[name]
    head, own = f"lambda {written['arguments']}: ", {"np": np, **names}
    return {sentence: eval(f"{head}{formula}", own) for formula, sentence in written["mistakes"].items()}


@functools.cache
def of_lesson(file: str, module: str) -> dict[str, Any]:
    """What a YAML file beside this one has about the lesson of `module`."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return dict(yaml.safe_load(text)[module.rpartition(".")[2]])


def compare(answer: Function, reference: Function, cases: Sequence[Sequence[Any]]) -> None:
    """Raise Wrong unless `answer` gives what `reference` gives, as in `expect`, in all `cases`.

    A case is the call in words (a format string for the arguments), the reason for its result, and the arguments.
    """
    for what, because, *arguments in cases:
        got = answer(*copy.deepcopy(arguments))
        expect(got, reference(*arguments), what.format(*arguments), because)


def recognise(answer: Function, cases: Sequence[tuple[Any, ...]], mistakes: Mapping[str, Function]) -> None:
    """Raise Wrong with the sentence of the first of `mistakes` that agrees with `answer` in all `cases`.

    A case is the arguments of a call. An answer without results, or with neither numbers nor lists, agrees with none.
    """
    given = [answer(*copy.deepcopy(case)) for case in cases]
    for sentence, mistake in mistakes.items():
        if all(_same(got, mistake(*copy.deepcopy(case))) for got, case in zip(given, cases, strict=True)):
            raise Wrong(sentence)


def explain(got: Any, mistakes: Mapping[str, Any], *case: Any, where: str = "") -> None:
    """Raise Wrong with the first sentence of `mistakes` whose wrong value is the one that the learner `got`.

    A mistake is a value, or a function that gives it for the arguments `case`; `where` stands before the sentence.
    """
    for sentence, wrong in mistakes.items():
        refuse(_same(got, wrong(*case) if callable(wrong) else wrong), f"{where}{sentence}")


def _same(got: Any, other: Any) -> bool:
    try:
        values, others = np.asarray(got, dtype=float), np.asarray(other, dtype=float)
    except (TypeError, ValueError):  # lists of different lengths, for example
        return isinstance(got, list) and got == other
    return values.shape == others.shape and bool(np.allclose(values, others))


install.mention()  # a lesson begins by importing its checks
if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
    from workshop_utils.lessons import without_horovod

    without_horovod.register(shell)
