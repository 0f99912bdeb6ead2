"""A lesson's question, asked before the run that answers it, and compared after.

    prediction = Choice(1.14, 8, 125, 1000, unit="times")
    prediction                      # the answers to choose from: buttons where widgets run, a list where not
    prediction.choose("b")          # what a button does, in words
    prediction.compare(1.142)       # Wrong: you chose b) 8 times; it is 1.14 times, which is a).

Nothing is raised where nothing was chosen, so a notebook that nobody answered still runs to its end.
"""

from __future__ import annotations

import html
import math
import string
from typing import Any

from workshop_utils.lessons.checks import Verdict

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class Choice:
    """Answers to choose from: positive numbers of one `unit`, lettered a, b, c ...

    Raises:
        ValueError: if there are fewer than two answers, or two that are the same.
    """

    def __init__(self, *answers: float, unit: str = "") -> None:
        if len(answers) < 2 or len(set(answers)) < len(answers):
            raise ValueError(f"answers are {answers}; there must be at least two, all different")
        self.answers = dict(zip(string.ascii_lowercase, answers, strict=False))
        self.unit = unit
        self.chosen: str | None = None

    def choose(self, letter: str | None) -> Choice:
        """Choose the answer with this letter; None takes the choice back.

        Raises:
            AnswerError: if no answer has the letter; the choice stays as it was.
        """
        if letter is not None:
            letter = str(letter).strip().lower().removesuffix(")")
            if letter not in self.answers:
                raise AnswerError(f"there is no answer {letter!r}; choose one of {', '.join(self.answers)}")
        self.chosen = letter
        return self

    def compare(self, actual: float) -> Verdict:
        """The chosen answer compared with the result. The right answer is the one nearest to `actual`, by ratio."""
        right = min(self.answers, key=lambda letter: abs(math.log(self.answers[letter] / actual)))
        result = f"it is {self._value(actual)}"
        if self.chosen is None:
            advice = "Next time choose first: a wrong prediction teaches more than none."
            return Verdict("not yet", f"{result}, which is {right}). {advice}")
        choice = f"you chose {self._label(self.chosen)}"
        if self.chosen == right:
            return Verdict("right", f"{choice}; {result}.")
        return Verdict("wrong", f"{choice}; {result}, which is {right}).")

    def _value(self, value: float) -> str:
        digits = ",.10g" if value in self.answers.values() else ",.0f" if value >= 1000 else ".3g"
        return f"{value:{digits}} {self.unit}".rstrip()

    def _label(self, letter: str) -> str:
        return f"{letter}) {self._value(self.answers[letter])}"

    def __repr__(self) -> str:
        labels = "   ".join(map(self._label, self.answers))
        chosen = self._label(self.chosen) if self.chosen else "nothing yet; choose with .choose(letter)"
        return f"{labels}\nchosen: {chosen}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        import ipywidgets  # here, since only a notebook shows buttons

        options = [(self._label(letter), letter) for letter in self.answers]
        buttons = ipywidgets.RadioButtons(options=options, value=self.chosen, layout={"width": "max-content"})
        buttons.observe(lambda change: self.choose(change["new"]), names="value")
        # The letters are text: Jupyter's style sheets number a list 1, 2, 3, whatever its type.
        items = "".join(f"<li>{html.escape(label)}</li>" for label, _ in options)
        static = f'<ul style="list-style:none; margin:0">{items}</ul>'
        # A front end shows the richest form that it can: buttons with a kernel, otherwise the list.
        widget = {"version_major": 2, "version_minor": 0, "model_id": buttons.model_id}
        return {"text/plain": repr(self), "text/html": static, WIDGET_VIEW: widget}


class AnswerError(ValueError):
    """There is no such answer to choose; a notebook shows the message without its frames."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]
