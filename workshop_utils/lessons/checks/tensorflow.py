"""Checks of lesson 06, TensorFlow; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workshop_utils.lessons.checks import Wrong, exercise, question
from workshop_utils.lessons.checks.cuts import Cut, first_difference, given_by, recognise_cut

synchronous_updates = question("tensorflow.synchronous_updates")
asynchronous_updates = question("tensorflow.asynchronous_updates")
collectives_a_step = question("tensorflow.collectives_a_step")


def packed(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """`sizes` in order, cut into packs as TensorFlow 2.21 cuts gradients for one collective each.

    A pack takes tensors until it holds more than `bytes_per_pack`; 0 puts all into one (TensorFlow,
    `tensorflow/python/distribute/cross_device_utils.py`, `group_by_size`).
    """
    if bytes_per_pack == 0:
        return [list(sizes)]
    return _cut(sizes, lambda held, _: held > bytes_per_pack)


def _cut(sizes: Sequence[int], is_full: Callable[[int, int], bool]) -> list[list[int]]:
    """`sizes` in packs; a new one begins where `is_full(bytes of the pack, bytes of the next tensor)`."""
    packs: list[list[int]] = []
    for size in sizes:
        if not packs or is_full(sum(packs[-1]), size):
            packs.append([])
        packs[-1].append(size)
    return packs


def _all_in_one_for_zero(hint: int, packs: list[list[int]]) -> list[list[int]]:
    return packs if hint else [[size for pack in packs for size in pack]]


_CASES = (
    ([4, 4, 4], 0, "0 means all in one"),
    ([4, 4, 4], 1, "each tensor alone is more than 1 byte, so it fills a pack"),
    ([4, 4, 4, 4], 5, "one tensor of 4 is not more than 5, two are"),
    ([4, 4, 4, 4], 8, "two of 4 are 8, which is not more than 8: a third goes in"),
    ([100, 4, 4, 100], 10, "a tensor is never cut, so one of 100 fills a pack alone"),
    ([3, 9, 2, 7, 7], 12, "they stay in order"),
)
_OTHER_RULES: dict[str, Cut] = {
    "you give every tensor a pack of its own; a pack takes more until it holds more than bytes_per_pack.": (
        lambda sizes, _: [[size] for size in sizes]
    ),
    "you put all tensors into one pack, whatever the hint; only 0 means that.": lambda sizes, _: [sizes],
    "all is right but one thing: 0 means one pack for all, not a hint of 0 bytes.": (
        lambda sizes, hint: _cut(sizes, lambda held, _: held > hint)
    ),
    "you close a pack before a tensor would take it above bytes_per_pack; TensorFlow looks afterwards: that tensor "
    "still goes in, and the next one begins a new pack.": (
        lambda sizes, hint: _all_in_one_for_zero(hint, _cut(sizes, lambda held, size: held + size > hint))
    ),
    "a pack that holds exactly bytes_per_pack is not full yet: it must hold more (with packs of 4-byte tensors and "
    "the hint 8, a third one goes in).": (
        lambda sizes, hint: _all_in_one_for_zero(hint, _cut(sizes, lambda held, _: held >= hint))
    ),
    "the packs that are full are right, but the last one is lost where it is not full: its gradients have to travel "
    "as well.": lambda sizes, hint: [pack for pack in packed(sizes, hint) if sum(pack) > hint],
}


@exercise
def packs(answer: Cut) -> str:
    """`answer(sizes, bytes_per_pack)` is `packed(sizes, bytes_per_pack)`."""
    found = [given_by(answer, sizes, hint) for sizes, hint, _ in _CASES]
    recognise_cut(found, [(sizes, hint) for sizes, hint, _ in _CASES], _OTHER_RULES)
    for got, (sizes, hint, because) in zip(found, _CASES, strict=True):
        of = f"sizes {sizes} with bytes_per_pack {hint} gave {got}"
        together = [size for pack in got for size in pack]
        if sorted(together) != sorted(sizes):
            raise Wrong(f"{of}; every tensor must be in one pack, once.")
        if together != sizes:
            raise Wrong(f"{of}; they must stay in order, since a pack waits for all that is in it.")
        expected = packed(sizes, hint)
        if got != expected:
            raise Wrong(f"{of}: {first_difference(got, expected, 'pack')}: {because}.")
    return "that is how many collectives a step takes."
