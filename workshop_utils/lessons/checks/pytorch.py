"""Checks of lesson 07, PyTorch; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from workshop_utils.lessons.checks import NotYet, Wrong, exercise, is_missing, mistakes, recognise, result_of
from workshop_utils.lessons.checks.cuts import Parts, first_difference
from workshop_utils.lessons.checks.open_question import OpenQuestion
from workshop_utils.lessons.checks.processes import values_on_ranks

# Data parallelism from hooks: ranks, and the parts of a rank's batch.
TRIALS = ((2, 3), (3, 1))
SHARE = 1.5  # of an N-th of the optimizer's state: whole parameters cannot be dealt out evenly

no_sync_gain = OpenQuestion(
    "times",
    (0.9, 4.5),
    "t_f and t_b are the passes over one part, e is what a backward pass leaves exposed. A step of four parts takes "
    "4 (t_f + t_b + e) if each sends, and 4 (t_f + t_b) + e with no_sync. So it gains less than 4 times: it saves what "
    "is exposed, not what is sent. If all communication were hidden, it would save bytes only.",
)


class _Sent(NamedTuple):
    """An all-reduce that a learner's function has begun."""

    numbers: int
    number_of_pass: int
    in_backward: bool
    blocks: bool  # the backward pass, until it is done
    came: int  # gradients of this pass, before


class _Step(NamedTuple):
    """What a learner's function did on one rank in one step."""

    passes: int
    sent: list[_Sent]
    never_waited: int
    changed: int  # arrays, while they travelled
    factors: list[float]  # gradients over the right ones; NaN where they differ otherwise
    own: bool  # the gradients are this rank's own
    parameters: int


@exercise
def overlapped_gradients(answer: Callable[..., None]) -> str:
    """`answer(dist, parameters, losses)` leaves the mean gradient of all ranks and losses, sent as gradients come."""
    for size, parts in TRIALS:
        where = f"on {size} ranks, {parts} loss{'es' * (parts > 1)} each"
        arguments = {"answer": answer, "parts": parts}
        steps = values_on_ranks(where, size, _take_steps, arguments, framework="torch")
        for first, second in steps:
            _judge_step(first, f"{where}", size, parts)
            twice = f"{where}, second step"
            if len(second.sent) > len(first.sent):
                raise Wrong(
                    f"{twice}: more is sent than in the first: remove your hooks at the end of a step."
                )
            _judge_step(second, twice, size, parts)
    return (
        "on 2 and on 3 ranks gradients are those of one process, sent once a step, during the backward pass."
    )


def _judge_step(step: _Step, where: str, size: int, parts: int) -> None:
    if not step.passes and not step.sent:
        raise NotYet("no backward pass was made: write the function, then run this again.")
    if step.passes != parts:
        one_each = "one for each loss, so that only one part's activations are held at a time"
        raise Wrong(f"{where}: {step.passes} backward passes; make {one_each}.")
    if not step.sent:
        raise Wrong(f"{where}: `dist.all_reduce` was never called, so every rank has its own gradients.")
    if any(each.number_of_pass < parts for each in step.sent):
        only = "send only in the last backward pass, when `.grad` has the sum of all parts"
        raise Wrong(f"{where}: gradients are sent before the last of {parts} passes; {only}.")
    numbers = sum(each.numbers for each in step.sent)
    if numbers != step.parameters:
        raise Wrong(f"{where}: {numbers} numbers are sent; the gradients have {step.parameters}, sent once.")
    if not any(each.in_backward for each in step.sent):
        raise Wrong(f"{where}: no overlap: all is sent after the backward pass; send from the hooks.")
    if any(each.blocks for each in step.sent):
        raise Wrong(f"{where}: no overlap: the backward pass stands still meanwhile; pass `async_op=True`.")
    if min(each.came for each in step.sent) > len(step.factors) // 2:
        raise Wrong(f"{where}: the first all-reduce waits for nearly all gradients; send each when it comes.")
    if step.never_waited:
        raise Wrong(
            f"{where}: {step.never_waited} all-reduces were never waited for; `wait` returns when one is done."
        )
    if step.changed:
        raise Wrong(f"{where}: {step.changed} gradients were changed while they travelled; wait first.")
    _judge_gradients(step, where, size, parts)


def _judge_gradients(step: _Step, where: str, size: int, parts: int) -> None:
    if all(math.isclose(factor, 1, rel_tol=1e-6) for factor in step.factors):
        return
    sentences = {
        float(size): "they are the ranks' sum: divide by the number of ranks",
        1 / size: "they are divided by the number of ranks twice",
        float(parts): "they are too large by the number of parts: divide each loss by it",
        float(size * parts): "divide by the number of ranks, and each loss by the number of parts",
        1 / parts: "they are divided by the number of parts twice",
        1 / (size * parts): "divide by the number of ranks once, and each loss by the number of parts once",
    }
    for factor, sentence in sentences.items():
        if all(math.isclose(each, factor, rel_tol=1e-6) for each in step.factors):
            raise Wrong(
                f"{where}: gradients are {factor:.3g} times as large as with one process; {sentence}."
            )
    if step.own:
        raise Wrong(f"{where}: gradients are still the rank's own; send `parameter.grad` itself, not a copy.")
    off = sum(not math.isclose(factor, 1, rel_tol=1e-6) for factor in step.factors)
    raise Wrong(f"{where}: {off} of {len(step.factors)} gradients differ from those of one process.")


def _take_steps(dist: Any, answer: Callable[..., None], parts: int) -> tuple[_Step, _Step]:
    """On a rank: two steps of `answer`, watched."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    module = nn.Sequential(*layers).double()
    parameters = list(module.parameters())
    inputs = torch.randn(2, dist.get_world_size(), parts, 4, 6, dtype=torch.float64)
    steps = []
    for batch in inputs:
        mine = batch[dist.get_rank()]
        expected = torch.autograd.grad(module(batch).square().mean(), parameters)
        own = torch.autograd.grad(module(mine).square().mean(), parameters)
        module.zero_grad()
        with _watched(dist, parameters) as (sent, works, passes):
            answer(dist, list(parameters), [lambda part=part: module(part).square().mean() for part in mine])
        got = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        factors = [_factor(*pair) for pair in zip(got, expected, strict=True)]
        is_own = any(
            all(torch.allclose(mine * times, right) for mine, right in zip(got, own, strict=True))
            for times in (1, dist.get_world_size())
        )
        waits = sum(not work.is_done for work in works), sum(work.was_changed for work in works)
        for work in works:
            work.wait()
        dist.barrier()
        numbers = sum(p.numel() for p in parameters)
        steps.append(_Step(len(passes), list(sent), *waits, factors, is_own, numbers))
    return steps[0], steps[1]


def _factor(got: Any, expected: Any) -> float:
    factor = float((got * expected).sum() / (expected * expected).sum())
    return factor if bool((got - factor * expected).abs().max() < 1e-9) else math.nan


class _Work:
    """An all-reduce under way, of a copy, which is written back by whoever waits: so whoever does not is found out."""

    def __init__(self, dist: Any, real: Callable[..., Any], tensor: Any, *arguments: Any) -> None:
        self._tensor, self._before, self._copy = tensor, tensor.detach().clone(), tensor.detach().clone()
        self._work = real(self._copy, *arguments, async_op=True)
        self.is_done = self.was_changed = False

    def wait(self, *timeout: Any) -> bool:
        self._work.wait(*timeout)
        self._finish()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        def finish(_: Any) -> list[Any]:
            self._finish()
            return [self._tensor]

        return self._work.get_future().then(finish)

    def _finish(self) -> None:
        if not self.is_done:
            self.was_changed = not bool((self._tensor == self._before).all())
            self._tensor.detach().copy_(self._copy)
        self.is_done = True


@contextlib.contextmanager
def _watched(dist: Any, parameters: Sequence[Any]) -> Iterator[tuple[list[_Sent], list[_Work], list[int]]]:
    """While the block runs: note all-reduces, those under way, and for each backward pass its thread."""
    import torch

    sent: list[_Sent] = []
    works: list[_Work] = []
    passes: list[int] = []  # threads
    came = 0
    running = False
    real, real_backward = dist.all_reduce, torch.autograd.backward

    def backward(*arguments: Any, **options: Any) -> None:
        nonlocal came, running
        came, running = 0, True
        passes.append(threading.get_ident())
        try:
            real_backward(*arguments, **options)
        finally:
            running = False

    def note(_: Any) -> None:
        nonlocal came
        came += 1

    def all_reduce(
        tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        blocks = running and not async_op and threading.get_ident() == passes[-1]
        sent.append(_Sent(tensor.numel(), len(passes), running, blocks, came))
        if not async_op:
            return real(tensor, op, group)
        works.append(_Work(dist, real, tensor, op, group))
        return works[-1]

    hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in parameters]
    dist.all_reduce, torch.autograd.backward = all_reduce, backward
    try:
        yield sent, works, passes
    finally:
        dist.all_reduce, torch.autograd.backward = real, real_backward
        for hook in hooks:
            hook.remove()


class _Sharded(NamedTuple):
    """What a learner's ZeRO-1 came to on one rank."""

    missing: bool  # it has returned nothing
    optimizers: int  # made before the first step, and
    later: int  # after it
    numbers: int  # that this rank's optimizer updates
    wrong: list[list[int]]  # by step, the parameters that are not as one process has them
    unmoved: list[int]  # that are in the end as they were at the start
    stale: list[int]  # that are in the end one step behind


@exercise
def sharded_optimizer(answer: Callable[..., Any]) -> str:
    """`answer(dist, parameters, make_optimizer)` returns `step`: own parameters are updated, then all are shared."""
    for size in (2, 3):
        where = f"on {size} ranks"
        ranks = values_on_ranks(where, size, _shard, {"answer": answer}, framework="torch", timeout="20s")
        _judge_shards([_Sharded(*each) for each in ranks], where, size)
    return (
        "on 2 and on 3 ranks all parameters are those of one process's Adam, of whose state no rank keeps more than "
        f"{SHARE} N-ths."
    )


def _judge_shards(ranks: list[_Sharded], where: str, size: int) -> None:
    if any(each.missing for each in ranks):
        raise NotYet("your function returned nothing: write it, and return `step`.")
    if not any(each.optimizers or each.later for each in ranks):
        raise Wrong(f"{where}: `make_optimizer` was never called, so nothing is updated.")
    if any(each.later for each in ranks):
        raise Wrong(
            f"{where}: `step` makes a new optimizer, which forgets Adam's means; make it once, before."
        )
    whole = NUMBERS
    for rank, each in enumerate(ranks):
        if each.numbers >= whole:
            raise Wrong(
                f"{where}: rank {rank} keeps state for all parameters; give `make_optimizer` only its own."
            )
    kept = sum(each.numbers for each in ranks)
    if kept < whole:
        raise Wrong(
            f"{where}: of {whole} numbers only {kept} belong to a rank; every parameter needs an owner."
        )
    for rank, each in enumerate(ranks):
        if each.numbers > SHARE * whole / size:
            deal = "deal out numbers, not parameters: weights are larger than biases"
            raise Wrong(
                f"{where}: rank {rank} keeps {each.numbers} of {whole} numbers, more than {SHARE} / N; {deal}."
            )
    if all(len(each.unmoved) == len(WIDTHS) * 2 - 2 for each in ranks):
        either = (
            "either `step` never calls that of the optimizer, or a rank that is not the owner overwrites it"
        )
        raise Wrong(f"{where}: no parameter changes: {either}.")
    for rank, each in enumerate(ranks):
        step = next((number for number, wrong in enumerate(each.wrong) if wrong), None)
        if step is None:
            continue
        which = f"{where}, step {step + 1}, rank {rank}: parameter {each.wrong[step][0]}"
        if set(each.wrong[-1]) <= set(each.unmoved):
            raise Wrong(f"{which} is as at the start: its owner updates it, and must send it to the others.")
        if set(each.wrong[-1]) <= set(each.stale):
            raise Wrong(f"{which} is one step behind: update first, then send.")
        raise Wrong(
            f"{which} is not as one process has it; who owns it, and does every rank receive from that one?"
        )


WIDTHS = (12, 16, 16, 12)
NUMBERS = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(WIDTHS))


def _shard(dist: Any, answer: Callable[..., Any]) -> tuple[Any, ...]:
    """On a rank: three steps of `answer`, beside one process's optimizer. Gradients are the mean already."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(*widths) for widths in itertools.pairwise(WIDTHS)]
    parameters = list(nn.Sequential(*layers).parameters())
    alone = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    made: list[Any] = []

    def make_optimizer(own: Any) -> Any:
        made.append(torch.optim.Adam(own, lr=0.01))
        return made[-1]

    reference = torch.optim.Adam(alone, lr=0.01)
    step = answer(dist, list(parameters), make_optimizer)
    if is_missing(step):
        return True, 0, 0, 0, [], [], []
    if not callable(step):
        raise TypeError(f"your function returned {step!r}; it must return a function `step`")
    before, wrong = len(made), []
    starts = [parameter.detach().clone() for parameter in alone]
    unmoved: list[int] = []
    stale: list[int] = []
    for _ in range(3):
        behind = [parameter.detach().clone() for parameter in alone]
        for parameter, copy in zip(parameters, alone, strict=True):
            copy.grad = torch.randn_like(copy)
            parameter.grad = copy.grad.clone()
        reference.step()
        step()
        dist.barrier()
        pairs = list(enumerate(zip(parameters, alone, strict=True)))
        wrong.append([index for index, (mine, right) in pairs if not torch.allclose(mine, right, atol=1e-6)])
        unmoved = [index for index, (mine, _) in pairs if torch.equal(mine, starts[index])]
        stale = [index for index, (mine, _) in pairs if torch.allclose(mine, behind[index], atol=1e-6)]
    numbers = sum(each.numel() for one in made for group in one.param_groups for each in group["params"])
    return False, before, len(made) - before, numbers, wrong, unmoved, stale


def _filled(nbytes: Sequence[int], limits: Sequence[int], passes: bool = False) -> Parts:
    """A bucket is closed once its bytes reach its limit, or (`passes`) before a parameter takes it above that."""
    buckets: Parts = []
    total = 0
    for index, size in enumerate(nbytes):
        limit = limits[min(max(len(buckets), 1), len(limits)) - 1]
        if not buckets or (total + size > limit if passes else total >= limit):
            buckets.append([])
            total = 0
        buckets[-1].append(index)
        total += size
    return buckets


def _of_pytorch(nbytes: Sequence[int], limits: Sequence[int]) -> Parts:
    """What PyTorch's own function gives."""
    import torch
    from torch import distributed

    if not nbytes:
        return []
    tensors = [torch.empty(size, dtype=torch.uint8) for size in nbytes]
    buckets, _ = distributed._compute_bucket_assignment_by_size(tensors, list(limits), [False] * len(tensors))
    return sorted(buckets)


_CASES: tuple[tuple[list[int], tuple[int, int]], ...] = (
    ([10, 10, 10], (100, 100)),
    ([10, 10, 10, 10], (20, 20)),
    ([10, 10, 10], (10, 10)),
    ([30, 5, 5, 50, 5], (20, 20)),
    ([8, 7, 9, 6, 5, 4], (15, 15)),
    ([10] * 8, (10, 30)),
    ([50, 5, 5, 5, 40, 1], (8, 16)),
    ([], (10, 20)),
)


@exercise
def buckets(answer: Callable[[list[int], tuple[int, int]], Parts]) -> str:
    """`answer(nbytes, limits)`: gradients in the order in which they come; limits of the first and other buckets."""
    given = []
    for nbytes, limits in _CASES:
        parts = result_of(answer, list(nbytes), limits)
        if not isinstance(parts, list | tuple) or not all(isinstance(part, list | tuple) for part in parts):
            raise Wrong(
                f"with {nbytes} and {limits} it gave {parts!r}; it must be a list of lists: [[…], …]."
            )
        given.append([list(part) for part in parts])
    recognise(answer, _CASES, mistakes(__name__, "buckets", filled=_filled))
    for parts, (nbytes, limits) in zip(given, _CASES, strict=True):
        expected = _of_pytorch(nbytes, limits)
        if parts == expected:
            continue
        of = f"gradients of {nbytes} bytes, limits {limits}: you gave {parts}"
        if sorted(index for part in parts for index in part) != list(range(len(nbytes))):
            raise Wrong(f"{of}; every gradient must be in one bucket, once, by its number from 0 on.")
        raise Wrong(f"{of}; {first_difference(parts, expected, 'bucket')}.")
    return f"in all {len(_CASES)} cases your buckets are those of PyTorch's own function."
