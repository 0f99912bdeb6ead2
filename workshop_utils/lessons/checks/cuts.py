"""What the exercises on cutting a list share: TensorFlow's packs (lesson 06), PyTorch's buckets (lesson 07)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from workshop_utils.lessons.checks import Wrong, recognise, result_of

Parts = list[list[int]]
Cut = Callable[[list[int], Any], Parts]
Case = tuple[list[int], Any]


def cut(items: Iterable[int], nbytes: Callable[[int], int], is_full: Callable[[int, int], bool]) -> Parts:
    """`items` in order; a new part begins where `is_full(bytes of the part, bytes of the next item)`."""
    parts: Parts = []
    for item in items:
        if not parts or is_full(sum(map(nbytes, parts[-1])), nbytes(item)):
            parts.append([])
        parts[-1].append(item)
    return parts


def all_parts(answer: Cut, cases: Sequence[Case], mistakes: Mapping[str, Cut]) -> list[Parts]:
    """What `answer` gives in each of `cases`.

    Raises:
        NotYet: if it gives nothing.
        Wrong: if it gives anything but lists in a list, or makes one of the typical `mistakes`.
    """
    given = []
    for sizes, limit in cases:
        parts = result_of(answer, list(sizes), limit)
        lists = (list, tuple)
        if not isinstance(parts, lists) or not all(isinstance(part, lists) for part in parts):
            raise Wrong(f"with {sizes} and {limit} it gave {parts!r}; it must be a list of lists: [[…], …].")
        given.append([list(part) for part in parts])
    recognise(answer, cases, mistakes)
    return given


def first_difference(parts: Parts, expected: Parts, name: str) -> str:
    """The first of `parts` that is not as `expected`, in words; `name` says what a part is called."""
    for number, (part, right) in enumerate(zip_longest(parts, expected), 1):
        if part is None:
            return f"{name} {number}, {right}, is missing"
        if right is None:
            return f"there must be no {name} {number}, and yours is {part}"
        if part != right:
            return f"{name} {number} is {part}, and must be {right}"
    return ""
