"""Checks of lesson 16, long contexts, experts, no bubbles; see `workshop_utils.lessons.checks` for how they speak."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import (
    NotYet,
    Wrong,
    exercise,
    explain,
    is_missing,
    listed,
    refuse,
    result_of,
)
from workshop_utils.lessons.checks.collectives import agreed
from workshop_utils.lessons.checks.model_parallel import passes_of
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.lessons.checks.processes import on_two_and_three_ranks
from workshop_utils.parallel import schedule as schedules
from workshop_utils.parallel.schedule import Kind, Pass
from workshop_utils.training.tcp_bytes import count_bytes

State = tuple[np.ndarray, np.ndarray, np.ndarray]
Step = Callable[[State, np.ndarray, np.ndarray], State]

WIDTH = 3  # of the values in a case
WIDE = 64  # of a token that goes to experts
TOKENS = {2: (23, 14), 3: (40, 0, 31)}  # of each rank, by their number
IDLE = "a rank without tokens must take part in each exchange: its experts compute the rows of other ranks"
MOST_BYTES = 1.3  # of the rows alone; numbers and headers come on top
LAST_STEPS = 20


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


@exercise
def dispatch_and_combine(answer: Callable[..., Any]) -> str:
    """`answer(dist, tokens, chosen, weights, mlps)` sends tokens to their experts, and brings the results back."""
    on_two_and_three_ranks(_experts, answer)
    return (
        "on 2 and on 3 ranks the results and all gradients are those of one process, also of a rank without tokens "
        "and of an expert without rows; and rows go only where they are needed."
    )


def _experts(dist: Any, answer: Callable[..., Any], where: str) -> bool:
    """On a rank: `answer`, beside what one process computes."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = TOKENS[ranks]
    mlps = [
        nn.Sequential(nn.Linear(WIDE, 4), nn.Tanh(), nn.Linear(4, WIDE)).double() for _ in range(2 * ranks)
    ]
    tokens = torch.randn(sum(counts), WIDE, dtype=torch.float64)
    gradient = torch.randn(tokens.shape, dtype=torch.float64)
    chosen = torch.rand(len(tokens), 2 * ranks - 1).argsort(dim=1)[:, :2]  # nobody chooses the last
    weights = torch.rand(len(tokens), 2, dtype=torch.float64) + 0.1
    weights = weights / weights.sum(dim=1, keepdim=True)

    whole, leaves = copy.deepcopy(mlps), (tokens.clone().requires_grad_(), weights.clone().requires_grad_())
    right = _mixed(torch.stack([mlp(leaves[0]) for mlp in whole], dim=1), chosen, leaves[1])
    right.backward(gradient)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    mine = tokens[own].clone().requires_grad_(), weights[own].clone().requires_grad_()
    given = mine[0].detach().clone(), chosen[own].clone(), mine[1].detach().clone()
    here = mlps[2 * rank : 2 * rank + 2]
    with agreed(dist):
        try:
            with count_bytes(dist.barrier) as counted:
                got = answer(dist, mine[0], given[1], mine[1], here)
                if not (counts[rank] or counted.sent):
                    raise RuntimeError(
                        IDLE
                    )  # no verdict, which others would have to hear of: they still wait
            if is_missing(got):
                raise NotYet("your function gave nothing: write it, then run this again.")
            shape = tuple(got.shape) if isinstance(got, torch.Tensor) else repr(got)
            refuse(shape != tuple(given[0].shape), f"it gives {shape}, not a tensor like `tokens`")
            if not _equal(got, right[own]):
                explain(got.detach(), _mistaken(tokens, chosen, weights, mlps, counts, rank))
                off = int((got - right[own]).abs().gt(1e-9).any(dim=1).sum())
                raise Wrong(f"{off} of {counts[rank]} tokens have another result than in one process")
            kept = _equal(mine[0], given[0]) and _equal(mine[1], given[2])
            refuse(not kept or not given[1].equal(chosen[own]), "an argument was changed; work on copies")
            flows = "no gradient can come back: send rows by `Exchange.apply`, and compute outside `no_grad`"
            refuse(counts[rank] and not got.requires_grad, flows)
            home = torch.arange(ranks).repeat_interleave(torch.tensor(counts)).unsqueeze(1)
            # Rows that are dispatched from here, and those whose results are combined elsewhere.
            rows = int(((home == rank) ^ (chosen // 2 == rank)).sum())
            times = counted.sent / (8 * WIDE * rows)
            much = f"it sends {times:.1f} times the bytes of the rows that others need"
            refuse(times > MOST_BYTES, f"{much}; send a row to its expert's rank, and its result back")
        except Wrong as wrong:
            raise Wrong(f"{where}, rank {rank}: {wrong}.") from None
    if got.requires_grad:
        got.backward(gradient[own])
    try:
        missing = [name for name, each in zip(("tokens", "weights"), mine, strict=True) if each.grad is None]
        refuse(counts[rank] and missing, f"results are right, but no gradient reaches `{listed(missing)}`")
        for name, each, leaf in zip(("tokens", "weights"), mine, leaves, strict=True):
            other = f"results are right, but the gradient of `{name}` is not that of one process"
            assert leaf.grad is not None
            refuse(counts[rank] and not _equal(each.grad, leaf.grad[own]), other)
        for mlp, expected in zip(here, whole[2 * rank :], strict=False):
            for parameter, due in zip(mlp.parameters(), expected.parameters(), strict=True):
                reached = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                from_all = "an expert's gradient holds the rows of all ranks"
                refuse(
                    not _equal(reached, due.grad),
                    f"results are right, but gradients of experts are not: {from_all}",
                )
    except Wrong as wrong:
        raise Wrong(f"{where}, rank {rank}: {wrong}.") from None
    return True


def _equal(one: Any, other: Any) -> bool:
    return bool(((one - other).abs() < 1e-9).all())


def _mixed(each: Any, chosen: Any, weights: Any) -> Any:
    """The weighted results of the chosen experts, from those of `each` (T, experts, width)."""
    taken = each.gather(1, chosen.unsqueeze(-1).expand(-1, -1, each.shape[-1]))
    return (taken * weights.unsqueeze(-1)).sum(dim=1)


def _mistaken(
    tokens: Any, chosen: Any, weights: Any, mlps: list[Any], counts: Sequence[int], rank: int
) -> dict[str, Any]:
    """What typical mistakes give this rank's tokens, by what is wrong with them."""
    import torch

    with torch.no_grad():
        each = torch.stack([mlp(tokens) for mlp in mlps], dim=1)
        width, ranks = tokens.shape[1], len(counts)
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        mine, experts, weight = each[own], chosen[own], weights[own]
        order = experts.flatten().argsort(stable=True)
        rows = mine[order // 2, experts.flatten()[order]]  # as they come back

        def weighted(rows: Any, of_rows: Any) -> Any:
            return (rows * of_rows.reshape(-1, 1)).view(-1, 2, width).sum(dim=1)

        # Rows that arrive are cut by expert without being sorted: each is computed by whoever stands there.
        sender = [part.flatten().sort().values for part in chosen.split(list(counts))]
        taken_by = [torch.empty_like(part) for part in sender]
        for other in range(ranks):
            arrives = [part[part // 2 == other] for part in sender]
            arrived = torch.cat(arrives).sort().values.split([len(part) for part in arrives])
            for to, part, numbers in zip(taken_by, sender, arrived, strict=True):
                to[part // 2 == other] = numbers
        unsorted = torch.empty_like(rows)
        unsorted[order] = mine[order // 2, taken_by[rank]]
        alone = torch.where(experts // 2 == rank, weight, 0.0)
        even = torch.ones_like(weight)
        return {
            "the weights are missing": _mixed(mine, experts, even),
            "it gives the mean of a token's experts; take their weighted sum": _mixed(
                mine, experts, even / 2
            ),
            "the weights count twice": _mixed(mine, experts, weight**2),
            "second choices are lost": _mixed(mine, experts[:, :1], weight[:, :1]),
            "first choices are lost": _mixed(mine, experts[:, 1:], weight[:, 1:]),
            "only experts of this rank count; send the other rows away": _mixed(mine, experts, alone),
            "weights are those of the other choice": _mixed(mine, experts, weight.flip(1)),
            "results come back sorted by expert; undo the sorting": weighted(rows, weight),
            "results and weights are both still sorted by expert": weighted(rows, weight.flatten()[order]),
            "`results[order]` sorts once more; `rows[order] = results` undoes it": weighted(
                rows[order], weight
            ),
            "rows arrive by rank, from each by expert; bring those of one expert together": weighted(
                unsorted, weight
            ),
            "each row is computed by its rank's first expert": _mixed(mine, experts // 2 * 2, weight),
        }


@measured
def dropped_rows(results: Any) -> float:
    """Per cent of rows above 1.25 times the mean of their layer's experts, with two choices and nothing balanced.

    `results` are runs of `balance_runs`; the last 20 steps count, in each layer alone.
    """
    import torch

    from workshop_utils.parallel.experts import dropped_share

    shares = []
    for run in runs_of(results, "balance_runs"):
        k, steps = (run.arguments.get(name) for name in ("k", "steps"))
        refuse(k != 2, f"`k` is {k}; it must be 2.")
        enough = isinstance(steps, int) and steps >= 2 * LAST_STEPS
        refuse(not enough, f"`steps` is {steps}; train for at least {2 * LAST_STEPS}.")
        for each in run.values:
            refuse("nothing" not in each, f'`ways` are {listed(each)}; "nothing" must be among them.')
            loads = torch.as_tensor(each["nothing"][1][-LAST_STEPS:]).flatten(0, 1)
            shares.append(dropped_share(loads, 1.25))
    return 100 * float(np.mean(shares))
