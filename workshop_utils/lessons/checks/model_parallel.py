"""Checks of lesson 08, tensor and pipeline parallelism; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from numbers import Integral
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from workshop_utils.comm.communicator import Communicator, PeerDied
from workshop_utils.lessons.checks import NotYet, Wrong, exercise, is_missing, result_of
from workshop_utils.lessons.checks.open_question import OpenQuestion
from workshop_utils.lessons.checks.processes import values_on_ranks
from workshop_utils.parallel import schedule as schedules
from workshop_utils.parallel.schedule import Kind, Pass, Schedule, ScheduleError
from workshop_utils.training.tcp_bytes import count_bytes

Answer = Callable[[int, int, int], list[tuple[Kind, int]]]

WIDTH, HIDDEN, ROWS = 40, 96, 50
MOST_BYTES = 1.15  # of two all-reduces; headers are less than a tenth

slow_stage = OpenQuestion(
    "times",
    (1.2, 2.4),
    "rank 2 sets the pace. It works 8 × 6 slots, not 8 × 3; the first microbatch takes 2 slots to reach it, "
    "the last gradient 4 to go back, and once it waits a slot for rank 3: 55 slots instead of 33, 1.67 times, though "
    "only a quarter of the model became slower. It cannot be more than 2, which all ranks slowed alike would give; the "
    "more microbatches, the nearer. One measures rather less: delays make even stages slower, and vanish in the "
    "waiting of uneven ones. So cut stages to take equally long, not to have equally many blocks: embedding and head "
    "count, too.",
    predictable=(1, 4),
)


@exercise
def tensor_parallel_mlp(answer: Callable[..., Any]) -> str:
    """`answer(dist, x, up, down)` is down(gelu(up(x))), of which each rank computes an N-th of the hidden units."""
    for size in (2, 3):
        where = f"on {size} ranks"
        sentences = values_on_ranks(where, size, _mlp, {"answer": answer}, framework="torch", timeout="10s")
        if ... in sentences:
            raise NotYet("your function gave nothing: write it, then run this again.")
        for rank, sentence in enumerate(sentences):
            if sentence:
                raise Wrong(f"{where}, rank {rank}: {sentence}.")
    return (
        "on 2 and on 3 ranks Z and all gradients are those of one process; each rank computes its share of the hidden "
        "units, and sends no more than one all-reduce forward and one backward need."
    )


def _mlp(dist: Any, answer: Callable[..., Any]) -> str | EllipsisType:
    """On a rank: what is wrong with `answer`, "" if nothing, `...` if it gives nothing."""
    import torch
    from torch import nn
    from torch.nn.functional import gelu
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    up, down = nn.Linear(WIDTH, HIDDEN).double(), nn.Linear(HIDDEN, WIDTH).double()
    x, gradient = torch.randn(2, 2, ROWS // 2, WIDTH, dtype=torch.float64)  # of 2 sequences
    whole = x.clone().requires_grad_()
    expected = down(gelu(up(whole)))
    right = torch.autograd.grad(expected, [whole, up.weight, up.bias, down.weight, down.bias], gradient)
    own = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size)
    part = x.clone().requires_grad_()
    partial = gelu(part @ up.weight[own].T + up.bias[own]) @ down.weight[:, own].T
    (partial_gradient,) = torch.autograd.grad(partial, part, gradient)

    mine = x.clone().requires_grad_()
    flops = FlopCounterMode(display=False)
    with count_bytes(dist.barrier) as counted, _all_reduces(dist) as calls, flops:
        z = answer(dist, mine, up, down)
        forward = len(calls)
        if isinstance(z, torch.Tensor) and z.shape == expected.shape and z.requires_grad:
            z.backward(gradient)
    got = [
        torch.zeros_like(each) if each.grad is None else each.grad.clone()
        for each in (mine, up.weight, up.bias, down.weight, down.bias)
    ]
    units = int((got[1] != 0).any(dim=1).sum())
    for each in got[1:4]:  # cut, so that the ranks' parts add up
        dist.all_reduce(each)

    if is_missing(z):
        return ...
    if not isinstance(z, torch.Tensor) or z.shape != expected.shape:
        shape = tuple(z.shape) if isinstance(z, torch.Tensor) else repr(z)
        return f"your function gave {shape}; Z is a tensor of shape {tuple(expected.shape)} on every rank"

    def close(one: Any, other: Any) -> bool:
        return bool(torch.allclose(one, other, rtol=1e-9, atol=1e-9))

    bias, value = down.bias, z.detach()
    for wrong, sentence in (
        (partial, "Z is this rank's part only; g must sum the parts of all ranks"),
        (partial + bias, "Z is this rank's part only; g must sum the parts of all ranks"),
        (
            expected + (size - 1) * bias,
            "every rank adds the bias of `down` before the sum; add it once, behind g",
        ),
        (expected - bias, "the bias of `down` is missing in Z"),
        (
            size * expected,
            "every rank computes all of Z, and then they are summed; give each its share of the units",
        ),
        (
            down(gelu(up(x), approximate="tanh")),
            "GELU is approximated by tanh here; take it as it was imported",
        ),
    ):
        if close(value, wrong):
            return sentence
    if not close(value, expected):
        advice = "does each rank take the same hidden units of `up`, of its bias and of `down`?"
        return f"Z is not that of one process; {advice}"
    if not z.requires_grad:
        return "no gradient can go back from Z: it was made without autograd; use `Meet`"
    if not close(mine.detach(), x):
        return "`x` was changed; work on a copy"
    names = "x", "up.weight", "up.bias", "down.weight", "down.bias"
    if units > HIDDEN / size:
        return f"{units} of {HIDDEN} hidden units were computed here; a rank's share is {HIDDEN // size}"
    due = 3 * 4 * ROWS * WIDTH * HIDDEN / size  # of two layers; backward is twice forward
    if (multiplied := flops.get_total_flops() / due) > 1.05:
        slices = "slice the weights before you multiply, so that nothing is computed and then dropped"
        return f"this rank multiplies {multiplied:.1f} times as much as its share; {slices}"
    if close(got[1], size * right[1]):
        behind = "behind g every rank has the whole gradient already, so g does nothing backward"
        return f"gradients are {size} times too large: {behind}"
    if close(got[0], partial_gradient):
        return "the gradient of `x` is this rank's part only; f must sum it over all ranks, backward"
    if close(got[4], size * right[4]):
        return f"the gradient of `down.bias` is {size} times too large: add the bias behind g"
    for name, one, other in zip(names, got, right, strict=True):
        if not close(one, other):
            has = "is missing here" if not one.any() else "is not that of one process"
            return f"Z is right, but the gradient of `{name}` {has}"
    if forward > 1 or len(calls) - forward > 1:
        return f"{forward} all-reduces forward and {len(calls) - forward} backward; one and one are enough"
    nbytes = 2 * 2 * (size - 1) / size * x.nbytes
    if counted.sent > MOST_BYTES * nbytes:
        times = counted.sent / nbytes
        return f"this rank sends {times:.1f} times the bytes of two all-reduces; gather nothing, only sum"
    return ""


@contextlib.contextmanager
def _all_reduces(dist: Any) -> Iterator[list[Any]]:
    """The calls of `dist.all_reduce` while the block runs."""
    calls: list[Any] = []
    real = dist.all_reduce

    def all_reduce(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return real(*arguments, **options)

    dist.all_reduce = all_reduce
    try:
        yield calls
    finally:
        dist.all_reduce = real


class _Stage:
    """A stage whose activations tell where they have been; it notes what it is called with."""

    def __init__(self, rank: int, ranks: int, shape: tuple[int, ...]) -> None:
        self.rank, self.ranks, self.shape = rank, ranks, shape
        self.calls: list[tuple[str, int]] = []
        self.problem = ""
        self.held: dict[int, Any] = {}  # what each forward pass was given, as a real stage holds it

    def forward(self, microbatch: int, incoming: Any) -> Any:
        self._note("forward", microbatch, incoming, None if self.rank == 0 else self.rank - 1)
        self.held[microbatch] = incoming
        return None if self.rank == self.ranks - 1 else self._values("forward", microbatch, self.rank)

    def backward(self, microbatch: int, incoming: Any) -> Any:
        self._note("backward", microbatch, incoming, None if self.rank == self.ranks - 1 else self.rank + 1)
        held = self.held.pop(microbatch, None)
        given = self._values("forward", microbatch, self.rank - 1)
        if not self.problem and held is not None and not np.array_equal(held, given):
            late = f"the activations of microbatch {microbatch} were overwritten before its backward pass"
            self.problem = f"{late}; receive each message into a new array, since the stage keeps it"
        return None if self.rank == 0 else self._values("backward", microbatch, self.rank)

    def _values(self, kind: str, microbatch: int, rank: int) -> np.ndarray:
        sign = 1 if kind == "forward" else -1
        return np.full(self.shape, sign * (100 * rank + microbatch + 1), np.float32)

    def _note(self, kind: str, microbatch: int, incoming: Any, source: int | None) -> None:
        self.calls.append((kind, microbatch))
        if not self.problem:
            wrong = self._wrong(kind, microbatch, incoming, source)
            self.problem = f"{kind} of microbatch {microbatch} {wrong}" if wrong else ""

    def _wrong(self, kind: str, microbatch: int, incoming: Any, source: int | None) -> str:
        what = "activations" if kind == "forward" else "gradient"
        if source is None:
            return "" if incoming is None else "was given an array; here nothing comes in: give it None"
        if not isinstance(incoming, np.ndarray) or incoming.shape != self.shape:
            return f"was not given an array of shape {self.shape}, the {what} from rank {source}"
        if not np.array_equal(incoming, self._values(kind, microbatch, source)):
            for other in range(10):
                if np.array_equal(incoming, self._values(kind, other, source)):
                    return f"was given the {what} of microbatch {other}"
            return f"was given other values than the {what} that rank {source} has returned"
        return ""


@exercise
def pipeline_messages(answer: Callable[..., Any]) -> str:
    """`answer(communicator, order, stage, shape)` runs the passes in `order`, and exchanges what they give."""
    for size, name, microbatches in ((2, "gpipe", 7), (4, "one_f_one_b", 5), (1, "gpipe", 2)):
        where = f"on {size} rank{'s' * (size > 1)}, {name}, {microbatches} microbatches"
        arguments = {"answer": answer, "name": name, "microbatches": microbatches}
        outcomes = values_on_ranks(where, size, _passes, arguments, timeout="12s")
        if not any(each.calls for each in outcomes):
            raise NotYet("no pass was run: write the function, then run this again.")
        # What a rank was given says more than that a neighbour has left, which may be its consequence.
        for problems in ([each.problem for each in outcomes], [each.left for each in outcomes]):
            for rank, problem in enumerate(problems):
                if problem:
                    raise Wrong(f"{where}, rank {rank}: {problem}.")
        for rank, (calls, order, messages, *_) in enumerate(outcomes):
            if calls != order:
                raise Wrong(f"{where}, rank {rank} runs {_short(calls)}; its order is {_short(order)}.")
            due = microbatches * ((rank > 0) + (rank < size - 1))
            if messages != due:
                raise Wrong(f"{where}, rank {rank} sends {messages} arrays; it must send {due}.")
    return (
        "between real processes each pass was given what its neighbour had returned, by one message a microbatch, "
        "boundary and direction. (These messages fit into the sockets' buffers. Larger ones block two neighbours that "
        "both send first; there Megatron-LM and `parallel.pipeline` send and receive at once.)"
    )


def _short(calls: list[tuple[str, int]]) -> str:
    return " ".join(f"{kind[0].upper()}{number}" for kind, number in calls)


class _Outcome(NamedTuple):
    """Of a rank: the passes that were run, those that are due, the arrays sent, and what went wrong first."""

    calls: list[tuple[str, int]]
    order: list[tuple[str, int]]
    messages: int
    problem: str  # with what a pass was given
    left: str  # which rank had, while this one still waited for it


def _passes(communicator: Communicator, answer: Callable[..., Any], name: str, microbatches: int) -> _Outcome:
    passes = schedules.schedule_of(name, communicator.size, microbatches).passes[communicator.rank]
    order = [(str(each.kind), each.microbatch) for each in passes]
    stage = _Stage(communicator.rank, communicator.size, (2, 3))
    left = ""
    try:
        answer(communicator, list(order), stage, stage.shape)
    except PeerDied as error:
        left = str(error)
    arrays = int(communicator.traffic.bytes_sent.sum()) // 24  # 2 × 3 float32; a barrier sends a byte or two
    return _Outcome(stage.calls, order, arrays, stage.problem, left)


@exercise
def one_f_one_b(answer: Answer) -> str:
    """`answer(rank, ranks, microbatches)` is the order of passes of 1F1B on a rank: ("forward", 0), and so on."""
    larger = secrets.randbelow(6) + 8
    for ranks, microbatches in ((2, 4), (4, 8), (3, 2), (4, 5), (6, 12), (1, 2), (larger, larger + 3)):
        of = f"with {ranks} ranks and {microbatches} microbatches"
        try:
            schedule = _schedule(answer, ranks, microbatches)
            idle = schedules.bubble(schedules.predict(schedule, 1.0, 2.0))
        except ScheduleError as error:
            raise Wrong(f"{of}, {error}.") from None
        yours = _name_of(schedule)
        formula = schedules.bubble_fraction(ranks, microbatches)
        if idle > formula + 1e-9:
            least = f"1F1B waits {100 * formula:.0f} %{yours}"
            raise Wrong(f"{of}, ranks wait {100 * idle:.0f} % of the time; {least}.")
        for rank, passes in enumerate(schedule.passes):
            most, kept = min(microbatches, ranks - rank), schedules.held(passes)
            if kept > most:
                text = f"rank {rank} holds the activations of {kept} microbatches at once; {most} would do"
                early = f"begin with backward as soon as you can{yours}"
                raise Wrong(f"{of}, ranks wait no longer than they must, but {text}: {early}.")
    return "as short as GPipe, and no rank holds more microbatches than there are ranks from it to the last."


def _name_of(schedule: Schedule) -> str:
    """The name of `schedule`, if it is one that the lesson has shown."""
    for name, words in (("naive", "the naive schedule"), ("gpipe", "GPipe")):
        if schedule.passes == schedules.schedule_of(name, schedule.ranks, schedule.microbatches).passes:
            return f" (what you have written is {words})"
    return ""


def _schedule(answer: Answer, ranks: int, microbatches: int) -> Schedule:
    orders = [result_of(_listed, answer, rank, ranks, microbatches) for rank in range(ranks)]
    passes = []
    for rank, order in enumerate(orders):
        of = f"rank {rank} of {ranks} with {microbatches} microbatches"
        if not isinstance(order, (list, tuple)):
            raise Wrong(f"{of} has {order!r}; it must be a list of passes, such as [('forward', 0)].")
        kinds = ("forward", "backward")
        for step, each in enumerate(order):
            pair = isinstance(each, (tuple, list)) and len(each) == 2
            if not (pair and each[0] in kinds and isinstance(each[1], Integral)):
                form = "each pass must look like ('forward', 0) or ('backward', 0)"
                raise Wrong(f"{of} has {each!r} as its pass {step}; {form}.")
        for kind in kinds:
            numbers = [number for name, number in order if name == kind]
            runs = f"{of} runs {kind} of microbatches {numbers}"
            if missing := sorted(set(range(microbatches)) - set(numbers)):
                raise Wrong(f"{runs}; each from 0 on must come exactly once: {missing} never come.")
            if repeated := sorted({number for number in numbers if numbers.count(number) > 1}):
                raise Wrong(f"{runs}; each from 0 on must come exactly once: {repeated} come more often.")
            if others := [number for number in numbers if number not in range(microbatches)]:
                raise Wrong(f"{runs}; there are only {microbatches}, from 0 on, so {others} are too many.")
        passes.append(tuple(Pass(kind, number, rank) for kind, number in order))
    return Schedule("yours", tuple(passes), microbatches)


def _listed(answer: Answer, *arguments: int) -> Any:
    """What `answer` returns; of a generator, all that it yields."""
    order = answer(*arguments)
    return list(order) if isinstance(order, Iterator) else order
