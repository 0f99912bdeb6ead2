"""Checks of lesson 08, tensor and pipeline parallelism; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any
from unittest import mock

import numpy as np

from workshop_utils.comm.communicator import Communicator, PeerDied
from workshop_utils.lessons.checks import (
    NotYet,
    Wrong,
    exercise,
    explain,
    is_missing,
    listed,
    number_of,
    refuse,
    result_of,
)
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.lessons.checks.processes import on_two_and_three_ranks, values_on_ranks
from workshop_utils.parallel import schedule as schedules
from workshop_utils.parallel.schedule import Kind, Pass
from workshop_utils.training.tcp_bytes import count_bytes

Answer = Callable[[int, int, int], list[tuple[Kind, int]]]

WIDTH, HIDDEN, ROWS = 40, 96, 50
MOST_BYTES = 1.15  # of two all-reduces; headers are less than a tenth
SHAPE = (2, 3)  # of a microbatch's activations
TOKENS = 24  # of a sequence, which 2 and 3 ranks divide
# The first direction runs fastest.
MESHES: tuple[dict[str, int], ...] = (
    {"tensor": 2, "data": 2, "pipeline": 2},
    {"tensor": 3, "data": 2, "pipeline": 4},
    {"pipeline": 2, "data": 3, "tensor": 2},
    {"tensor": 2, "context": 3, "data": 1, "pipeline": 5},
    {"data": 7},
)


@measured
def slow_stage(results: Any) -> float:
    """How many times as long a step takes if rank 2's passes take twice as long.

    `results` are runs of `emulated`, whose ranks return for each step when their passes began and ended; of each kind
    the shortest step counts.
    """
    right = {"name": "one_f_one_b", "microbatches": 8, "chunks": 1}
    defaults = {"chunks": 1, "slow": None}
    seconds = {False: math.inf, True: math.inf}  # by whether rank 2 is slow
    for run in runs_of(results, "emulated", ranks=4):
        arguments = {**defaults, **run.arguments}
        for name, value in right.items():
            given = arguments.get(name, "not given")
            refuse(given != value, f"`results` has a run with `{name}` {given}; it must be {value}.")
        slow = arguments["slow"]
        refuse(
            slow not in (None, {2: 2}),
            f"`results` has a run with `slow` {slow}; it must be {{2: 2}} or None.",
        )
        for step in zip(*run.values, strict=True):
            passes = [timed for of_rank in step for timed in of_rank]
            took = max(timed.end for timed in passes) - min(timed.start for timed in passes)
            seconds[bool(slow)] = min(seconds[bool(slow)], took)
    for slow, each in zip((None, {2: 2}), seconds.values(), strict=True):
        if math.isinf(each):
            raise NotYet(f"`results` has no run with `slow={slow}`, to compare with.")
    return seconds[True] / seconds[False]


@exercise
def tensor_parallel_mlp(answer: Callable[..., Any]) -> str:
    """`answer(dist, x, up, down)` is down(gelu(up(x))), of which each rank computes an N-th of the hidden units."""
    on_two_and_three_ranks(_mlp, answer)
    return (
        "on 2 and on 3 ranks Z and all gradients are those of one process; each rank computes its share of the hidden "
        "units, and sends no more than one all-reduce forward and one backward need."
    )


def _mlp(dist: Any, answer: Callable[..., Any], where: str) -> bool:
    """On a rank: `answer`, beside what one process computes."""
    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    up, down = nn.Linear(WIDTH, HIDDEN).double(), nn.Linear(HIDDEN, WIDTH).double()
    x, gradient = torch.randn(2, 2, ROWS // 2, WIDTH, dtype=torch.float64)  # of 2 sequences

    reference = partial(_from_units, up, down, x, gradient)
    expected, right = reference(slice(None))
    part, part_gradients = reference(slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size))
    mine = x.clone().requires_grad_()
    watch = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)
    flops = FlopCounterMode(display=False)
    with count_bytes(dist.barrier) as counted, watch as all_reduce, flops:
        z = answer(dist, mine, up, down)
        forward = all_reduce.call_count
        is_tensor = isinstance(z, torch.Tensor) and z.shape == x.shape
        if is_tensor and z.requires_grad:
            z.backward(gradient)
    backward = all_reduce.call_count - forward
    leaves = mine, *up.parameters(), *down.parameters()
    got = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in leaves]
    units = int((got[1] != 0).any(dim=1).sum())
    for each in got[1:4]:  # cut, so that the ranks' parts add up
        dist.all_reduce(each)
    if is_missing(z):
        raise NotYet("your function gave nothing: write it, then run this again.")

    def close(one: Any, other: Any) -> bool:
        return bool(torch.allclose(one, other, rtol=1e-9, atol=1e-9))

    multiplied = flops.get_total_flops() / (3 * 4 * ROWS * WIDTH * HIDDEN / size)  # backward is twice forward
    sent = counted.sent / (2 * 2 * (size - 1) / size * x.nbytes)
    try:
        shape = tuple(z.shape) if isinstance(z, torch.Tensor) else f"a {type(z).__name__}"
        tensor = f"Z is a tensor of shape {tuple(x.shape)} on every rank"
        refuse(not is_tensor, f"your function gave {shape}; {tensor}")
        added = expected + (size - 1) * down.bias
        by_tanh, _ = reference(slice(None), approximate="tanh")
        slips = {
            "Z is this rank's part only; g must sum the parts of all ranks": part,
            "every rank adds the bias of `down` before the sum; add it once, behind g": added,
            "the bias of `down` is missing in Z": expected - down.bias,
            "every rank computes all of Z before the sum; give each its share of the units": expected * size,
            "GELU is approximated by tanh here; take it as it was imported": by_tanh,
        }
        explain(z.detach(), {sentence: value.detach() for sentence, value in slips.items()})
        advice = "does each rank take the same hidden units of `up`, of its bias and of `down`?"
        refuse(not close(z, expected), f"Z is not that of one process; {advice}")
        refuse(not close(mine, x), "`x` was changed; work on a copy")
        share = f"{units} of {HIDDEN} hidden units were computed here; a rank's share is {HIDDEN // size}"
        refuse(units > HIDDEN / size, share)
        slices = "slice the weights before you multiply, so that nothing is computed and then dropped"
        much = f"this rank multiplies {multiplied:.1f} times as much as its share; {slices}"
        refuse(multiplied > 1.05, much)
        behind = "behind g every rank has the whole gradient already, so g does nothing backward"
        refuse(close(got[1], size * right[1]), f"gradients are {size} times too large: {behind}")
        part_only = "the gradient of `x` is this rank's part only; f must sum it over all ranks, backward"
        refuse(close(got[0], part_gradients[0]), part_only)
        bias = f"the gradient of `down.bias` is {size} times too large: add the bias behind g"
        refuse(close(got[4], size * right[4]), bias)
        names = "x", "up.weight", "up.bias", "down.weight", "down.bias"
        for name, one, other in zip(names, got, right, strict=True):
            has = "is missing here" if not one.any() else "is not that of one process"
            refuse(not close(one, other), f"Z is right, but the gradient of `{name}` {has}")
        calls = f"{forward} all-reduces forward and {backward} backward; one and one are enough"
        refuse(max(forward, backward) > 1, calls)
        nothing = "gather nothing, only sum"
        refuse(sent > MOST_BYTES, f"this rank sends {sent:.1f} times the bytes of two all-reduces; {nothing}")
    except Wrong as wrong:
        raise Wrong(f"{where}, rank {rank}: {wrong}.") from None
    return True


def _from_units(up: Any, down: Any, x: Any, gradient: Any, units: slice, **options: str) -> tuple[Any, Any]:
    """Z from some of the hidden units, and the gradients of x and of all parameters."""
    import torch
    from torch.nn.functional import gelu

    given = x.clone().requires_grad_()
    z = gelu(given @ up.weight[units].T + up.bias[units], **options) @ down.weight[:, units].T + down.bias
    return z, torch.autograd.grad(z, [given, *up.parameters(), *down.parameters()], gradient)


@exercise
def sequence_parallel_mlp(answer: Callable[..., Any]) -> str:
    """`answer(region, x, up, down)` is this rank's tokens of down(gelu(up(X))), where `x` is its tokens of X."""
    on_two_and_three_ranks(_sequence_mlp, answer)
    return (
        "on 2 and on 3 ranks Z and all gradients are those of one process; a rank sends five halves of an all-reduce, "
        "and of X it keeps its own tokens only."
    )


def _sequence_mlp(dist: Any, answer: Callable[..., Any], where: str) -> bool:
    """On a rank: `answer`, beside what one process computes from all tokens."""
    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    from workshop_utils.comm.over_torch import TorchCommunicator
    from workshop_utils.parallel.gpt import Kept
    from workshop_utils.parallel.tensor import Region

    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    region = Region(TorchCommunicator(), sequence_parallel=True)
    up, down = nn.Linear(WIDTH, HIDDEN).double(), nn.Linear(HIDDEN, WIDTH).double()
    x, gradient = torch.randn(2, 2, TOKENS, WIDTH, dtype=torch.float64)  # of 2 sequences
    tokens, units = region.own(TOKENS), region.own(HIDDEN)
    expected, right = _from_units(up, down, x, gradient, slice(None))
    part, part_gradients = _from_units(up, down, x, gradient, units)
    only_own = torch.zeros_like(gradient)
    only_own[:, tokens] = gradient[:, tokens]
    _, of_own_tokens = _from_units(up, down, x, only_own, units)
    mine = x[:, tokens].clone().requires_grad_()
    kept, flops = Kept(nn.ModuleList([up, down])), FlopCounterMode(display=False)
    with flops:
        with kept:
            z = answer(region, mine, up, down)
        held, failed = kept.now, ""
        is_tensor = isinstance(z, torch.Tensor)
        fits = is_tensor and z.shape == mine.shape
        if fits and z.requires_grad:
            try:
                z.backward(gradient[:, tokens])
            except RuntimeError as error:
                failed = str(error).splitlines()[0]
    if is_missing(z):
        raise NotYet("your function gave nothing: write it, then run this again.")
    half = (size - 1) / size * x.nbytes  # what a rank sends in half an all-reduce
    sent = region.communicator.traffic.bytes_sent.sum() / half
    leaves = mine, *up.parameters(), *down.parameters()
    got = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in leaves]

    def close(one: Any, other: Any) -> bool:
        return bool(torch.allclose(one, other, rtol=1e-9, atol=1e-9))

    try:
        shape = tuple(z.shape) if is_tensor else f"a {type(z).__name__}"
        own_tokens = f"Z is a tensor of shape {tuple(mine.shape)}, of this rank's tokens"
        refuse(not fits, f"your function gave {shape}; {own_tokens}")
        bias = down.bias.detach()
        slips = {
            "Z is what this rank's hidden units give; g must sum over all ranks": part,
            "every rank adds the bias of `down` before the sum; add it once, behind g": expected
            + (size - 1) * bias,
            "the bias of `down` is missing in Z": expected - bias,
            "every rank computes all of Z before the sum; give each its share of the units": (
                size * (expected - bias) + bias
            ),
        }
        explain(z.detach(), {sentence: value[:, tokens].detach() for sentence, value in slips.items()})
        elsewhere = torch.cat([expected[:, tokens.stop :], expected[:, : tokens.start]], dim=1).split(
            TOKENS // size, 1
        )
        refuse(any(close(z, each) for each in elsewhere), "these are the tokens of another rank")
        refuse(
            not close(z, expected[:, tokens]), "Z is not that of one process; is X gathered, and Z summed?"
        )
        refuse(not close(mine, x[:, tokens]), "`x` was changed; work on a copy")
        conjugate = "backward f scatters the sum of all ranks' gradients, and g gathers all tokens' gradients"
        refuse(failed, f"Z is right; the backward pass stops with {failed}; {conjugate}")
        sums = [
            got[0],
            *map(region.sum, got[1:]),
        ]  # a rank has its units' gradients, and of `down.bias` its tokens'
        many = int((got[1] != 0).any(dim=1).sum())
        share = f"{many} of {HIDDEN} hidden units were computed here; a rank's share is {HIDDEN // size}"
        refuse(many > HIDDEN // size, share)
        multiplied = flops.get_total_flops() / (3 * 4 * 2 * TOKENS * WIDTH * HIDDEN / size)
        refuse(multiplied > 1.25, f"this rank multiplies {multiplied:.1f} times as much as its share")
        refuse(close(sums[1], size * right[1]), f"gradients are {size} times too large; {conjugate}")
        units_only = f"the gradient of `x` is what this rank's hidden units give; {conjugate}"
        refuse(close(got[0], part_gradients[0][:, tokens]), units_only)
        tokens_only = (
            "gradients of weights are those of this rank's tokens only; gather X once more, and use all"
        )
        refuse(close(got[1], of_own_tokens[1]) or close(got[3], of_own_tokens[3]), tokens_only)
        names = "x", "up.weight", "up.bias", "down.weight", "down.bias"
        for name, one, other in zip(names, sums, (right[0][:, tokens], *right[1:]), strict=True):
            has = "is missing here" if not one.any() else "is not that of one process"
            refuse(not close(one, other), f"Z is right, but the gradient of `{name}` {has}")
        enough = (
            "five are enough: forward a gather and a sum scattered, backward two gathers and a sum scattered"
        )
        refuse(sent > 5 * MOST_BYTES, f"this rank sends {sent:.1f} halves of an all-reduce; {enough}")
        most = (
            mine.nbytes + 2 * z.nbytes // WIDTH * HIDDEN
        )  # own X; the own hidden units of all tokens, twice
        again = "keep `x`, and gather it once more in the backward pass"
        refuse(held > most + x.nbytes // 4, f"X of all tokens is kept for the backward pass; {again}")
    except Wrong as wrong:
        raise Wrong(f"{where}, rank {rank}: {wrong}.") from None
    return True


class _Stage:
    """A stage whose activations tell where they have been; it notes what it is called with."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.calls: list[tuple[str, int]] = []
        self.problem = ""
        self.held: dict[int, Any] = {}  # what each forward pass was given, as a real stage holds it

    def forward(self, microbatch: int, incoming: Any) -> Any:
        self.held[microbatch] = incoming
        return self._run("forward", microbatch, incoming, 1)

    def backward(self, microbatch: int, incoming: Any) -> Any:
        gradient = self._run("backward", microbatch, incoming, -1)
        held = self.held.pop(microbatch, None)
        given = _values("forward", microbatch, self.rank - 1)
        if not self.problem and held is not None and not np.array_equal(held, given):
            late = f"the activations of microbatch {microbatch} were overwritten before its backward pass"
            self.problem = f"{late}; receive each message into a new array, since the stage keeps it"
        return gradient

    def _run(self, kind: str, microbatch: int, incoming: Any, step: int) -> Any:
        self.calls.append((kind, microbatch))
        wrong = self._wrong(kind, microbatch, incoming, self.rank - step)
        self.problem = self.problem or (wrong and f"{kind} of microbatch {microbatch} was {wrong}")
        return _values(kind, microbatch, self.rank) if 0 <= self.rank + step < self.ranks else None

    def _wrong(self, kind: str, microbatch: int, incoming: Any, source: int) -> str:
        what = "activations" if kind == "forward" else "gradient"
        if not 0 <= source < self.ranks:
            return "" if incoming is None else "given an array; here nothing comes in: give it None"
        if not isinstance(incoming, np.ndarray) or incoming.shape != SHAPE:
            return f"not given an array of shape {SHAPE}, the {what} from rank {source}"
        for other in (microbatch, *range(10)):
            if np.array_equal(incoming, _values(kind, other, source)):
                return "" if other == microbatch else f"given the {what} of microbatch {other}"
        return f"given other values than the {what} that rank {source} has returned"


def _values(kind: str, microbatch: int, rank: int) -> np.ndarray:
    return np.full(SHAPE, (1 if kind == "forward" else -1) * (100 * rank + microbatch + 1), np.float32)


@exercise
def pipeline_messages(answer: Callable[..., Any]) -> str:
    """`answer(communicator, order, stage, shape)` runs the passes in `order`, and exchanges what they give."""
    for size, name, microbatches in ((2, "gpipe", 7), (4, "one_f_one_b", 5), (1, "gpipe", 2)):
        where = f"on {size} rank{'s' * (size > 1)}, {name}, {microbatches} microbatches"
        passes = schedules.schedule_of(name, size, microbatches).passes
        orders = [[(str(each.kind), each.microbatch) for each in of_rank] for of_rank in passes]
        arguments = {"answer": answer, "orders": orders}
        outcomes = values_on_ranks(where, size, _passes, arguments, timeout="20s")
        if not any(calls for calls, *_ in outcomes):
            raise NotYet("no pass was run: write the function, then run this again.")
        # What a rank was given says more than that a neighbour has left, which may be its consequence.
        for which in (2, 3):
            for rank, outcome in enumerate(outcomes):
                refuse(outcome[which], f"{where}, rank {rank}: {outcome[which]}.")
        for rank, ((calls, messages, *_), order) in enumerate(zip(outcomes, orders, strict=True)):
            runs, due = (
                " ".join(f"{kind[0].upper()}{each}" for kind, each in some) for some in (calls, order)
            )
            refuse(calls != order, f"{where}, rank {rank} runs {runs}; its order is {due}.")
            most = microbatches * ((rank > 0) + (rank < size - 1))
            refuse(messages != most, f"{where}, rank {rank} sends {messages} arrays; it must send {most}.")
    return (
        "between real processes each pass was given what its neighbour had returned, by one message a microbatch, "
        "boundary and direction. (These messages fit into the sockets' buffers. Larger ones block two neighbours that "
        "both send first; there Megatron-LM and `parallel.pipeline` send and receive at once.)"
    )


def _passes(communicator: Communicator, answer: Callable[..., Any], orders: list[Any]) -> tuple[Any, ...]:
    """Of a rank: the passes that were run, the arrays sent, what a pass was given wrongly, and which rank had left."""
    stage, left = _Stage(communicator.rank, communicator.size), ""
    try:
        answer(communicator, orders[communicator.rank], stage, SHAPE)
    except PeerDied as error:
        left = str(error)
    arrays = int(communicator.traffic.bytes_sent.sum()) // 24  # 2 × 3 float32; a barrier sends a byte or two
    return stage.calls, arrays, stage.problem, left


@exercise
def one_f_one_b(answer: Answer) -> str:
    """`answer(rank, ranks, microbatches)` is the order of passes of 1F1B on a rank: ("forward", 0), and so on."""
    for ranks, microbatches in ((2, 4), (4, 8), (4, 2), (4, 5), (6, 12), (1, 2), (33, 36)):
        of = f"with {ranks} ranks and {microbatches} microbatches"
        orders = tuple(_order(answer, rank, ranks, microbatches) for rank in range(ranks))
        try:
            schedule = schedules.Schedule("yours", orders, microbatches)
            idle = schedules.bubble(schedules.predict(schedule, 1.0, 2.0))
        except schedules.ScheduleError as error:
            raise Wrong(f"{of}, {error}.") from None
        yours = ""
        for name, words in (("naive", "the naive schedule"), ("gpipe", "GPipe")):
            if orders == schedules.schedule_of(name, ranks, microbatches).passes:
                yours = f" (what you have written is {words})"
        formula = schedules.bubble_fraction(ranks, microbatches)
        least = f"1F1B waits {100 * formula:.0f} %{yours}"
        refuse(idle > formula + 1e-9, f"{of}, ranks wait {100 * idle:.0f} % of the time; {least}.")
        for rank, passes in enumerate(orders):
            most, kept = min(microbatches, ranks - rank), schedules.held(passes)
            text = f"rank {rank} holds the activations of {kept} microbatches at once; {most} would do"
            early = f"begin with backward as soon as you can{yours}"
            refuse(kept > most, f"{of}, ranks wait no longer than they must, but {text}: {early}.")
    return "as short as GPipe, and no rank holds more microbatches than there are ranks from it to the last."


def _order(answer: Answer, rank: int, ranks: int, microbatches: int) -> tuple[Pass, ...]:
    order: Any = result_of(answer, rank, ranks, microbatches)
    return passes_of(order, rank, f"rank {rank} of {ranks} with {microbatches} microbatches has")


def passes_of(
    order: Any, rank: int, has: str, kinds: Sequence[Kind] = ("forward", "backward")
) -> tuple[Pass, ...]:
    """A learner's order of passes on `rank`, one stage a rank; raises Wrong, which begins with `has`."""
    order = list(order) if isinstance(order, Iterator) else order  # of a generator, all that it yields
    passes = f"{has} {order!r}; it must be a list of passes, such as [('forward', 0)]"
    refuse(not isinstance(order, list | tuple), f"{passes}.")
    form = " or ".join(f"('{kind}', 0)" for kind in kinds)
    for step, each in enumerate(order):
        pair = isinstance(each, tuple | list) and len(each) == 2
        is_pass = pair and each[0] in kinds and isinstance(each[1], Integral)
        refuse(not is_pass, f"{has} {each!r} as its pass {step}; each pass must look like {form}.")
    return tuple(Pass(kind, number, rank) for kind, number in order)


@exercise
def mesh_groups(answer: Callable[[int, dict[str, int]], Any]) -> str:
    """`answer(rank, sizes)` is, by direction, the group of `rank`; the first of `sizes` runs fastest."""
    for sizes in MESHES:
        shape = " × ".join(f"{direction} {size}" for direction, size in sizes.items())
        # Rank 0's group is the same with several mistakes.
        for rank in reversed(range(math.prod(sizes.values()))):
            groups = result_of(answer, rank, dict(sizes))
            _judge_groups(f"in a mesh of {shape}, rank {rank}", groups, rank, sizes)
    return (
        "in every direction each rank finds its group, whatever the order of directions and their sizes. Megatron-LM "
        "numbers its ranks so, too: tensor first, then context, data and pipeline."
    )


def _judge_groups(where: str, groups: Any, rank: int, sizes: Mapping[str, int]) -> None:
    """Raise Wrong with the first thing that is wrong with what a learner gives as the groups of `rank`."""
    form = f"give a dictionary with a list of ranks for each of {listed(sizes)}"
    refuse(not isinstance(groups, Mapping), f"{where} gives {groups!r}; {form}.")
    refuse(set(groups) != set(sizes), f"{where} has groups for {listed(groups) or 'no direction'}; {form}.")
    got: dict[str, list[int]] = {}
    for direction in sizes:
        group, named = groups[direction], f"{where} has the {direction} group {groups[direction]!r}"
        refuse(
            isinstance(group, set | frozenset),
            f"{named}; a set has no order, and a group needs one: give a list.",
        )
        is_list = isinstance(group, list | tuple | range) or getattr(group, "ndim", 0) == 1
        refuse(not is_list, f"{named}; it must be a list of ranks.")
        members = [each.item() if hasattr(each, "item") else each for each in group]
        whole = all(isinstance(each, Integral) and not isinstance(each, bool) for each in members)
        refuse(not whole, f"{named}; ranks are whole numbers, as // gives them.")
        got[direction] = [int(each) for each in members]
    right = _groups(rank, sizes)
    others = {
        "those are of another order of directions; the first of `sizes` runs fastest": _groups(
            rank, {direction: sizes[direction] for direction in [*sizes][::-1]}
        ),
        "those are the groups of rank 0; each rank has its own": _groups(0, sizes),
        "those are places in the groups, from 0; give the ranks that stand there": {
            direction: [*range(size)] for direction, size in sizes.items()
        },
        "those are consecutive ranks, as only the first direction has; take steps in the others": {
            direction: [*range(rank // size * size, rank // size * size + size)]
            for direction, size in sizes.items()
        },
    }
    shown = f"{where} has the groups {got}"
    for sentence, wrong in others.items():
        refuse(got == wrong != right, f"{shown}; {sentence}.")
    for direction, other in ((one, two) for one in sizes for two in sizes):
        swapped = got[direction] == right[other] != right[direction] == got[other]
        refuse(swapped, f"{shown}; {direction} and {other} are exchanged.")
    for direction, size in sizes.items():
        group, due = got[direction], right[direction]
        if group == due:
            continue
        named = f"{where} has the {direction} group {group}"
        refuse(sorted([*group, rank]) == due, f"{named}; the rank itself must be in it.")
        refuse(len(group) != size, f"{named}; it must have {number_of(size, 'rank')}.")
        order = "in ascending order, since a rank's place in it is its number there"
        refuse(sorted(group) == due, f"{named}; give it {order}.")
        refuse(rank not in group, f"{named}; the rank itself must be in it.")
        step = "all others in it differ from the rank in this direction alone"
        raise Wrong(f"{named}; it must be {due}: {step}.")


def _groups(rank: int, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    groups, stride = {}, 1
    for direction, size in sizes.items():
        first = rank - rank // stride % size * stride
        groups[direction] = [*range(first, first + size * stride, stride)]
        stride *= size
    return groups
