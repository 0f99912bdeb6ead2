"""Checks of lesson 06, TensorFlow; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workshop_utils.exercises import NotYet, Wrong, exercise, number

synchronous_updates = number(
    500, "updates", "each takes one batch of each of the 4 workers, and each worker has 500"
)
asynchronous_updates = number(2000, "updates", "each takes one batch, and 4 workers have 500 each")
collectives_a_step = number(
    5, "collectives", "a pack is full with its 13th tensor, at 52,000 bytes, and 64 tensors fill 4 and a part"
)


def packed(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """`sizes` in order, cut into packs as TensorFlow 2.21 cuts gradients for one collective each.

    A pack takes tensors until it holds more than `bytes_per_pack`; 0 puts all into one (TensorFlow,
    `tensorflow/python/distribute/cross_device_utils.py`, `group_by_size`).
    """
    if bytes_per_pack == 0:
        return [list(sizes)]
    packs: list[list[int]] = []
    for size in sizes:
        if not packs or sum(packs[-1]) > bytes_per_pack:
            packs.append([])
        packs[-1].append(size)
    return packs


@exercise
def packs(answer: Callable[[list[int], int], list[list[int]]]) -> str:
    """`answer(sizes, bytes_per_pack)` is `packed(sizes, bytes_per_pack)`."""
    cases = (
        ([4, 4, 4], 0, "0 means all in one"),
        ([4, 4, 4], 1, "each tensor alone is more than 1 byte, so it fills a pack"),
        ([4, 4, 4, 4], 5, "one tensor of 4 is not more than 5, two are"),
        ([4, 4, 4, 4], 8, "two of 4 are 8, which is not more than 8: a third goes in"),
        ([100, 4, 4, 100], 10, "a tensor is never cut, so one of 100 fills a pack alone"),
        ([3, 9, 2, 7, 7], 12, "they stay in order"),
    )
    for sizes, hint, because in cases:
        got = answer(list(sizes), hint)
        if got is None or got is ...:
            raise NotYet("your function gave nothing: write it, then run this again.")
        expected = packed(sizes, hint)
        if [list(pack) for pack in got] != expected:
            raise Wrong(
                f"sizes {sizes} with bytes_per_pack {hint} gave {got}; it must be {expected}: {because}."
            )
    return "that is how many collectives a step takes."
