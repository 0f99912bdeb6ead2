"""Looks at functions that cut a list into lists: TensorFlow's packs (lesson 06), PyTorch's buckets (lesson 07)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from workshop_utils.lessons.checks import Wrong, result_of

Cut = Callable[[list[int], int], list[list[int]]]


def given_by(answer: Cut, sizes: Sequence[int], limit: int) -> list[list[int]]:
    """What `answer(sizes, limit)` gives.

    Raises:
        NotYet: if it gives nothing.
        Wrong: if it gives something else than lists in a list.
    """
    got: Any = result_of(answer, list(sizes), limit)
    if isinstance(got, str) or not all(isinstance(part, (list, tuple)) for part in _items(got)):
        raise Wrong(
            f"with {list(sizes)} and {limit} it gave {got!r}; it must be a list of lists, such as [[…], […]]."
        )
    return [list(part) for part in got]


def recognise_cut(
    found: Sequence[list[list[int]]], cases: Sequence[tuple[list[int], int]], mistakes: Mapping[str, Cut]
) -> None:
    """Raise Wrong with the sentence of the typical mistake that gives what was `found` in all `cases`."""
    for sentence, wrong in mistakes.items():
        if found == [wrong(list(sizes), limit) for sizes, limit in cases]:
            raise Wrong(sentence)


def first_difference(found: list[list[int]], expected: list[list[int]], name: str) -> str:
    """Which part is the first that is not as it must be, as words; `name` says what a part is called."""
    for number, (part, right) in enumerate(zip_longest(found, expected), 1):
        if part is None:
            return f"{name} {number} is missing, with {right}"
        if right is None:
            return f"{name} {number}, with {part}, is one too many"
        if part != right:
            return f"{name} {number} is {part}, and must be {right}"
    return ""


def _items(got: Any) -> Sequence[Any]:
    return got if isinstance(got, (list, tuple)) else [got]
