"""Checks of lesson 08, tensor and pipeline parallelism; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import gc
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise
from numbers import Integral
from typing import Any

import numpy as np

from workshop_utils.comm.communicator import Communicator, PeerDied
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
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.lessons.checks.processes import on_two_and_three_ranks, values_on_ranks
from workshop_utils.parallel import schedule as schedules
from workshop_utils.parallel.schedule import Kind, Pass
from workshop_utils.training.tcp_bytes import count_bytes

Answer = Callable[[int, int, int], list[tuple[Kind, int]]]

RUNS: dict[str, list[Any]] = {"name": ["one_f_one_b"], "microbatches": [8], "chunks": [1]}
RUNS |= {"slow": [{2: 2}, None]}
WIDTH, TOKENS = 40, 24  # of the MLP's input; of a sequence, which 2 and 3 ranks divide
HIDDEN = {2: 96, 3: 72}  # units, by ranks
MOST_BYTES = 1.15  # of what is needed; headers are less than a tenth
PIPELINES = (2, "gpipe", 9, (2, 3)), (4, "one_f_one_b", 5, (3, 2)), (1, "gpipe", 2, (2, 3))
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
    seconds = {False: math.inf, True: math.inf}  # by whether rank 2 is slow
    lengths = list[float]()  # of each run, a forward pass of the other ranks
    for run in runs_of(results, "emulated", ranks=4):
        arguments = {"chunks": 1, "slow": None, **run.arguments}
        for name, allowed in RUNS.items():
            given, right = arguments.get(name, "not given"), " or ".join(map(str, allowed))
            refuse(given not in allowed, f"`results` has a run with `{name}` {given}; it must be {right}.")
        steps = [[timed for passes in step for timed in passes] for step in zip(*run.values, strict=True)]
        took = [max(timed.end for timed in step) - min(timed.start for timed in step) for step in steps]
        seconds[bool(arguments["slow"])] = min(seconds[bool(arguments["slow"])], *took)
        even = [timed for step in steps for timed in step if timed.rank != 2 and timed.each.kind == "forward"]
        lengths.append(float(np.median([timed.end - timed.start for timed in even])))
    for slow, each in zip((None, {2: 2}), seconds.values(), strict=True):
        if math.isinf(each):
            raise NotYet(f"`results` has no run with `slow={slow}`, to compare with.")
    shortest, longest = f"{1000 * min(lengths):.0f}", f"{1000 * max(lengths):.0f}"
    apart = f"`results` has runs in which a pass of the other ranks takes {shortest} and {longest} ms"
    refuse(max(lengths) > 1.2 * min(lengths), f"{apart}; compare runs with the same `pass_seconds`.")
    return seconds[True] / seconds[False]


@exercise
def tensor_parallel_mlp(answer: Callable[..., Any]) -> str:
    """`answer(dist, x, up, down)` is down(gelu(up(x))), of which each rank computes an N-th of the hidden units."""
    on_two_and_three_ranks(_mlp, answer)
    return (
        "on 2 and on 3 ranks Z and all gradients are those of one process; each rank computes its share of the hidden "
        "units, and sends no more than one all-reduce forward and one backward need."
    )


@exercise
def sequence_parallel_mlp(answer: Callable[..., Any]) -> str:
    """`answer(region, x, up, down)` is this rank's tokens of down(gelu(up(X))), where `x` is its tokens of X."""
    on_two_and_three_ranks(partial(_mlp, by_tokens=True), answer)
    return (
        "on 2 and on 3 ranks Z and all gradients are those of one process; a rank sends five halves of an all-reduce, "
        "and of X it keeps its own tokens only."
    )


def _mlp(dist: Any, answer: Callable[..., Any], where: str, by_tokens: bool = False) -> bool:
    """On a rank: `answer`, beside what one process computes; `by_tokens`, X and Z are cut along the sequence."""
    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    from workshop_utils.comm.over_torch import TorchCommunicator
    from workshop_utils.parallel.gpt import Kept
    from workshop_utils.parallel.tensor import Region

    torch.manual_seed(0)
    size, region = dist.get_world_size(), Region(TorchCommunicator(), sequence_parallel=True)
    hidden, here = HIDDEN[size], f"{where}, rank {dist.get_rank()}: "
    up, down = nn.Linear(WIDTH, hidden).double(), nn.Linear(hidden, WIDTH).double()
    x, gradient = torch.randn(2, 2, TOKENS, WIDTH, dtype=torch.float64)  # of 2 sequences
    units, tokens = region.own(hidden), region.own(TOKENS) if by_tokens else slice(None)
    reference, half = partial(_from_units, up, down, x), (size - 1) / size * x.nbytes  # of an all-reduce
    expected, right = reference(gradient, slice(None))
    part, of_units = reference(gradient, units)
    by_tanh, _ = reference(gradient, slice(None), approximate="tanh")
    only_own = torch.zeros_like(gradient)
    only_own[:, tokens] = gradient[:, tokens]
    _, of_tokens = reference(only_own, units)
    mine = x[:, tokens].clone().requires_grad_()
    kept, flops, stopped = Kept(nn.ModuleList([up, down])), FlopCounterMode(display=False), ""

    def copies() -> int:
        """How many tensors are X, also where autograd does not see them."""
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        return sum(each.numel() == x.numel() and each.flatten().equal(x.flatten()) for each in tensors)

    before = copies()
    with count_bytes(dist.barrier) as counted, flops:
        with kept:
            z = answer(region if by_tokens else dist, mine, up, down)
        held = kept.now + x.nbytes * (copies() - before)
        fits = isinstance(z, torch.Tensor) and z.shape == mine.shape
        if fits:
            try:  # x is used elsewhere, too, as around a residual connection
                (z + mine).backward(gradient[:, tokens])
            except RuntimeError as error:
                stopped = str(error).splitlines()[0]
    if is_missing(z):
        raise NotYet("your function gave nothing: write it, then run this again.")
    shape = tuple(z.shape) if isinstance(z, torch.Tensor) else f"a {type(z).__name__}"
    whose = "of this rank's tokens" if by_tokens else "on every rank"
    tensor = f"Z is a tensor of shape {tuple(mine.shape)}, {whose}"
    refuse(not fits, f"{here}your function gave {shape}; {tensor}.")

    def close(one: Any, other: Any) -> bool:
        return bool(torch.allclose(one, other, rtol=1e-9, atol=1e-9))

    if not close(z, expected[:, tokens]):
        slips = mistakes(__name__, "mlp").items()
        of = expected, part, by_tanh, down.bias, size
        explain(z.detach(), {words: slip(*of)[:, tokens].detach() for words, slip in slips}, where=here)
        others = any(close(z, each) for each in expected.split(z.shape[1], dim=1))
        refuse(others, f"{here}these are the tokens of another rank.")
        advice = "does each rank take the same hidden units of `up`, of its bias and of `down`?"
        raise Wrong(f"{here}Z is not that of one process; {advice}")

    sent = (region.communicator.traffic.bytes_sent.sum() if by_tokens else counted.sent) / half
    got = [gradient_of(each) for each in (mine, *up.parameters(), *down.parameters())]
    got[0] -= gradient[:, tokens]  # what came from elsewhere
    due = right[0][:, tokens], *right[1:]
    # Each rank has its units' gradients, of the second bias those of all tokens or, by tokens, of its own.
    sums = [got[0], *map(region.sum, got[1:])]
    if not by_tokens:
        sums[4] = got[4]
    many, share = int((got[1] != 0).any(dim=1).sum()), hidden // size
    times = flops.get_total_flops() / (3 * 4 * 2 * TOKENS * WIDTH * hidden / size)  # backward: twice forward
    slices = "slice the weights before you multiply, so that nothing is computed and then dropped"
    conjugate = "backward f must sum over all ranks, and g must not"
    enough = "four are enough, an all-reduce forward and one backward; gather nothing, only sum"
    if by_tokens:
        conjugate = "backward f scatters the sum of all ranks' gradients, and g gathers all tokens' gradients"
        enough = (
            "five are enough: a gather and a scattered sum forward, two gathers and a scattered sum backward"
        )
    outside = "f sums also what comes back to `x` from elsewhere: apply f, and leave `x` itself alone"
    bias_too_large, tokens_alone = close(got[4], size * due[4]), by_tokens and close(got[1], of_tokens[1])
    twice = "the gradient of `down.bias` is that of all tokens; leave this rank's part, which `finish_gradients` sums"
    refuse_any(
        here,
        {
            "`x` was changed; work on a copy.": not close(mine, x[:, tokens]),
            f"Z is right; the backward pass stops with {stopped}; {conjugate}.": stopped,
            f"{many} of {hidden} hidden units were computed here; a rank's share is {share}.": many > share,
            # By tokens the first product may be recomputed.
            f"this rank multiplies {times:.1f} times as much as its share; {slices}.": times
            > 1.05 + 0.2 * by_tokens,
            f"gradients are {size} times too large; {conjugate}.": close(sums[1], size * due[1]),
            f"the gradient of `x` is this rank's part only; {conjugate}.": close(
                got[0], of_units[0][:, tokens]
            ),
            f"{outside}.": close(got[0], due[0] + (size - 1) * gradient[:, tokens]),
            "gradients of weights are those of this rank's tokens only; gather X once more, and use all.": tokens_alone,
            f"the gradient of `down.bias` is {size} times too large: add the bias behind g.": bias_too_large,
            f"{twice}: training would sum twice.": by_tokens and close(got[4], due[4]),
        },
    )
    names = "x", "up.weight", "up.bias", "down.weight", "down.bias"
    judge_gradients(f"{here}Z is right, but ", dict(zip(names, zip(sums, due, strict=True), strict=True)))
    most = mine.nbytes + 2 * z.nbytes // WIDTH * hidden  # own X; the own hidden units of all tokens, twice
    is_kept = by_tokens and (held > most + x.nbytes // 4 or sent < 4.5)
    much, kept_x = sent > (4 + by_tokens) * MOST_BYTES, "X of all tokens is kept for the backward pass"
    refuse(much, f"{here}this rank sends {sent:.1f} halves of an all-reduce; {enough}.")
    refuse(is_kept, f"{here}{kept_x}; keep `x`, and gather it once more in the backward pass.")
    return True


def gradient_of(tensor: Any) -> Any:
    """A copy of what has reached `tensor`, zeros where nothing has."""
    return tensor.detach() * 0 if tensor.grad is None else tensor.grad.clone()


def judge_gradients(where: str, gradients: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise Wrong unless of each pair the first, which a learner's function gave, is the second, by what it is of."""
    for name, (got, due) in gradients.items():
        refuse(due.any() and not got.any(), f"{where}no gradient reaches `{name}`.")
        is_right = got.allclose(due, rtol=1e-9, atol=1e-9)
        refuse(not is_right, f"{where}the gradient of `{name}` is not that of one process.")


def _from_units(up: Any, down: Any, x: Any, gradient: Any, units: slice, **options: str) -> tuple[Any, Any]:
    """Z from some of the hidden units, and the gradients of x and of all parameters."""
    import torch
    from torch.nn.functional import gelu

    given = x.clone().requires_grad_()
    z = gelu(given @ up.weight[units].T + up.bias[units], **options) @ down.weight[:, units].T + down.bias
    return z, torch.autograd.grad(z, [given, *up.parameters(), *down.parameters()], gradient)


class _Stage:
    """A stage whose activations tell where they have been; it notes what it is called with."""

    def __init__(self, rank: int, ranks: int, shape: tuple[int, int]) -> None:
        self.rank, self.ranks, self.shape = rank, ranks, shape
        self.calls: list[tuple[str, int]] = []
        self.problem = ""
        self.held: dict[int, Any] = {}  # what each forward pass was given, as a real stage holds it

    def forward(self, microbatch: int, incoming: Any) -> Any:
        self.held[microbatch] = incoming
        return self._run("forward", microbatch, incoming, 1)

    def backward(self, microbatch: int, incoming: Any) -> Any:
        gradient = self._run("backward", microbatch, incoming, -1)
        held = self.held.pop(microbatch, None)
        if held is not None and not np.array_equal(held, self._values("forward", microbatch, self.rank - 1)):
            late = f"the activations of microbatch {microbatch} were overwritten before its backward pass"
            late = f"{late}; receive each message into a new array, since the stage keeps it"
            self.problem = self.problem or late
        return gradient

    def _run(self, kind: str, microbatch: int, incoming: Any, step: int) -> Any:
        self.calls.append((kind, microbatch))
        wrong = self._wrong(kind, microbatch, incoming, self.rank - step)
        self.problem = self.problem or (wrong and f"{kind} of microbatch {microbatch} was {wrong}")
        return self._values(kind, microbatch, self.rank) if 0 <= self.rank + step < self.ranks else None

    def _wrong(self, kind: str, microbatch: int, incoming: Any, source: int) -> str:
        what = "activations" if kind == "forward" else "gradient"
        if not 0 <= source < self.ranks:
            return "" if incoming is None else "given an array; here nothing comes in: give it None"
        if not isinstance(incoming, np.ndarray) or incoming.shape != self.shape:
            return f"not given an array of shape {self.shape}, the {what} from rank {source}"
        for other in (microbatch, *range(10)):
            if np.array_equal(incoming, self._values(kind, other, source)):
                return "" if other == microbatch else f"given the {what} of microbatch {other}"
        return f"given other values than the {what} that rank {source} has returned"

    def _values(self, kind: str, microbatch: int, rank: int) -> np.ndarray:
        sign = 1 if kind == "forward" else -1
        return np.full(self.shape, sign * (100 * rank + microbatch + 1), np.float32)


@exercise
def pipeline_messages(answer: Callable[..., Any]) -> str:
    """`answer(communicator, order, stage, shape)` runs the passes in `order`, and exchanges what they give."""
    for size, name, microbatches, shape in PIPELINES:
        where = f"on {number_of(size, 'rank')}, {name}, {microbatches} microbatches"
        passes = schedules.schedule_of(name, size, microbatches).passes
        orders = [[(str(each.kind), each.microbatch) for each in of_rank] for of_rank in passes]
        arguments = {"answer": answer, "orders": orders, "shape": shape}
        outcomes = values_on_ranks(where, size, _passes, arguments)
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


def _passes(
    communicator: Communicator, answer: Callable[..., Any], orders: list[Any], shape: tuple[int, int]
) -> tuple[Any, ...]:
    """Of a rank: the passes that were run, the arrays sent, what a pass was given wrongly, and which rank had left."""
    stage, left = _Stage(communicator.rank, communicator.size, shape), ""
    try:
        answer(communicator, orders[communicator.rank], stage, shape)
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
        idle = schedules.bubble(predicted(of, orders, microbatches)[1])
        for rank, passes in enumerate(orders):
            for kind in ("forward", "backward"):
                for before, after in pairwise(each.microbatch for each in passes if each.kind == kind):
                    reverse = f"{of}, rank {rank} runs {kind} of microbatch {before} before that of {after}"
                    refuse(before > after, f"{reverse}; keep the loader's order.")
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
    order = result_of(answer, rank, ranks, microbatches)
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


def predicted(
    of: str, orders: tuple[tuple[Pass, ...], ...], microbatches: int
) -> tuple[schedules.Schedule, schedules.Timeline]:
    """A learner's schedule, and how it runs; raises Wrong, which begins with `of`."""
    try:
        schedule = schedules.Schedule("yours", orders, microbatches)
        return schedule, schedules.predict(schedule, 1.0, 2.0)
    except schedules.ScheduleError as error:
        raise Wrong(f"{of}, {error}.") from None


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
    is_whole = isinstance(groups, Mapping) and set(groups) == set(sizes)
    refuse(not is_whole, f"{where} gives {groups!r}; {form}.")
    got: list[list[int]] = []
    for direction in sizes:
        named = f"{where} has the {direction} group {groups[direction]!r}"
        a_set = isinstance(groups[direction], set | frozenset)
        refuse(a_set, f"{named}; a set has no order, and a group needs one: give a list.")
        try:
            got.append([operator.index(each) for each in groups[direction]])
        except TypeError:
            raise Wrong(f"{named}; it must be a list of ranks, whole numbers as // gives them.") from None
    lengths, right = [*sizes.values()], _groups(rank, [*sizes.values()])
    if got == right:
        return
    shown = f"{where} has the groups {dict(zip(sizes, got, strict=True))}; "
    explain(got, mistakes(__name__, "mesh_groups", groups=_groups), rank, lengths, where=shown)
    for one, other in combinations(range(len(sizes)), 2):
        swapped = got[one] == right[other] != right[one] == got[other]
        refuse(swapped, f"{shown}{[*sizes][one]} and {[*sizes][other]} are exchanged.")
    for direction, group, due in zip(sizes, got, right, strict=True):
        order = "give it in ascending order, since a rank's place in it is its number there."
        alone = "all others in it differ from the rank in this direction alone"
        refuse_any(
            f"{where} has the {direction} group {group}; ",
            {
                "the rank itself must be in it.": sorted([*group, rank]) == due,
                f"it must have {number_of(len(due), 'rank')}.": len(group) != len(due),
                order: group != due == sorted(group),
                f"it must be {due}: {alone}.": group != due,
            },
        )


def _groups(rank: int, sizes: Sequence[int]) -> list[list[int]]:
    """By direction, the group of `rank`."""
    groups, stride = [], 1
    for size in sizes:
        first = rank - rank // stride % size * stride
        groups.append([*range(first, first + size * stride, stride)])
        stride *= size
    return groups
