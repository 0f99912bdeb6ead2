"""Checks of lesson 16, long contexts, experts, no bubbles; see `workshop_utils.lessons.checks` for how they speak."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import (
    NotYet,
    Wrong,
    exercise,
    explain,
    is_missing,
    listed,
    mistakes,
    number_of,
    refuse,
    refuse_any,
    result_of,
)
from workshop_utils.lessons.checks.collectives import agreed
from workshop_utils.lessons.checks.model_parallel import (
    gradient_of,
    judge_gradients,
    passes_of,
    predicted,
)
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.lessons.checks.processes import on_two_and_three_ranks
from workshop_utils.parallel import schedule as schedules
from workshop_utils.parallel.schedule import Kind, Pass
from workshop_utils.training.tcp_bytes import count_bytes

Block = tuple[np.ndarray, np.ndarray]  # scores and values
Order = list[tuple[Kind, int]]

QUERIES, WIDTH, HIDDEN = 3, 3, -np.inf  # of a case; a score that the mask hides
CAUSAL = np.triu(np.full((3, 3), HIDDEN), 1)
WIDE = 64  # of a token that goes to experts
TOKENS = {2: (23, 14), 3: (40, 0, 31)}  # of each rank, by their number
IDLE = "a rank without tokens must take part in each exchange: its experts compute the rows of other ranks"
MOST_BYTES = 1.3  # of the rows alone; numbers and headers come on top
LAST_STEPS = 20


@exercise
def softmax_step(answer: Callable[..., Any]) -> str:
    """`answer(state, scores, values)` merges a block of keys into each query's maximum, total and mixture."""
    for where, blocks in _blocks_of_keys().items():
        state: Any = np.full(QUERIES, -np.inf), np.zeros(QUERIES), np.zeros((QUERIES, WIDTH))
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


def _blocks_of_keys() -> dict[str, list[Block]]:
    """By name of the case, the blocks as they come."""
    random, apart = np.random.default_rng(0), np.c_[[1000.0, 0.0, -1000.0]]
    late, latest = np.c_[[HIDDEN, HIDDEN, -900.0]], np.c_[[-900.0, HIDDEN, -900.0]]
    cases: dict[str, list[tuple[int, Any]]] = {  # of each block, its keys, and what is added to their scores
        "with one block of 4 keys": [(4, 0)],
        "with blocks of 4, 1 and 5 keys": [(4, 0), (1, 0), (5, 0)],
        "with scores around 1000, 0 and −1000": [(2, apart), (5, apart), (1, apart)],
        "with larger and larger scores": [(2, 0), (5, 900), (1, 1800)],
        "with smaller and smaller scores": [(2, 0), (5, -900), (1, -1800)],
        "with blocks that the mask hides from some queries": [(3, late), (3, latest), (2, -900)],
        "on the middle one of three ranks of a ring": [(3, CAUSAL), (3, 0), (3, HIDDEN)],
    }
    return {
        name: [
            (2 * random.normal(size=(QUERIES, keys)) + shift, random.normal(size=(keys, WIDTH)))
            for keys, shift in blocks
        ]
        for name, blocks in cases.items()
    }


def _check_state(state: Any, blocks: list[Block], where: str) -> None:
    """Raise Wrong unless `state` is what a step leaves behind `blocks`."""
    is_triple = isinstance(state, tuple | list) and len(state) == 3
    refuse(not is_triple, f"{where}: your function gave {state!r}; it must give (maximum, total, mixture).")
    maximum, total, mixture = (np.asarray(each, dtype=float) for each in state)
    shapes, right = [maximum.shape, total.shape, mixture.shape], [(QUERIES,), (QUERIES,), (QUERIES, WIDTH)]
    of = f"{where}, with {QUERIES} queries: maximum, total and mixture have the shapes"
    refuse(shapes != right, f"{of} {listed(shapes)}; they must be {listed(right)}.")
    scores, values = np.hstack([each for each, _ in blocks]), np.vstack([each for _, each in blocks])
    largest = scores.max(axis=1)
    seen, query = ~np.isneginf(largest), int(np.argmin(np.isclose(maximum, largest)))
    is_last = np.allclose(maximum, blocks[-1][0].max(axis=1))
    of_last = ", that of this block alone: keep the larger one of it and the maximum so far" * is_last
    nan = "−inf − (−inf) is no number: where a query has seen no key yet, subtract something finite"
    overflow = (
        "exp overflowed, though the largest score so far makes every exponential at most 1: subtract it"
    )
    refuse_any(
        f"{where}: ",
        {
            f"{nan}.": np.isnan(mixture[~seen]).any() or np.isnan(total[~seen]).any(),
            "a query that has seen no key has a total above 0.": total[~seen].any() or mixture[~seen].any(),
            f"the maximum of query {query} is {maximum[query]:g}{of_last or '; the largest score that it has seen is'}"
            f"{'' if is_last else f' {largest[query]:g}'}.": not np.isclose(maximum, largest).all(),
            f"{overflow}.": not (np.isfinite(total) & np.isfinite(mixture).all(axis=1)).all(),
            "every exponential became 0: subtract the query's own largest score.": (total[seen] <= 0).any(),
        },
    )
    got = np.column_stack([total, mixture])[seen]
    due = _merged([(scores, values)], lambda *given: given[3:])[seen]
    if np.allclose(got, due, rtol=1e-9, atol=1e-9):
        return
    digits = "this is right to 5 digits only: compute in float64, and add nothing to `total`"
    refuse(np.allclose(got, due, rtol=1e-5, atol=1e-5), f"{where}: {digits}.")
    slips = mistakes(__name__, "softmax_step").items()
    explain(got, {words: _merged(blocks, slip)[seen] for words, slip in slips}, where=f"{where}: ")
    means, right_means = got[:, 1:] / got[:, :1], due[:, 1:] / due[:, :1]
    both = "mixture / total is right, but `total` is not Σ exp(score − maximum)"
    refuse(np.allclose(means, right_means), f"{where}: {both}.")
    off = int(np.argmax(np.abs(means - right_means).max(axis=1)))
    raise Wrong(f"{where}, mixture / total of query {off} is {means[off]}; it must be {right_means[off]}.")


def _merged(blocks: list[Block], step: Callable[..., Any]) -> np.ndarray:
    """Total and mixture of each query behind `blocks`, where `step` merges what there is with what a block gives."""
    maximum, total, mixture = np.full(QUERIES, -np.inf), np.zeros(QUERIES), np.zeros((WIDTH, QUERIES))
    for scores, values in blocks:
        largest = np.maximum(maximum, scores.max(axis=1))
        finite = np.where(np.isneginf(largest), 0, largest)
        weights, shrink = np.exp(scores.T - finite), np.exp(maximum - finite)
        total, mixture = step(shrink, total, mixture, weights.sum(axis=0), values.T @ weights)
        maximum = largest
    return np.vstack([total, mixture]).T


@exercise
def zig_zag(answer: Callable[[int, int, int], Any]) -> str:
    """`answer(length, rank, size)` is the places of the tokens that a rank holds: chunks r and 2N − 1 − r of 2N."""
    for length, size in ((16, 4), (8, 2), (30, 3), (6, 1), (40, 5)):
        where, last = f"with {length} tokens on {number_of(size, 'rank')}, ", 2 * size - 1
        shares = [_places(answer, length, rank, size) for rank in range(size)]
        chunks = np.arange(length).reshape(2 * size, -1).tolist()
        right = [chunks[rank] + chunks[last - rank] for rank in range(size)]
        if shares == right:
            continue
        explain(shares, mistakes(__name__, "zig_zag"), chunks, length, size, where=where)
        places = [place for share in shares for place in share]
        outside = [place for place in places if not 0 <= place < length]
        counts = [places.count(place) for place in range(length)]
        rank = next(rank for rank in range(size) if shares[rank] != right[rank])
        looks = listed(sum(place + 1 for place in share) for share in shares)
        due = f"its chunks {rank} and {last - rank} of {2 * size} are {right[rank]}"
        refuse_any(
            where,
            {
                f"place {listed(outside[:1])} does not exist; they go from 0 to {length - 1}.": outside,
                f"nobody holds token {np.argmin(counts)}.": min(counts) == 0,
                f"{max(counts)} ranks hold token {np.argmax(counts)}.": max(counts) > 1,
                f"rank {rank} holds {shares[rank]}; {due} (keys to look at, rank by rank: {looks}).": True,
            },
        )
    return "every token is on one rank, and under a causal mask all ranks have equally many keys to look at."


def _places(answer: Callable[[int, int, int], Any], length: int, rank: int, size: int) -> list[int]:
    given = result_of(answer, length, rank, size)
    try:
        return [operator.index(place) for place in given]
    except TypeError:
        shown = f"with {length} tokens, rank {rank} of {size} gave {given!r}"
        raise Wrong(f"{shown}; it must be a list of places, whole numbers.") from None


@exercise
def place_weights(answer: Callable[[Order, int, int], Order]) -> str:
    """`answer(order, rank, ranks)` is 1F1B's `order` of passes on a rank, with its weight passes put in."""
    for ranks, microbatches in ((4, 8), (2, 4), (3, 7), (4, 2), (6, 12), (1, 3)):
        of = f"with {number_of(ranks, 'rank')} and {microbatches} microbatches"
        plain, best = (schedules.schedule_of(name, ranks, microbatches) for name in ("one_f_one_b", "zb_h1"))
        orders = tuple(_with_weights(answer, plain, rank, of) for rank in range(ranks))
        yours, timeline = predicted(of, orders, microbatches)
        most = min(ranks, microbatches)
        for rank, passes in enumerate(orders):
            late = f"rank {rank} holds {schedules.held(passes)} microbatches at once, rank 0 of 1F1B {most}"
            advice = "a microbatch is held until its weight pass: run one before the next forward pass"
            refuse(schedules.held(passes) > most, f"{of}, {late}; {advice}.")
        before, least = (schedules.bubble(schedules.predict(each, 1.0, 2.0)) for each in (plain, best))
        idle = schedules.bubble(timeline)
        waits = f"ranks wait {100 * idle:.0f} % of the time, with 1F1B {100 * before:.0f} %"
        can = f"{100 * least:.0f} % can be had: {_misplaced(yours, timeline, most)}"
        refuse(idle > least + 1e-9, f"{of}, {waits}; {can}.")
    return (
        "your schedule is as good as ZB-H1: ranks wait a third as long as with 1F1B, if there are microbatches enough, "
        "and no rank holds more of them than rank 0 of 1F1B."
    )


def _misplaced(schedule: schedules.Schedule, timeline: schedules.Timeline, most: int) -> str:
    """A weight pass that stands too late, so that its rank waits before it, or too early, where others wait."""
    times = {timed.each: timed for timed in timeline}
    early = ""
    for rank, passes in enumerate(schedule.passes):
        owed, held, end = list[Pass](), 0, 0.0
        for place, each in enumerate(passes):
            start = times[each].start
            if owed and start > end + 1e-9:
                return f"rank {rank} waits before {each}, though it could run {owed[0]} there"
            if each.kind == "weight":
                ahead = next((later for later in passes[place:] if later.kind != "weight"), None)
                source = ahead and schedule.source(ahead)
                is_ready = ahead and (not source or times[source].end <= start + 1e-9)
                if is_ready and held < most:
                    first = f"rank {rank} runs {each}, though it could run {ahead} first"
                    early = early or f"{first}: others wait for what comes of it"
                owed.remove(each)
            elif each.kind == "backward":
                owed.append(each._replace(kind="weight"))
            held, end = held + (each.kind == "forward") - (each.kind == "weight"), times[each].end
    return early or "some weight passes stand where others wait for this rank"


def _with_weights(
    answer: Callable[[Order, int, int], Order], plain: schedules.Schedule, rank: int, of: str
) -> tuple[Pass, ...]:
    """The answer's order on a rank; raises Wrong if it is not that of `plain` with weight passes between its passes."""
    passes, of = plain.passes[rank], f"{of}, rank {rank}"
    given = result_of(answer, [(each.kind, each.microbatch) for each in passes], rank, plain.ranks)
    placed = passes_of(given, rank, f"{of} has", ("forward", "backward", "weight"))
    refuse(placed == passes, f"{of} has no weight pass; put in ('weight', 0) and the others.")
    moved = (
        "the forward and backward passes are no longer those of `order`; put weight passes between them only"
    )
    refuse(tuple(each for each in placed if each.kind != "weight") != passes, f"{of}: {moved}.")
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
    """On a rank: `answer`, beside what one process computes, by the experts of a rank and the choices of a token."""
    for own, k in ((2, 2), (3, 3), (1, 1)):
        of = f"with {number_of(own, 'expert')} a rank and {number_of(k, 'choice')} a token"
        _one_layer(dist, answer, f"{where} {of}, rank {dist.get_rank()}: ", own, k)
    return True


def _one_layer(dist: Any, answer: Callable[..., Any], where: str, own: int, k: int) -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = TOKENS[ranks]
    mlps = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDE, 4), nn.Tanh(), nn.Linear(4, WIDE)).double() for _ in range(own * ranks)
    )
    tokens, gradient = torch.randn(2, sum(counts), WIDE, dtype=torch.float64)
    chosen = torch.rand(len(tokens), own * ranks - 1).argsort(dim=1)[:, :k]  # nobody chooses the last
    weights = torch.rand(len(tokens), k, dtype=torch.float64) + 0.1

    whole, leaves = copy.deepcopy(mlps), (tokens.clone().requires_grad_(), weights.clone().requires_grad_())
    of_all = torch.stack([mlp(leaves[0]) for mlp in whole], dim=1)
    picked = of_all[torch.arange(len(tokens)).unsqueeze(1), chosen]
    right = (picked * leaves[1].unsqueeze(-1)).sum(dim=1)
    right.backward(gradient)
    share = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    mine = tokens[share].clone().requires_grad_(), weights[share].clone().requires_grad_()
    given = mine[0].detach().clone(), chosen[share].clone(), mine[1].detach().clone()
    here, rows = mlps[own * rank : own * (rank + 1)], [0]
    for mlp in here:
        mlp.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    with agreed(dist):
        with count_bytes(dist.barrier) as counted:
            got = answer(dist, mine[0], given[1], mine[1], list(here))
            if not (counts[rank] or counted.sent):
                raise RuntimeError(IDLE)  # no verdict, which others would have to hear of: they still wait
        if is_missing(got):
            raise NotYet("your function gave nothing: write it, then run this again.")
        shape = tuple(got.shape) if isinstance(got, torch.Tensor) else repr(got)
        refuse(shape != tuple(mine[0].shape), f"{where}it gives {shape}, not a tensor like `tokens`.")
        if not _equal(got, right[share]):
            explain(got.detach(), _mistaken(of_all, chosen, weights, counts, rank, own), where=where)
            off = int((got - right[share]).abs().gt(1e-9).any(dim=1).sum())
            raise Wrong(f"{where}{off} of {counts[rank]} tokens have another result than in one process.")
        kept = _equal(mine[0], given[0]) and _equal(mine[1], given[2]) and given[1].equal(chosen[share])
        home = torch.arange(ranks).repeat_interleave(torch.tensor(counts)).unsqueeze(1)
        # Rows that are dispatched from here, and those whose results are combined elsewhere.
        crossing = int(((home == rank) ^ (chosen // own == rank)).sum())
        times, due = counted.sent / (8 * WIDE * crossing), int((chosen // own == rank).sum())
        flows = "no gradient can come back: send rows by `Exchange.apply`, and compute outside `no_grad`"
        advice = "send a row to its expert's rank, and its result back"
        refuse_any(
            where,
            {
                "an argument was changed; work on copies.": not kept,
                f"{flows}.": counts[rank] and not got.requires_grad,
                f"it sends {times:.1f} times the bytes of the rows that others need; {advice}.": times
                > MOST_BYTES,
                f"experts here compute {sum(rows)} rows, of which {due} are for them: give each its own rows.": (
                    sum(rows) > due
                ),
            },
        )
    if got.requires_grad:
        got.backward(gradient[share])
    of_experts = zip(here.named_parameters(), whole[own * rank : own * (rank + 1)].parameters(), strict=True)
    pairs = {f"mlps.{name}": (gradient_of(one), gradient_of(other)) for (name, one), other in of_experts}
    for name, one, leaf in zip(("weights", "tokens"), mine[::-1], leaves[::-1], strict=True):
        pairs = {name: (gradient_of(one), gradient_of(leaf)[share]), **pairs}
    judge_gradients(f"{where}results are right, but ", pairs)


def _equal(one: Any, other: Any) -> bool:
    return bool(((one - other).abs() < 1e-9).all())


def _mistaken(
    of_all: Any, chosen: Any, weights: Any, counts: Sequence[int], rank: int, own: int
) -> dict[str, np.ndarray]:
    """What typical mistakes give this rank's tokens, by what is wrong with them; `of_all` is all experts' results."""
    parts = [part.numpy() for part in chosen.split(list(counts))]
    mine, weight = (each.detach().split(list(counts))[rank].numpy() for each in (of_all, weights))
    choice = parts[rank]
    order = np.argsort(choice, axis=None, kind="stable")
    # Rows that arrive are cut by expert without being sorted: each is computed by whoever stands there.
    taken = choice.flatten()[order]
    for other in range(len(counts)):
        arrived = [np.sort(part[part // own == other]) for part in parts]
        ends = np.cumsum([0, *map(len, arrived)])
        taken[taken // own == other] = np.sort(np.concatenate(arrived))[ends[rank] : ends[rank + 1]]

    def of(experts: np.ndarray) -> np.ndarray:
        """Rows of results, by token and choice."""
        return mine[np.arange(len(mine)).repeat(choice.shape[1]), experts.flatten()]

    def mix(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return (rows.reshape(*choice.shape, -1) * weight.reshape(*choice.shape, 1)).sum(axis=1)

    slips = mistakes(__name__, "dispatch_and_combine", of=of, mix=mix).items()
    case = choice, weight, order, taken[order.argsort()], own, choice // own == rank
    return {words: slip(*case) for words, slip in slips}


@measured
def dropped_rows(results: Any) -> float:
    """Per cent of rows above 1.25 times the mean of their layer's experts, with two choices and nothing balanced.

    `results` are runs of `balance_runs`; the last 20 steps count, in each layer alone.
    """
    import torch

    from workshop_utils.parallel.experts import dropped_share

    shares, fewest = [], 40 if os.environ.get("WORKSHOP_SIZE") == "small" else 60
    for run in runs_of(results, "balance_runs", ranks=3):
        k, steps = (run.arguments.get(name) for name in ("k", "steps"))
        refuse(k != 2, f"`k` is {k}; it must be 2.")
        enough = isinstance(steps, int) and steps >= fewest
        refuse(not enough, f"`steps` is {steps}; train for at least {fewest}.")
        for each in run.values:
            refuse("nothing" not in each, f'`ways` are {listed(each)}; "nothing" must be among them.')
            loads = torch.as_tensor(each["nothing"][1][-LAST_STEPS:]).flatten(0, 1)
            shares.append(dropped_share(loads, 1.25))
    return 100 * float(np.mean(shares))
