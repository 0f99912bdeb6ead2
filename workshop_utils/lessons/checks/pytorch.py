"""Checks of lesson 07, PyTorch; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workshop_utils.lessons.checks import Wrong, compare, exercise, questions, recognise
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
_OTHER_BUCKETS: dict[str, Cut] = {
    "you give every parameter a bucket of its own: one message each, as in the naive form; a bucket takes as many as "
    "its limit allows.": lambda nbytes, _: [[each] for each in reversed(range(len(nbytes)))],
    "you put all into one bucket, whatever the limit; then nothing leaves before the last gradient is there.": (
        lambda nbytes, _: [list(reversed(range(len(nbytes))))] if nbytes else []
    ),
    "the buckets are the right ones, but inside of each the order is turned round: the last parameter first there, "
    "too.": lambda nbytes, limit: [sorted(bucket) for bucket in _right(nbytes, limit)],
    "you close a bucket only after a parameter has taken it above the limit; look before you put it in.": (
        lambda nbytes, limit: _filled(nbytes, lambda total, _: total > limit)
    ),
    "you close a bucket once it has reached its limit or passed it; look before a parameter goes in whether it "
    "would pass it.": lambda nbytes, limit: _filled(nbytes, lambda total, _: total >= limit),
    "a bucket may have just its limit, and yours stay below it: two parameters of 10 bytes fit into 20.": (
        lambda nbytes, limit: _filled(nbytes, lambda total, size: total + size >= limit)
    ),
    "you put a small parameter into an earlier bucket that has room; but gradients come in order, and an earlier "
    "bucket has left by then: only the newest one is open.": _first_fit,
    "you forget the bucket that is open at the end: the first parameters' gradients never travel.": (
        lambda nbytes, limit: _right(nbytes, limit)[:-1]
    ),
}


@exercise
def buckets(answer: Cut) -> str:
    """`answer(nbytes, limit)`: the parameters of each bucket, by their numbers, where parameter i has `nbytes[i]`."""
    for given, (nbytes, limit) in zip(all_parts(answer, _CASES, _OTHER_BUCKETS), _CASES, strict=True):
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


def _bytes_if(numbers: int, sharded: Sequence[int], nbytes: int = 4) -> Callable[[float, int, int], float]:
    """Bytes of a rank with so many numbers a parameter, `sharded[stage]` of them over the workers."""
    return lambda parameters, workers, stage: (
        nbytes * parameters * (numbers - sharded[stage] + sharded[stage] / workers)
    )


_OTHER_BYTES: dict[str, Callable[[float, int, int], float]] = {
    "those are numbers, not bytes: each float32 has 4 bytes.": _bytes_if(4, (0, 2, 3, 4), nbytes=1),
    "those are the parameters alone; the gradient and each of Adam's means are as large.": _bytes_if(
        1, (0, 0, 0, 0)
    ),
    "you count one number of Adam's; it keeps two per parameter: four in all.": _bytes_if(3, (0, 1, 2, 3)),
    "you give what no stage changes; stage 1 shards two of the four numbers, stage 2 three, stage 3 all.": _bytes_if(
        4, (0, 0, 0, 0)
    ),
    "you divide everything by the workers in every stage; only stage 3 shards everything, and 0 nothing.": _bytes_if(
        4, (4, 4, 4, 4)
    ),
    "stage 1 shards both of Adam's means, so it is two of the four numbers, stage 2 three, stage 3 four.": _bytes_if(
        4, (0, 1, 2, 3)
    ),
    "each stage shards what the one before does, and one thing more; yours shards in each stage one thing alone.": (
        _bytes_if(4, (0, 2, 1, 1))
    ),
    "what is sharded does not vanish: a rank still holds an N-th of it.": lambda parameters, _, stage: (
        4 * parameters * (4 - (0, 2, 3, 4)[stage])
    ),
}


@exercise
def bytes_of_a_rank(answer: Callable[[float, int, int], float]) -> str:
    """`answer(parameters, workers, stage)`: bytes of a rank with float32, Adam and ZeRO's stage 0, 1, 2 or 3."""
    recognise(answer, [(1e6, 8, stage) for stage in range(4)], _OTHER_BYTES)
    sharded = ("nothing", "Adam's two numbers", "these and the gradient", "all four numbers")
    cases = [("a million parameters without sharding", "four numbers of 4 bytes each", 1e6, 1, 0)]
    for parameters, workers in ((1e6, 4), (7e9, 8)):
        for stage, what in enumerate(sharded):
            words = "stage {2} with {1} workers and {0:g} parameters"
            cases.append((words, f"it shards {what}", parameters, workers, stage))
    compare(answer, lambda *arguments: zero_memory(*arguments).total, cases)
    return "a rank of stage 3 holds an N-th of everything."
