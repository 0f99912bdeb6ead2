"""Checks of lesson 06, TensorFlow; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Sequence

from workshop_utils.lessons.checks import Wrong, exercise, mistakes, questions
from workshop_utils.lessons.checks.cuts import Cut, Parts, all_parts, cut, first_difference

__getattr__ = questions(__name__)


def tensorflow_packs(sizes: Sequence[int], bytes_per_pack: int) -> Parts:
    """`sizes` in order, cut into packs as TensorFlow 2.21 cuts gradients for one collective each.

    A pack takes tensors until it holds more than `bytes_per_pack`; 0 puts all into one (TensorFlow,
    `tensorflow/python/distribute/cross_device_utils.py`, `group_by_size`).
    """
    if bytes_per_pack == 0:
        return [list(sizes)]
    return cut(sizes, int, lambda total, _: total > bytes_per_pack)


_CASES = (
    ([4, 4, 4], 0, "0 means all in one"),
    ([4, 4, 4], 1, "each tensor alone is more than 1 byte, so it fills a pack"),
    ([4, 4, 4, 4], 5, "one tensor of 4 is not more than 5, two are"),
    ([4, 4, 4, 4], 8, "two of 4 are 8, which is not more than 8: a third goes in"),
    ([100, 4, 4, 100], 10, "a tensor is never cut, so one of 100 fills a pack alone"),
    ([3, 9, 2, 7, 7], 12, "they stay in order"),
)


@exercise
def packs(answer: Cut) -> str:
    """`answer(sizes, bytes_per_pack)` is `tensorflow_packs(sizes, bytes_per_pack)`."""
    others = mistakes(__name__, "packs", cut=cut, packs=tensorflow_packs)
    given = all_parts(answer, [(sizes, hint) for sizes, hint, _ in _CASES], others)
    for got, (sizes, hint, because) in zip(given, _CASES, strict=True):
        of = f"sizes {sizes} with bytes_per_pack {hint} gave {got}"
        together = [size for pack in got for size in pack]
        if sorted(together) != sorted(sizes):
            raise Wrong(f"{of}; every tensor must be in one pack, once.")
        if together != sizes:
            raise Wrong(f"{of}; they must stay in order, since a pack waits for all that is in it.")
        expected = tensorflow_packs(sizes, hint)
        if got != expected:
            raise Wrong(f"{of}: {first_difference(got, expected, 'pack')}: {because}.")
    return "that is how many collectives a step takes."
