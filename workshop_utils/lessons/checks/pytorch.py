"""Checks of lesson 07, PyTorch; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workshop_utils.lessons.checks import Wrong, compare, exercise, mistakes, questions, recognise
from workshop_utils.lessons.checks.cuts import Cut, Parts, all_parts, cut, first_difference
from workshop_utils.scaling.memory import zero_memory

__getattr__ = questions(__name__)


def _filled(nbytes: Sequence[int], is_full: Callable[[int, int], bool]) -> Parts:
    """Parameters from the last on; a new bucket begins where `is_full(its bytes, those of the next parameter)`."""
    return cut(reversed(range(len(nbytes))), nbytes.__getitem__, is_full)


def _first_fit(nbytes: Sequence[int], limit: int) -> Parts:
    buckets: Parts = []
    for parameter in reversed(range(len(nbytes))):
        fitting = (bucket for bucket in buckets if _bytes(bucket, nbytes) + nbytes[parameter] <= limit)
        if (bucket := next(fitting, None)) is None:
            buckets.append(bucket := [])
        bucket.append(parameter)
    return buckets


def _bytes(bucket: Sequence[int], nbytes: Sequence[int]) -> int:
    return sum(nbytes[parameter] for parameter in bucket)


def _right(nbytes: Sequence[int], limit: int) -> Parts:
    return _filled(nbytes, lambda total, size: total + size > limit)


_CASES: tuple[tuple[list[int], int], ...] = (
    ([10, 10, 10], 100),
    ([10, 10, 10], 20),
    ([10, 10, 10], 10),
    ([30, 5, 5, 50, 5], 20),
    ([8, 7, 9, 6, 5, 4], 15),
    ([], 10),
)


@exercise
def buckets(answer: Cut) -> str:
    """`answer(nbytes, limit)`: the parameters of each bucket, by their numbers, where parameter i has `nbytes[i]`."""
    others = mistakes(__name__, "buckets", filled=_filled, right=_right, first_fit=_first_fit)
    for given, (nbytes, limit) in zip(all_parts(answer, _CASES, others), _CASES, strict=True):
        expected = _right(nbytes, limit)
        if given == expected:
            continue
        of = f"parameters of {nbytes} bytes in buckets of {limit}: you gave {given}"
        order = [parameter for bucket in given for parameter in bucket]
        if sorted(order) != list(range(len(nbytes))):
            raise Wrong(f"{of}; every parameter must be in one bucket, once, by its number from 0 on.")
        if len(order) > 1 and order == list(range(len(nbytes))):
            raise Wrong(f"{of}; the last parameter's gradient comes first, so begin with it.")
        for number, bucket in enumerate(given, 1):
            if len(bucket) > 1 and _bytes(bucket, nbytes) > limit:
                because = "close it before it passes the limit; only a single parameter may be larger"
                raise Wrong(f"{of}; bucket {number} has {_bytes(bucket, nbytes)} bytes: {because}.")
        raise Wrong(f"{of}; {first_difference(given, expected, 'bucket')}.")
    return "that is how `buckets_of` fills them."


def _held(parameters: float, workers: int, sharded: int, numbers: int = 4, nbytes: int = 4) -> float:
    """Bytes of a rank with so many `numbers` a parameter, of which `sharded` are cut into an N-th each."""
    return nbytes * parameters * (numbers - sharded + sharded / workers)


@exercise
def bytes_of_a_rank(answer: Callable[[float, int, int], float]) -> str:
    """`answer(parameters, workers, stage)`: bytes of a rank with float32, Adam and ZeRO's stage 0, 1, 2 or 3."""
    others = mistakes(__name__, "bytes_of_a_rank", held=_held)
    recognise(answer, [(1e6, 8, stage) for stage in range(4)], others)
    sharded = ("nothing", "Adam's two numbers", "these and the gradient", "all four numbers")
    cases = [("a million parameters without sharding", "four numbers of 4 bytes each", 1e6, 1, 0)]
    for parameters, workers in ((1e6, 4), (7e9, 8)):
        for stage, what in enumerate(sharded):
            words = "stage {2} with {1} workers and {0:g} parameters"
            cases.append((words, f"it shards {what}", parameters, workers, stage))
    compare(answer, lambda *arguments: zero_memory(*arguments).total, cases)
    return "a rank of stage 3 holds an N-th of everything."
