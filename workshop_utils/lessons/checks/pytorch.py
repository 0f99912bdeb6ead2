"""Checks of lesson 07, PyTorch; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

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
from workshop_utils.lessons.checks.collectives import Work, agreed, judge_works, noted, tracer
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.lessons.checks.processes import on_two_and_three_ranks, values_on_ranks
from workshop_utils.network import availability
from workshop_utils.network.devices import EmulatedDevice
from workshop_utils.ranks.results import Results
from workshop_utils.training.tcp_bytes import count_bytes

# Data parallelism from hooks: ranks, and the parts of a rank's batch.
TRIALS = ((2, 3), (3, 1))
EARLY = 1 / 3  # of all numbers are on their way before the last gradient comes; two equal buckets are enough
SHARE = 1.5  # of an N-th of the optimizer's state: whole parameters cannot be dealt out evenly
# Sent by a sharded optimizer, with headers and padding; an all-reduce takes 2, three broadcasts 3.
PASSES = 1.75
WIDTHS = (48, 64, 64, 48)
NUMBERS = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(WIDTHS))
STEPS = 3
# Rows and columns of a sharded unit's weight. N divides no rows, and the last of three ranks has none of four.
UNITS = ((25, 30), (31, 25), (4, 31))
# Of parameters whose gradients are clipped. Of few rows, the last ranks have none.
SHARDED, REPLICATED = ((7, 3), (4, 2), (1, 5)), ((3,), (2, 2))
# Norm of the gradient, and what it is clipped to.
CLIPS = ((5.0, 2.0), (5.0, 8.0), (0.0, 2.0))
# The last rank's shards and replicated gradients are this many times as large: their norm exceeds no `max_norm`.
FAINT = 0.1
TOKENS = 32  # of the open question on prefetch
PARTS, PART_SECONDS = 4, 0.15  # of the batch in the open question on no_sync; the device's for each part


@measured
def no_sync_gain(results: Any) -> float:
    """How many times as long a step of four parts takes that sends after each as one that sends once.

    `results` are runs of `ddp_steps`; of each kind the fastest step counts, as long as its slowest rank takes.
    """
    gradients = 4 * 12 * (256 + 1) * 256  # bytes
    right = {"width": 256, "parts": PARTS, "bucket_bytes": 600_000}
    seconds = {1: math.inf, PARTS: math.inf}  # by how often a step sends
    for run in _runs(results, "ddp_steps", "150ms", "100Mbit", right):
        for ranks in zip(*run.values, strict=True):
            sent = sum(nbytes for *_, nbytes in ranks[0][-1])
            expected = f"a step sends {gradients:,} bytes, or {PARTS} times as many"
            refuse(sent not in (gradients, PARTS * gradients), f"{expected}; `results` has one of {sent:,}.")
            times = sent // gradients
            seconds[times] = min(seconds[times], max(end - start for start, _, _, end, _ in ranks))
    for times, each in seconds.items():
        if math.isinf(each):
            raise NotYet(f"`results` has no run with `no_sync={times == 1}`, to compare with.")
    return _ratio(seconds[PARTS], seconds[1], PARTS * PART_SECONDS)


@measured
def prefetch_gain(results: Any) -> float:
    """How many times as long a step takes without prefetch as with it, of 32 tokens and layers 512 wide.

    `results` are runs of `unit_steps`, whose ranks return by tokens and prefetch the seconds of each step and its
    pieces; of each kind the fastest step counts, as long as its slowest rank takes.
    """
    right = {"units": 5, "width": 512}
    seconds = {False: math.inf, True: math.inf}  # by whether it prefetches
    for run in _runs(results, "unit_steps", "600ms", "100Mbit", right, units=5, width=384):
        tokens = sorted({batch for batch, _ in run.values[0]})
        refuse(tokens[-1:] != [TOKENS], f"`tokens` are {listed(tokens)}; the largest must be {TOKENS}.")
        for prefetch in seconds:
            steps = zip(*(rank[TOKENS, prefetch] for rank in run.values), strict=True)
            seconds[prefetch] = min(seconds[prefetch], *(max(each for each, _ in step) for step in steps))
    return _ratio(seconds[False], seconds[True], 0.6)


def _runs(
    results: Any, program: str, device: str, network: str, right: Mapping[str, Any], **defaults: Any
) -> list[Results]:
    """The runs of `program` on three devices with the arguments `right`; at full speed where no link can be slow."""
    links = (network, None) if availability() == "none" else network
    runs, wanted = runs_of(results, program, 3, links), str(EmulatedDevice(seconds=device))
    for run in runs:
        over = f"a run on {run.device or 'no emulated device'}"
        refuse(run.device != wanted, f"`results` has {over}; it must be on {wanted}.")
        for name, value in right.items():
            given = {**defaults, **run.arguments}.get(name, "not given")
            refuse(given != value, f"`{name}` is {given}; it must be {value}.")
    return runs


def _ratio(longer: float, shorter: float, least: float) -> float:
    """Of two steps' seconds. Raises Wrong where one is shorter than `least`, its device's."""
    short = f"`results` has a step of {min(longer, shorter):.2f} s; its device alone needs {least:.2f} s"
    refuse(not min(longer, shorter) > 0.95 * least, f"{short}.")
    return longer / shorter


@exercise
def overlapped_gradients(answer: Callable[..., None]) -> str:
    """`answer(dist, parameters, losses)` leaves the mean gradient of all ranks and losses, sent as gradients come."""
    for size, parts in TRIALS:
        where = f"on {size} ranks, {number_of(parts, 'loss', 'es')} each"
        arguments = {"answer": answer, "parts": parts, "where": where}
        values_on_ranks(where, size, _take_steps, arguments, framework="torch")
    return (
        "on 2 and on 3 ranks gradients are those of one process, sent once a step, during the backward pass."
    )


def _take_steps(dist: Any, answer: Callable[..., None], parts: int, where: str) -> bool:
    """On a rank: two steps of `answer`, each beside what one process computes."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    size, widths = dist.get_world_size(), itertools.pairwise((6, 8, 8, 8, 8, 3))
    module = nn.Sequential(*[nn.Sequential(nn.Linear(*each), nn.Tanh()) for each in widths]).double()
    parameters = list(module.parameters())
    for step, batch in enumerate(torch.randn(2, size, parts, 4, 6, dtype=torch.float64)):
        here = where + ", second step" * step
        mine = batch[dist.get_rank()]
        expected = torch.autograd.grad(module(batch).square().mean(), parameters)
        own = torch.autograd.grad(module(mine).square().mean(), parameters)
        module.zero_grad()
        with agreed(dist):
            losses = [lambda part=part: module(part).square().mean() for part in mine]
            _Backward(dist, parameters, here).judge(answer, losses)
            new = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            got, right, alone = (
                torch.cat([each.flatten() for each in some]) for some in (new, expected, own)
            )
            _compare(f"{here}: gradients are ", got, right, _mistaken(right, alone, size, parts))
            hooks = sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in parameters)
            refuse(hooks, f"{here}: {hooks} hooks are left, and would act in the next step; remove them.")
    return True


def _mistaken(right: Any, own: Any, size: int, parts: int) -> dict[str, Any]:
    """Wrong mean gradients, by a sentence on each; `own` is that of a rank alone."""
    once = "divide by the number of ranks"
    itself = "still the rank's own; send `parameter.grad` itself, not a copy."
    return {
        f"the ranks' sum; {once}.": right * size,
        "divided by the number of ranks twice.": right / size,
        "too large by the number of parts; divide each loss by it.": right * parts,
        f"a sum of sums; {once}, and each loss by the number of parts.": right * size * parts,
        "divided by the number of parts twice.": right / parts,
        f"too small; {once} once, and each loss by the number of parts once.": right / size / parts,
        itself: own,
        f"divided, but {itself}": own / size,
    }


class _Backward:
    """What a learner's function does in the backward passes of one step, on one rank."""

    def __init__(self, dist: Any, parameters: list[Any], where: str) -> None:
        self._dist, self._parameters, self._where = dist, parameters, where
        self._works: list[Work] = []
        self._is_running = False
        self._passes = self._came = 0  # backward passes, gradients in the last of them
        self._computed = self._held = 0  # losses; the most of them that had no pass yet
        self._first = math.inf  # the pass in which sending begins
        # Numbers sent: all, those sent during a pass, those sent before its last gradient; waits before that.
        self._sent = self._during = self._early = self._standstills = 0

    def judge(self, answer: Callable[..., None], losses: list[Any]) -> None:
        import torch

        real = torch.autograd.backward

        def computed(loss: Callable[[], Any]) -> Any:
            self._computed += 1
            self._held = max(self._held, self._computed - self._passes)
            return loss()

        def backward(*arguments: Any, **options: Any) -> None:
            self._passes, self._came, self._is_running = self._passes + 1, 0, True
            real(*arguments, **options)
            self._is_running = False

        hooks = [each.register_post_accumulate_grad_hook(self._comes) for each in self._parameters]
        with (
            noted(self._dist, self._works, self._begins, self._waits),
            mock.patch.object(torch.autograd, "backward", backward),
        ):
            answer(self._dist, list(self._parameters), [partial(computed, loss) for loss in losses])
        for hook in hooks:
            hook.remove()
        self._judge(self._where, len(losses))
        judge_works(self._works, self._where)

    def _comes(self, _: Any) -> None:
        self._came += 1

    def _begins(self, name: str, given: dict[str, Any]) -> None:
        if name == "all_reduce":
            numbers = given["tensor"].numel()
            self._first = min(self._first, self._passes)
            self._sent += numbers
            self._during += numbers * self._is_running
            self._early += numbers * self._can_overlap()

    def _waits(self) -> None:
        self._standstills += self._can_overlap()

    def _can_overlap(self) -> bool:
        return self._is_running and self._came < len(self._parameters)

    def _judge(self, where: str, parts: int) -> None:
        passes, sent, early = self._passes, self._sent, self._early
        if not passes and not sent:
            raise NotYet("no backward pass was made: write the function, then run this again.")
        whole = sum(each.numel() for each in self._parameters)
        one_each = "make one for each loss, before the next, so that only one part's activations are held"
        refuse(passes != parts, f"{where}: {number_of(passes, 'backward pass', 'es')}; {one_each}.")
        refuse(self._held > 1, f"{where}: {self._held} losses await their backward passes; {one_each}.")
        refuse(not sent, f"{where}: `dist.all_reduce` was never called, so every rank has its own gradients.")
        last = "send only in the last backward pass, when `.grad` has the sum of all parts"
        refuse(self._first < parts, f"{where}: gradients are sent before the last of {parts} passes; {last}.")
        refuse(sent != whole, f"{where}: {sent} numbers are sent; the gradients have {whole}, sent once.")
        after = "no overlap: all is sent after the backward pass; send from the hooks"
        refuse(not self._during, f"{where}: {after}.")
        later = "pass `async_op=True`, and wait after the pass"
        stands = f"no overlap: the backward pass stands still until an all-reduce is done; {later}"
        refuse(self._standstills, f"{where}: {stands}.")
        before = f"only {early} of {whole} numbers are sent before the last gradient comes"
        refuse(early < EARLY * whole, f"{where}: little overlap: {before}; send each when it comes.")


@exercise
def sharded_optimizer(answer: Callable[..., Any]) -> str:
    """`answer(dist, parameters, make_optimizer)` returns `step`: own parameters are updated, then all are shared."""
    on_two_and_three_ranks(_shard, answer)
    return (
        "on 2 and on 3 ranks all parameters are those of one process's Adam, of whose state no rank keeps more than "
        f"{SHARE} N-ths."
    )


def _shard(dist: Any, answer: Callable[..., Any], where: str) -> bool:
    """On a rank: three steps of `answer`, beside one process's optimizer.

    Gradients are the mean already.
    """
    import torch
    from torch import nn
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.manual_seed(0)
    size, rank = dist.get_world_size(), dist.get_rank()
    parameters = [p for widths in itertools.pairwise(WIDTHS) for p in nn.Linear(*widths).parameters()]
    alone = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    starts = [parameter.detach().clone() for parameter in alone]
    made: set[Any] = set()

    def make_optimizer(own: Any) -> Any:
        made.add(optimizer := torch.optim.Adam(own, lr=0.01))
        return optimizer

    reference = torch.optim.Adam(alone, lr=0.01)
    step = result_of(answer, dist, list(parameters), make_optimizer)
    refuse(not callable(step), f"your function returned {step!r}; it must return a function `step`.")
    # By step: how many optimizers there are, and which parameters one process has otherwise.
    optimizers, wrong = [], []
    for _ in range(STEPS):
        behind = [parameter.detach().clone() for parameter in alone]
        for parameter, copy in zip(parameters, alone, strict=True):
            copy.grad = torch.randn_like(copy)
            parameter.grad = copy.grad.clone()
        reference.step()
        works: list[Work] = []
        # Those that step count too, whoever made them.
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: made.add(optimizer))
        with agreed(dist):
            with count_bytes(dist.barrier) as counted, noted(dist, works):
                step()
            hook.remove()
            judge_works(works, f"{where}, rank {rank}")
        optimizers.append(len(made))
        pairs = enumerate(zip(parameters, alone, strict=True))
        wrong.append([at for at, (mine, right) in pairs if not torch.allclose(mine, right, atol=1e-6)])
    numbers = sum(each.numel() for one in made for group in one.param_groups for each in group["params"])
    ranks: list[Any] = [None] * size
    dist.all_gather_object(ranks, (numbers, counted.sent))
    new = "`step` makes a new optimizer, which forgets Adam's moments; make it once, before"
    refuse(optimizers[-1] > optimizers[0], f"{where}: {new}.")
    _judge_owners([kept for kept, _ in ranks], rank, where)
    unmoved = {at for at, start in enumerate(starts) if parameters[at].equal(start)}
    over = "no parameter changes: a rank that is not the owner overwrites the update"
    refuse(len(unmoved) == len(parameters), f"{where}: {over}.")
    if any(wrong):
        number, which = next((number, each[0]) for number, each in enumerate(wrong) if each)
        last = {which, *wrong[-1]}
        stale = {at for at, old in enumerate(behind) if torch.allclose(parameters[at], old, atol=1e-6)}
        sentences = {
            "as at the start: its owner updates it, and must send it to the others.": last <= unmoved,
            "one step behind: update first, then send.": last <= stale,
            "not as one process has it; does every rank receive from its owner?": True,
        }
        refuse_any(f"{where}, step {number + 1}, rank {rank}: parameter {which} is ", sentences)
    times = sum(sent for _, sent in ranks) / (4 * NUMBERS * (size - 1))
    few = "a rank must receive the others' parameters from their owners"
    refuse(times < 0.9, f"{where}: only {times:.2f} of the bytes that are needed are sent; {few}.")
    refuse(times > PASSES, f"{where}: {times:.1f} times as many bytes as needed are sent; send each once.")
    return True


def _judge_owners(kept: list[int], rank: int, where: str) -> None:
    """Judge how many numbers each rank's optimizer updates."""
    size, mine, together = len(kept), kept[rank], sum(kept)
    refuse(not together, f"{where}: `make_optimizer` was never called, so nothing is updated.")
    all_kept = f"rank {rank} keeps state for all parameters; give its one optimizer only its own"
    refuse(mine >= NUMBERS, f"{where}: {all_kept}.")
    lost = f"of {NUMBERS} numbers only {together} belong to a rank; every parameter needs an owner"
    refuse(together < NUMBERS, f"{where}: {lost}.")
    padding = size * 2 * (len(WIDTHS) - 1)
    twice = f"the ranks' optimizers update {together} numbers, of {NUMBERS}; give each parameter one owner"
    refuse(together > NUMBERS + padding, f"{where}: {twice}.")
    keeps = f"rank {rank} keeps {mine} of {NUMBERS} numbers, more than {SHARE} / N"
    deal = "deal out numbers, not parameters: weights are larger than biases"
    refuse(mine > SHARE * NUMBERS / size, f"{where}: {keeps}; {deal}.")


@exercise
def sharded_unit(answer: Any) -> str:
    """`answer.apply(dist, rows, shard, inputs)` is a linear layer whose weight is whole in its passes alone."""
    on_two_and_three_ranks(_train_units, getattr(answer, "apply", answer))
    return (
        "on 2 and on 3 ranks three units train as on one process, each by two all-gathers and one reduce-scatter a "
        "step, and no rank keeps a whole weight between the passes."
    )


def _train_units(dist: Any, answer: Callable[..., Any], where: str) -> bool:
    """On a rank: two steps of three units in a row, each beside what one process computes."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    size, rank = dist.get_world_size(), dist.get_rank()
    weights = [torch.randn(*shape, dtype=torch.float64) for shape in UNITS]
    shards = [nn.Parameter(_padded_shards(weight, size)[rank]) for weight in weights]
    for step, batch in enumerate(torch.randn(2, size, 3, UNITS[0][1], dtype=torch.float64), 1):
        # Of all ranks: a unit's inputs, and gradients with respect to its outputs.
        inputs, gradients = [batch], [torch.randn(size, 3, UNITS[-1][0], dtype=torch.float64)]
        for weight in weights:
            inputs.append(inputs[-1] @ weight.T)
        for weight in reversed(weights):
            gradients.insert(0, gradients[0] @ weight)
        units = [
            _Unit(f"{where}, step {step}, rank {rank}, unit {number}", dist, len(weight), shard, given[rank])
            for number, (weight, shard, given) in enumerate(zip(weights, shards, inputs, strict=False), 1)
        ]
        for unit, expected in zip(units, inputs[1:], strict=True):
            with agreed(dist):
                unit.pass_forward(answer, expected[rank])
        for at in reversed(range(len(units))):
            by_rank = gradients[at + 1].mT @ inputs[at]
            with agreed(dist):
                units[at].pass_backward(gradients[at + 1][rank], gradients[at], by_rank)
            weights[at] -= 0.1 * by_rank.mean(0)
            shards[at].data = _padded_shards(weights[at], size)[rank]
    return True


def _padded_shards(weight: Any, size: int) -> list[Any]:
    """As `_shards`, but all equally long; what is missing for that are zeros."""
    from torch.nn.functional import pad

    return _shards(pad(weight, (0, 0, 0, -len(weight) % size)), size)


def _shards(whole: Any, size: int) -> list[Any]:
    """The rows of `whole`, cut for N ranks as `fully_shard` cuts them: the last may have fewer, or none."""
    rows = -(-len(whole) // size)
    return [whole[rows * rank : rows * (rank + 1)].clone() for rank in range(size)]


class _Unit:
    """One unit in one step of one rank, and what the learner's two passes do."""

    def __init__(self, where: str, dist: Any, rows: int, shard: Any, inputs: Any) -> None:
        self._where, self._dist, self._rows, self._shard = where, dist, rows, shard
        self._size, self._rank = dist.get_world_size(), dist.get_rank()
        self._inputs = inputs.clone().requires_grad_()
        self._outputs: Any = None

    def pass_forward(self, answer: Callable[..., Any], expected: Any) -> None:
        """Judge the forward pass; `expected` is what it gives on one process."""
        where = f"{self._where}, forward pass"
        with self._watched_pass(where, 1):
            outputs = result_of(answer, self._dist, self._rows, self._shard, self._inputs)
            gives = f"{where}: it gives a {type(outputs).__name__}, not a tensor"
            refuse(not hasattr(outputs, "grad_fn"), f"{gives}.")
            self._outputs = outputs
            del outputs
        columns, right = self._outputs.shape[-1], expected.shape[-1]
        rest = "cut off the padding" if columns > right else "gather the other ranks' rows"
        refuse(columns != right, f"{where}: outputs have {columns} columns, not {right}; {rest}.")
        _compare(f"{where}: outputs are ", self._outputs, expected, {})
        refuse(not self._outputs.requires_grad, f"{where}: outputs know of no backward pass.")

    def pass_backward(self, gradient: Any, of_inputs: Any, of_weight: Any) -> None:
        """Judge the backward pass from the outputs' `gradient`; what it must give stands there by ranks."""
        import torch

        where, size, rank = f"{self._where}, backward pass", self._size, self._rank
        with self._watched_pass(where, 2):
            try:
                leaves = self._shard, self._inputs
                shard, inputs = torch.autograd.grad(self._outputs, leaves, gradient, allow_unused=True)
            except RuntimeError as error:
                each = "one for each argument of `forward`: None, None, the shard's and the inputs'"
                refuse("incorrect number" in str(error), f"{where}: return four gradients, {each}.")
                shapes = [tuple(leaf.shape) for leaf in leaves]
                own = f"that of `shard` must have its shape {shapes[0]}, that of `inputs` {shapes[1]}"
                refuse("invalid gradient" in str(error), f"{where}: a gradient has the wrong shape; {own}.")
                raise
            self._outputs = None
        refuse(shard is None, f"{where}: the shard's gradient is missing; return it third.")
        refuse(inputs is None, f"{where}: the inputs' gradient is missing; the unit before needs it.")
        padding = max(0, self._rows - rank * len(shard))  # begins there
        refuse(shard[padding:].any(), f"{where}: the padding's gradient is not 0, and a norm counts it.")
        means, own = _padded_shards(of_weight.mean(0), size), _padded_shards(of_weight[rank], size)[rank]
        wrong = {
            "the ranks' sum; divide by the number of ranks.": means[rank] * size,
            "divided by the number of ranks twice.": means[rank] / size,
            "of this rank's batch alone; reduce them.": own,
            "of this rank's batch alone, divided; reduce them.": own / size,
        }
        wrong |= {f"those of rank {other}'s rows.": mean for other, mean in enumerate(means) if other != rank}
        _compare(f"{where}: the shard's gradients are ", shard, means[rank], wrong)
        nobody = "the inputs are this rank's alone."
        wrong = {
            f"divided by the number of ranks; {nobody}": of_inputs[rank] / size,
            f"the ranks' sum; {nobody}": of_inputs.sum(0),
            f"the ranks' mean; {nobody}": of_inputs.mean(0),
        }
        _compare(f"{where}: the inputs' gradients are ", inputs, of_inputs[rank], wrong)

    def _begins(self, name: str, given: dict[str, Any]) -> None:
        if name == "reduce_scatter":
            shape, parts = given["output"].shape, [tuple(part.shape) for part in given["input_list"]]
            other = f"`reduce_scatter` has parts of shapes {listed(parts)}"
            same = f"each must have its output's, {tuple(shape)}; pad first"
            refuse({*parts} != {shape}, f"{self._where}, backward pass: {other}; {same}.")

    @contextlib.contextmanager
    def _watched_pass(self, where: str, passes: int) -> Iterator[None]:
        """Judge what is sent in the block, in passes of a whole weight, and what is left in memory."""
        works: list[Work] = []
        with tracer() as traced, noted(self._dist, works, self._begins):
            yield
        judge_works(works, where)
        reduced = [each.nbytes for each in traced.messages if each.name in ("allreduce_", "all_reduce")]
        alone = "the inputs are this rank's alone, and so is their gradient"
        refuse(self._inputs.nbytes in reduced, f"{where}: the inputs' gradient is all-reduced; {alone}.")
        two = "an all-reduce gives every rank the whole by two passes; a reduce-scatter gives it its rows by one"
        refuse(reduced, f"{where}: {two}.")
        # Of N parts, N − 1 are sent; a collective has all N.
        whole = {"send": self._size / (self._size - 1)}
        sent = sum(each.nbytes * whole.get(each.name, 1) for each in traced.messages)
        sent /= self._size * self._shard.nbytes
        times = f"{sent:.2g} times the weight's bytes go around" if sent else "nothing is sent"
        needs = ("one all-gather", "one all-gather, and one reduce-scatter of the gradient")[passes - 1]
        refuse(not passes - 0.2 < sent < passes + 0.3, f"{where}: {times}; it needs {needs}.")
        given = 0 if self._outputs is None else self._outputs.numel()
        few = self._shard.numel() + self._inputs.numel()
        held = traced.held(given + few) - given
        much = f"it still holds {held} numbers that it has made, more than the {few} of shard and inputs"
        refuse(held > few, f"{where}: {much}; let go of the whole weight.")


def _compare(what: str, got: Any, expected: Any, wrong: dict[str, Any]) -> None:
    """Raise Wrong unless tensors are equal up to rounding, if possible with the sentence of a `wrong` value."""
    if got.shape == expected.shape and bool(((got - expected).abs() < 1e-9).all()):
        return
    explain(got.detach(), wrong, where=what)
    off = int((~((got - expected).abs() < 1e-9)).sum()) if got.shape == expected.shape else "all"
    raise Wrong(f"{what}not those of one process: {off} of {expected.numel()} are wrong.")


@exercise
def clipped_norm(answer: Callable[..., Any]) -> str:
    """`answer(dist, sharded, replicated, max_norm)` clips all `.grad` as one process does, and returns their norm."""
    on_two_and_three_ranks(_clip, answer)
    return "on 2 and on 3 ranks every gradient is clipped as on one process, by one message from each."


def _clip(dist: Any, answer: Callable[..., Any], where: str) -> bool:
    """On a rank: gradients with a large norm, with a small one, and of zeros."""
    import torch
    from torch import nn

    size, rank = dist.get_world_size(), dist.get_rank()
    for norm, max_norm in CLIPS:
        torch.manual_seed(0)
        whole = [torch.randn(*shape, dtype=torch.float64) for shape in SHARDED + REPLICATED]
        for at, each in enumerate(whole):
            each[-(-len(each) // size) * (size - 1) * (at < len(SHARDED)) :] *= FAINT
        now = math.sqrt(_squares(whole))
        whole = [each * norm / now for each in whole]
        ranks = list(zip(*(_shards(each, size) for each in whole[: len(SHARDED)]), strict=True))
        gradients = [*ranks[rank], *whole[len(SHARDED) :]]
        parameters = [nn.Parameter(torch.ones_like(each)) for each in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        here = f"{where}, rank {rank}, with norm {norm:g} and max_norm {max_norm:g}"
        works: list[Work] = []
        with agreed(dist):
            with tracer() as traced, noted(dist, works):
                got = answer(dist, parameters[: len(SHARDED)], parameters[len(SHARDED) :], max_norm)
            judge_works(works, here)
            new = [parameter.grad for parameter in parameters]
            is_same = all(
                mine is not None and mine.equal(old) for mine, old in zip(new, gradients, strict=True)
            )
            if is_missing(got) and is_same and not traced.messages:
                raise NotYet("your function gave nothing: write it, then run this again.")
            refuse(is_missing(got), f"{here}: nothing is returned; return the norm before clipping.")
            alone = "nothing is sent, and no rank can know the whole gradient's norm alone"
            refuse(not traced.messages, f"{here}: {alone}; add up the squares of all ranks.")
            squares = np.array([_squares(each) for each in ranks])
            _judge_norm(got, norm, (squares, rank, _squares(whole[len(SHARDED) :]), max_norm), here)
            count, nbytes = len(traced.messages), sum(each.nbytes for each in traced.messages)
            up = "add up the squares of all parameters first; an all-reduce of one number does it"
            refuse(count > 1, f"{here}: {count} collectives; {up}.")
            refuse(nbytes > 8 * size * len(parameters), f"{here}: {nbytes} bytes are sent; {up}.")
            _judge_clipped(new, gradients, min(1.0, max_norm / norm) if norm else 1.0, here)
            changed = any(bool((each != 1).any()) for each in parameters)
            refuse(changed, f"{here}: parameters have changed; scale their `.grad`.")
    return True


def _squares(tensors: Iterable[Any]) -> float:
    return sum(float(each.square().sum()) for each in tensors)


def _judge_norm(got: Any, norm: float, case: tuple[Any, ...], where: str) -> None:
    try:
        value = float(got)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"{where}: it returns a {type(got).__name__}; return the norm, a number.") from None
    if math.isclose(value, norm, rel_tol=1e-6, abs_tol=1e-5):
        return
    returns = f"{where}: it returns {value:.3g}"
    explain(value, mistakes(__name__, "clipped_norm"), *case, where=f"{returns}: ")
    raise Wrong(f"{returns}, which is not the norm of the whole gradient.")


def _judge_clipped(new: list[Any], old: list[Any], factor: float, where: str) -> None:
    refuse(any(each is None for each in new), f"{where}: a `.grad` is None; scale it instead.")
    pairs = list(zip(new, old, strict=True))
    wrong = [not bool(((got - factor * was).abs() <= 1e-6 * was.abs()).all()) for got, was in pairs]
    if not any(wrong):
        return
    sharded, replicated = any(wrong[: len(SHARDED)]), any(wrong[len(SHARDED) :])
    alone = "" if sharded and replicated else "sharded" if sharded else "replicated"
    got, was = pairs[wrong.index(True)]
    times = float((got * was).sum() / was.square().sum())
    times = times if bool(((got - times * was).abs() < 1e-9).all()) else math.nan
    refuse_any(
        f"{where}: ",
        {
            "gradients are NaN; a norm of 0 divides nothing.": any(bool(each.isnan().any()) for each in new),
            f"only the gradients of `{alone}` are wrong; scale both alike.": alone,
            "gradients are no multiple of what they were.": math.isnan(times),
            f"gradients grow {times:.3g} times; a norm below max_norm stays as it is.": times > 1,
            f"gradients are as before; they must become {factor:.3g} times as large.": times == 1,
            f"gradients become {times:.3g} times as large; it must be {factor:.3g} on every rank.": True,
        },
    )
