"""Checks of lesson 16, long contexts, experts, no bubbles; see `workshop_utils.lessons.checks` for how they speak."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import Wrong, exercise, listed, refuse, result_of
from workshop_utils.lessons.checks.model_parallel import passes_of
from workshop_utils.parallel import schedule as schedules
from workshop_utils.parallel.schedule import Kind, Pass

State = tuple[np.ndarray, np.ndarray, np.ndarray]
Step = Callable[[State, np.ndarray, np.ndarray], State]

WIDTH = 3  # of the values in a case


@exercise
def softmax_step(answer: Step) -> str:
    """`answer(state, scores, values)` merges a block of keys into each query's maximum, total and mixture."""
    for where, blocks in _blocks_of_keys().items():
        state: Any = _nothing(len(blocks[0][0]))
        with np.errstate(all="ignore"):
            for number, (scores, values) in enumerate(blocks, 1):
                given = scores.copy(), values.copy()
                state = result_of(answer, state, *given)
                behind = f"{where}, behind block {number}"
                changed = "`scores` or `values` was changed, which the ring passes on; work on copies"
                is_kept = np.array_equal(given[0], scores) and np.array_equal(given[1], values)
                refuse(not is_kept, f"{behind}: {changed}.")
                _check_state(state, blocks[:number], behind)
    return (
        "block by block every query has the mixture that one softmax over all keys gives it: with blocks of any size, "
        "scores of ±1000, blocks that are masked as a whole, and in the order in which a ring brings them."
    )


def _check_state(state: Any, blocks: list[tuple[np.ndarray, np.ndarray]], where: str) -> None:
    """Raise Wrong unless `state` is what a step leaves behind `blocks`, whatever it takes for the maximum."""
    queries = len(blocks[0][0])
    due = _merge(_running, blocks)
    if not isinstance(state, tuple | list) or len(state) != 3:
        raise Wrong(f"{where}: your function gave {state!r}; it must give (maximum, total, mixture).")
    state = [np.asarray(each, dtype=float) for each in state]
    _, total, mixture = state
    names = zip(("maximum", "total", "mixture"), state, due, strict=True)
    shapes = [
        f"`{name}` has shape {got.shape}, not {right.shape}"
        for name, got, right in names
        if got.shape != right.shape
    ]
    refuse(shapes, f"{where}, with {queries} queries: {listed(shapes)}.")
    hidden = np.isneginf(due[0])
    nan = "−inf − (−inf) is no number: where a query has seen no key yet, subtract something finite"
    refuse(np.isnan(mixture[hidden]).any() or np.isnan(total[hidden]).any(), f"{where}: {nan}.")
    refuse(
        total[hidden].any() or mixture[hidden].any(),
        f"{where}: a query that has seen no key has a total above 0.",
    )
    seen = state[0][~hidden], state[1][~hidden], state[2][~hidden]
    is_finite = all(np.isfinite(each).all() for each in seen)
    overflow = (
        "exp overflowed, though the largest score so far makes every exponential at most 1: subtract it"
    )
    refuse(not is_finite and not np.isneginf(seen[0]).any(), f"{where}: {overflow}.")
    refuse(not is_finite, f"{where}: the maximum of a query is −inf, though it has seen a key.")
    underflow = (
        "every exponential became 0: subtract the largest score that this query has seen, no larger number"
    )
    refuse((seen[1] <= 0).any(), f"{where}: {underflow}.")
    got, right = seen[2] / seen[1][:, None], (due[2] / due[1][:, None])[~hidden]
    sums, due_sums = seen[0] + np.log(seen[1]), (due[0] + np.log(due[1]))[~hidden]
    if np.allclose(got, right, rtol=1e-9, atol=1e-9) and np.allclose(sums, due_sums, rtol=1e-9, atol=1e-9):
        return
    for sentence, slip in _SLIPS.items():
        with np.errstate(all="ignore"):
            wrong = _merge(slip, blocks)
        if all(np.allclose(one[~hidden], other[~hidden]) for one, other in zip(state, wrong, strict=True)):
            raise Wrong(f"{where}: {sentence}.")
    if np.allclose(got, right, rtol=1e-9, atol=1e-9):
        raise Wrong(f"{where}: mixture / total is right, but `total` is not Σ exp(score − maximum).")
    query = int(np.argmax(np.abs(got - right).max(axis=1)))
    raise Wrong(f"{where}, mixture / total of query {query} is {got[query]}; it must be {right[query]}.")


def _nothing(queries: int) -> State:
    """The state of `queries` that have seen no key."""
    return np.full(queries, -np.inf), np.zeros(queries), np.zeros((queries, WIDTH))


def _merge(step: Step, blocks: list[tuple[np.ndarray, np.ndarray]]) -> State:
    state = _nothing(len(blocks[0][0]))
    for scores, values in blocks:
        state = step(state, scores, values)
    return state


def _running(
    state: State, scores: np.ndarray, values: np.ndarray, shrinks: tuple[bool, bool] = (True, True)
) -> State:
    """A right step, or one that rescales only some of total and mixture."""
    maximum, total, mixture = state
    largest = np.maximum(maximum, scores.max(axis=1))
    finite = np.where(np.isneginf(largest), 0, largest)
    shrink, weights = np.exp(maximum - finite), np.exp(scores - finite[:, None])
    old_total, old_mixture = (shrink if each else np.ones_like(shrink) for each in shrinks)
    return largest, old_total * total + weights.sum(axis=1), old_mixture[:, None] * mixture + weights @ values


def _normalised(state: State, scores: np.ndarray, values: np.ndarray) -> State:
    """The mixture is divided by the total in each step."""
    largest, total, mixture = _running((state[0], state[1], state[2]), scores, values)
    return largest, total, mixture / np.where(total > 0, total, 1)[:, None]


def _alike(state: State, scores: np.ndarray, values: np.ndarray) -> State:
    """Every block has a softmax of its own, and the mixtures are added."""
    maximum, total, mixture = state
    own, sums, mixed = _running(_nothing(len(scores)), scores, values)
    return np.maximum(maximum, own), total + 1, mixture + mixed / np.where(sums > 0, sums, 1)[:, None]


def _only_last(state: State, scores: np.ndarray, values: np.ndarray) -> State:
    return _running(_nothing(len(state[0])), scores, values)


_RESCALE = "what earlier blocks left counts exponentials of another maximum"
_SLIPS: dict[str, Step] = {
    f"{_RESCALE}: multiply `total` and `mixture` by exp(maximum − new maximum)": partial(
        _running, shrinks=(False, False)
    ),
    f"{_RESCALE}: `total` was rescaled, `mixture` was not": partial(_running, shrinks=(True, False)),
    f"{_RESCALE}: `mixture` was rescaled, `total` was not": partial(_running, shrinks=(False, True)),
    "the mixture was divided by the total; divide once, behind the last block": _normalised,
    "each block has a softmax of its own here, so all blocks count alike": _alike,
    "this is the last block alone; add it to what earlier blocks left": _only_last,
}


def _blocks_of_keys() -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """By name of the case, blocks of (scores, values), as they come."""
    random = np.random.default_rng(0)

    def block(queries: int, keys: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        return scale * random.normal(size=(queries, keys)), random.normal(size=(keys, WIDTH))

    def shifted(blocks: list[tuple[np.ndarray, np.ndarray]], *by: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(scores + shift, values) for (scores, values), shift in zip(blocks, by, strict=True)]

    three = [block(3, keys) for keys in (2, 5, 1)]
    rows = np.array([1000.0, 0.0, -1000.0])[:, None]
    masked = shifted([block(4, keys) for keys in (3, 3, 2)], -900, -900, -900)
    masked[0][0][:2] = -np.inf
    masked[1][0][1:3] = -np.inf
    ring = [block(3, 3) for _ in range(3)]  # as they come to the middle rank of three
    ring[0][0][np.triu_indices(3, 1)] = -np.inf
    ring[2][0][:] = -np.inf
    return {
        "with one block of 4 keys": [block(2, 4)],
        "with blocks of 4, 1 and 5 keys": [block(3, keys, 2.0) for keys in (4, 1, 5)],
        "with scores around 1000, 0 and −1000": shifted(three, rows, rows, rows),
        "with larger and larger scores": shifted(three, 0, 900, 1800),
        "with smaller and smaller scores": shifted(three, 0, -900, -1800),
        "with blocks that the mask hides from some queries": masked,
        "on the middle one of three ranks of a ring": ring,
    }


@exercise
def zig_zag(answer: Callable[[int, int, int], Any]) -> str:
    """`answer(length, rank, size)` is the places of the tokens that a rank holds: chunks r and 2N − 1 − r of 2N."""
    for length, size in ((16, 4), (8, 2), (30, 3), (6, 1), (40, 5)):
        shares = [_places(answer, length, rank, size) for rank in range(size)]
        right = [_pair(length, (rank, 2 * size - 1 - rank), size) for rank in range(size)]
        where = f"with {length} tokens on {size} rank{'s' * (size > 1)}"
        if shares == right:
            continue
        each = range(size)
        mistakes = {
            "these are contiguous shares; the last rank has most keys to look at": [
                _pair(length, (2 * rank, 2 * rank + 1), size) for rank in each
            ],
            "this is every N-th token, as in Striped Attention; here a rank has two whole chunks": [
                [*range(rank, length, size)] for rank in each
            ],
            "chunks r and N + r: the last rank still has the later one of each half": [
                _pair(length, (rank, size + rank), size) for rank in each
            ],
            "the late chunk is first; put the places in ascending order": [
                _pair(length, (2 * size - 1 - rank, rank), size) for rank in each
            ],
            "these are the numbers of the two chunks; give the places of their tokens": [
                [rank, 2 * size - 1 - rank] for rank in each
            ],
            "ranks count the other way round: rank 0 has the first chunk and the last": right[::-1],
        }
        for sentence, wrong in mistakes.items():
            refuse(shares == wrong, f"{where}, {sentence}.")
        counts = np.bincount(
            [place for share in shares for place in share if 0 <= place < length], minlength=length
        )
        outside = [place for share in shares for place in share if not 0 <= place < length]
        refuse(
            outside, f"{where}, place {listed(outside[:1])} does not exist; they go from 0 to {length - 1}."
        )
        refuse((counts == 0).any(), f"{where}, nobody holds token {int(np.argmin(counts))}.")
        refuse((counts > 1).any(), f"{where}, {counts.max()} ranks hold token {int(np.argmax(counts))}.")
        rank = next(rank for rank in each if shares[rank] != right[rank])
        looks = [sum(place + 1 for place in share) for share in shares]
        uneven = (
            f"keys to look at, rank by rank: {listed(looks)}"
            if len({*looks}) > 1
            else "all look at as many keys"
        )
        chunks = f"its chunks {rank} and {2 * size - 1 - rank} of {2 * size} are {right[rank]}"
        raise Wrong(f"{where}, rank {rank} holds {shares[rank]}; {chunks} ({uneven}).")
    return "every token is on one rank, and under a causal mask all ranks have equally many keys to look at."


def _pair(length: int, chunks: tuple[int, int], size: int) -> list[int]:
    own = length // (2 * size)
    return [place for chunk in chunks for place in range(chunk * own, (chunk + 1) * own)]


def _places(answer: Callable[[int, int, int], Any], length: int, rank: int, size: int) -> list[int]:
    given: Any = result_of(answer, length, rank, size)
    where = f"with {length} tokens, rank {rank} of {size}"
    try:
        places = np.array([int(place) for place in given])
        refuse(not np.array_equal(places, np.array([float(place) for place in given])), "")
    except (TypeError, ValueError, Wrong):
        raise Wrong(f"{where} gave {given!r}; it must be a list of places, whole numbers.") from None
    return [int(place) for place in places]


Order = list[tuple[Kind, int]]


@exercise
def place_weights(answer: Callable[[Order, int, int], Order]) -> str:
    """`answer(order, rank, ranks)` is 1F1B's `order` of passes on a rank, with its weight passes put in."""
    for ranks, microbatches in ((4, 8), (2, 4), (3, 7), (4, 2), (6, 12), (1, 3)):
        of = f"with {ranks} rank{'s' * (ranks > 1)} and {microbatches} microbatches"
        plain, best = (schedules.schedule_of(name, ranks, microbatches) for name in ("one_f_one_b", "zb_h1"))
        orders = tuple(_with_weights(answer, plain, rank, of) for rank in range(ranks))
        try:
            yours = schedules.Schedule("yours", orders, microbatches)
            timelines = [schedules.predict(each, 1.0, 2.0) for each in (yours, best, plain)]
        except schedules.ScheduleError as error:
            raise Wrong(f"{of}, {error}.") from None
        most = min(ranks, microbatches)
        for rank, passes in enumerate(orders):
            late = f"rank {rank} holds {schedules.held(passes)} microbatches at once, rank 0 of 1F1B {most}"
            advice = "a microbatch is held until its weight pass: run one before the next forward pass"
            refuse(schedules.held(passes) > most, f"{of}, {late}; {advice}.")
        idle, least, before = map(schedules.bubble, timelines)
        waits = f"ranks wait {100 * idle:.0f} % of the time, with 1F1B {100 * before:.0f} %"
        can = f"{100 * least:.0f} % can be had: {_misplaced(yours, timelines[0], most)}"
        refuse(idle > least + 1e-9, f"{of}, {waits}; {can}.")
    return (
        "you have built ZB-H1: ranks wait a third as long as with 1F1B, if there are microbatches enough, and no rank "
        "holds more of them than rank 0 of 1F1B."
    )


def _misplaced(schedule: schedules.Schedule, timeline: schedules.Timeline, most: int) -> str:
    """A weight pass that stands too late, so that its rank waits before it, or too early, where others wait."""
    times = {timed.each: timed for timed in timeline}
    early = ""
    for rank, passes in enumerate(schedule.passes):
        for place, each in enumerate(passes[1:], 1):
            done, start = passes[:place], times[each].start
            owed = [b for b in done if b.kind == "backward" and b._replace(kind="weight") not in done]
            if owed and start > times[done[-1]].end + 1e-9:
                weight = owed[0]._replace(kind="weight")
                return f"rank {rank} waits before {each}, though it could run {weight} there"
            ahead = next((later for later in passes[place:] if later.kind != "weight"), None)
            source = ahead and schedule.source(ahead)
            is_ready = ahead and (source is None or times[source].end <= start + 1e-9)
            held = sum((one.kind == "forward") - (one.kind == "weight") for one in done)
            if each.kind == "weight" and is_ready and held < most:
                first = f"rank {rank} runs {each}, though it could run {ahead} first"
                early = early or f"{first}: others wait for what comes of it"
    return early or "some weight passes stand where others wait for this rank"


def _with_weights(
    answer: Callable[[Order, int, int], Order], plain: schedules.Schedule, rank: int, of: str
) -> tuple[Pass, ...]:
    """The answer's order on a rank; raises Wrong if it is not that of `plain` with weight passes between its passes."""
    passes = plain.passes[rank]
    order: Order = [(each.kind, each.microbatch) for each in passes]
    given: Any = result_of(answer, list(order), rank, plain.ranks)
    placed = passes_of(given, rank, f"{of}, rank {rank} has", ("forward", "backward", "weight"))
    refuse(placed == passes, f"{of}, rank {rank} has no weight pass; put in ('weight', 0) and the others.")
    kept = tuple(each for each in placed if each.kind != "weight")
    moved = (
        "the forward and backward passes are no longer those of `order`; put weight passes between them only"
    )
    refuse(kept != passes, f"{of}, rank {rank}: {moved}.")
    return placed
