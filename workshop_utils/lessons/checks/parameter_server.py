"""Checks of lesson 03, parameter servers; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from workshop_utils.lessons.checks import NotYet, Wrong, exercise, explain, is_missing, mistakes, questions

__getattr__ = questions(__name__)

Rule = Callable[[dict[int, int], int, int], bool]

_PUSHES = ((1, 1, 1), (2, 1, 1), (4, 1, 3), (5, 1, 4), (9, 7, 9), (1, 0, 0), (3, 5, 6))
_CASES = list(itertools.product([dict(enumerate(each)) for each in _PUSHES], range(3), range(4)))


@exercise
def stale_synchronous(answer: Rule) -> str:
    """`answer(pushes, worker, bound)`: may `worker` go on, if each worker has pushed so often (by its number)?"""
    given = [answer(dict(pushes), worker, bound) for pushes, worker, bound in _CASES]
    if any(is_missing(got) for got in given):
        raise NotYet("your rule gave nothing: write it, then run this again.")
    for got, (pushes, worker, bound) in zip(given, _CASES, strict=True):
        ahead = pushes[worker] - min(pushes.values())
        if bool(got) is not (ahead <= bound):
            right = "may go on" if ahead <= bound else "must wait"
            case = f"with pushes {pushes} and bound {bound}, worker {worker} is {ahead} ahead of the slowest"
            result = f"{case}, so it {right}; your rule says the opposite"
            others = mistakes(__name__, "stale_synchronous").items()
            results = {f"{result}: {why}": [rule(*each) for each in _CASES] for why, rule in others}
            explain([bool(each) for each in given], results)
            raise Wrong(f"{result}.")
    return "bound 0 waits for everybody at every step, and an endless bound never waits."
