"""Is a parallel training still the training of one process? Compare the two, one cut at a time.

A loss that falls proves little: most mistakes in a composition of parallelisms change gradients, and not by enough to
stop the learning. So make everything small, seed it, compute in float64, and compare numbers:

    def program(communicator):                      # on as many ranks as the layout has, or a multiple
        return verify(build, loss, make, batch, {"data": 2, "tensor": 2}, communicator)

    print(on_ranks(4, program).values[0])           # which parameter, on which ranks, how wrong, the kind, the line

`make(model, mesh)` cuts a copy of the whole model as your job does, and returns an object with

    module                  this rank's part of the model
    step(batch)             takes this rank's share of the whole batch, and leaves in `.grad` what the optimizer is to
                            use; returns the loss of the whole batch, or None on a rank that does not know it

and, if it has them,

    update()                clips, lets the optimizer step, and returns the norm of the gradient before, or None
    evaluate(batches)       returns the mean loss over all these whole batches, of any sizes, or None
    state_dict(), load_state_dict(state)        what a restart needs: of a training, and into one just made
    initialise()            draws this rank's weights, as `build` would from the same seed

It is called for

| the cut | and what is wrong there |
| --- | --- |
| of none: each rank trains alone | needs no second rank: accumulation, loss, clipping, resume |
| of each direction by itself | belongs to this direction |
| of two, and of all | belongs to their composition |

Where a cut is wrong, those that contain it are not tried.

**Who holds what** is measured, not told: `make` is first given a model whose weights are their own numbers, 1, 2, 3 and
so on. What a rank's part then contains says which numbers of the whole model it has, whatever cut them.

**Tolerances** are measured, too: by how much right results differ if each weight changes in its last bit, or examples
come in another order, times `MARGIN`.

For PyTorch's DDP, FSDP2 and DTensor leave `communicator` out and pass `mesh=device_mesh`. Ranks must be processes, as
threads share PyTorch's random state, and `make` may refuse a cut by a ValueError only if it does on all of its ranks.

What it cannot see: kernels of a GPU, a dtype other than float64, and races. It compares mathematics.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.over_torch import TorchCommunicator
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.subset import Subset
from workshop_utils.parallel import diagnosis
from workshop_utils.parallel.mesh import mesh_of
from workshop_utils.parallel.reference import Batch, Reference, flat, has_dropout

FOLLOWS = "other examples count, or count differently"  # or the loss is wrong already
ALONE = "first weights", "evaluation", "dropout", "restart", "precision"  # these make no other cut wrong


class Finding(NamedTuple):
    """A number that is not the one of one process.

    Attributes:
        cut: at which it showed, as "tensor 2"; "one rank" for none.
        check: what was compared, as "gradient".
        parameters: of the whole model, those nearest to the loss first.
        ranks: where, numbered within the cut.
        error, tolerance: the largest difference, and what rounding may do, both relative to the largest right number.
        kind: what would explain the numbers.
        line: where to look, as "train.py:88 in finish".
    """

    cut: str
    check: str
    parameters: tuple[str, ...]
    ranks: tuple[int, ...]
    error: float
    tolerance: float
    kind: str
    line: str

    def __str__(self) -> str:
        more = len(self.parameters) - 3
        names = ", ".join(self.parameters[:3]) + (f" and {more} more" if more > 0 else "")
        of = f" of {names}" if names else ""
        on = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        off = f": off by {self.error:.1e} of its size, of which rounding allows {self.tolerance:.0e}"
        where = f"{self.cut}: {self.check}{of}, {on}{off * (self.tolerance > 0)}"
        return f"{where}\n    {self.kind}\n    look at {self.line}"


class Report(NamedTuple):
    """What `verify` found, the same on every rank; `tried` and `left_out` say what it stands on."""

    findings: tuple[Finding, ...]
    tried: tuple[str, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        verdict = f"{len(self.findings)} wrong" if self.findings else "equal to one process"
        parts = [*map(str, self.findings), f"tried: {'; '.join(self.tried)}: {verdict}"]
        return "\n".join(parts + [f"not checked: {each}" for each in self.left_out])


def device_mesh(_: Communicator, **cut: int) -> Any:
    """PyTorch's mesh of this cut, for `verify(mesh=device_mesh)`: a dimension for each direction, on gloo.

    All ranks of the default process group call it; where a cut has fewer, several copies of it train side by side.
    """
    from torch.distributed.device_mesh import init_device_mesh

    everybody = torch.distributed.get_world_size()
    sizes = everybody // math.prod(cut.values()), *cut.values()
    whole = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", *cut))
    return whole[tuple(cut)] if cut else whole


@contextmanager
def _in_float64() -> Iterator[None]:
    """PyTorch's default dtype, and a random state of its own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(before)


@_in_float64()
def verify(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Batch], Tensor],
    make: Callable[[nn.Module, Any], Any],
    batch: Batch,
    layout: Mapping[str, int],
    communicator: Communicator | None = None,
    mesh: Callable[..., Any] = mesh_of,
    seed: int = 0,
) -> Report:
    """Compare `make`'s training under every cut of `layout` with one process. Every rank calls it; all get the report.

    Args:
        build: makes the whole model, small: two layers show what eighty do. It is called after
            `torch.manual_seed(seed)`, and what it gives is computed with in float64,
            PyTorch's default dtype meanwhile.
        loss: the mean loss of a whole model over a batch, in plain PyTorch: what is right.
        make: given a copy of the whole model and the mesh, this rank's training. It may change the copy. PyTorch's
            generator has one seed on all ranks: what needs states of its own seeds them, there or in `step`.
        batch: tensors, the examples in dimension 0. Let them count unequally (padded targets, say), and their number be
            a multiple of what the layout shares them among.
        layout: the size of each direction.
        communicator: of all ranks, as many as the layout has, or a multiple; None: PyTorch's default process group.
        mesh: given the ranks of a cut and, by name, its sizes, what `make` takes: `parallel.mesh.mesh_of`'s groups, or
            `device_mesh`'s.
        seed: of PyTorch's generator, before everything that may draw from it.

    Raises:
        ValueError: for a model that is random without a seed, a layout that the ranks are not a multiple of, a loss
            that is not a mean, a batch that gives no gradient, or what `make` raises under the whole layout.
    """
    everybody = communicator or TorchCommunicator()
    whole = Reference(build, loss, batch, seed)
    blind = [
        f"wrong weights of {size} parts: those of this batch count alike"
        for size in {*layout.values()}
        if whole.is_even(size)
    ]
    if whole.idle:
        blind.append(f"numbers of {', '.join(whole.idle[:3])}: this batch gives them no gradient")
    findings, tried, left_out = list[Finding](), list[str](), list[str]()
    failed = list[tuple[set[str], Finding]]()  # directions, and what is wrong where they are cut
    for cut in _cuts(layout, everybody.size, mesh):
        names = {name for name, size in cut.items() if size > 1}
        shown = " × ".join(f"{name} {size}" for name, size in cut.items() if size > 1) or "one rank"
        inner = [each for cut_by, each in failed if cut_by <= names]
        if wrong := [each.cut for each in inner if each.check not in ALONE]:
            left_out.append(f"{shown}, since {wrong[0]} is wrong")
            continue
        count = _ranks_of(cut, mesh)
        first = everybody.rank // count * count
        ranks = Subset(everybody, range(first, first + count))
        refused: ValueError | None = None
        try:
            compared = _Compared(whole, make, mesh(ranks, **cut), ranks)
        except ValueError as error:
            refused = error
        if refusals := [each for each in _gathered(everybody, str(refused or "")) if each]:
            if cut == {**layout} and not findings:
                raise ValueError(refusals[0]) from refused
            left_out.append(f"{shown}: {refusals[0]}")
            continue
        by_rank = _gathered(everybody, compared.findings())
        known = {(each.check, each.kind) for each in inner}
        found = _merged(shown, [each for rank in by_rank for each in map(Finding._make, rank)], whole)
        found = [each for each in found if (each.check, each.kind) not in known]
        failed += [(names, each) for each in found]
        findings += found
        tried.append(shown)
        left_out += compared.left_out if not names else []
    return Report(tuple(findings), tuple(tried), (*left_out, *blind))


def _ranks_of(cut: Mapping[str, int], mesh: Callable[..., Any]) -> int:
    """How many ranks a cut has: of our mesh, experts are shared by ranks of other directions."""
    return math.prod(size for name, size in cut.items() if mesh is not mesh_of or name != "experts")


def _cuts(layout: Mapping[str, int], ranks: int, mesh: Callable[..., Any]) -> Iterator[dict[str, int]]:
    """None of the directions, each by itself, each two, all; the others have size 1."""
    for name, size in layout.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"layout has {name} {size!r}; a direction's size is a whole number of at least 1"
            )
    needed = _ranks_of(layout, mesh)
    if ranks % needed:
        shape = " × ".join(f"{name} {size}" for name, size in layout.items())
        raise ValueError(
            f"layout is {shape}, {needed} ranks; there are {ranks}: start {needed}, or a multiple"
        )
    names = [name for name, size in layout.items() if size > 1]
    for count in sorted({0, 1, 2, len(names)} & {*range(len(names) + 1)}):
        for chosen in itertools.combinations(names, count):
            yield {name: size if name in chosen else 1 for name, size in layout.items()}


def _gathered(communicator: Communicator, value: Any) -> list[Any]:
    """What each rank gives, in order; as JSON."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.zeros(communicator.size, np.int64)
    lengths[communicator.rank] = len(text)
    ring_all_reduce(communicator, lengths)
    rows = np.zeros((communicator.size, int(lengths.max())), np.uint8)
    rows[communicator.rank, : len(text)] = text
    ring_all_reduce(communicator, rows)
    return [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]


class _Compared:
    """The training under one cut, on `ranks`, beside one process."""

    def __init__(
        self, whole: Reference, make: Callable[[nn.Module, Any], Any], mesh: Any, ranks: Communicator
    ) -> None:
        self.whole, self.ranks, self.left_out = whole, ranks, list[str]()
        self.saved: Any = None
        self.third: float | None = None

        def made(model: nn.Module) -> Any:
            torch.manual_seed(whole.seed)
            training = make(copy.deepcopy(model), mesh)
            if not isinstance(getattr(training, "module", None), nn.Module) or not hasattr(training, "step"):
                kind = type(training).__name__
                raise ValueError(f"make returns a {kind}; it must return an object with a module and a step")
            return training

        self.made = made
        self.numbers = _parameters(made(whole.numbered()))  # by this rank's names
        self.training = made(whole.still)

    def findings(self) -> list[Finding]:
        """This rank's; the order is that in which one mistake makes the next numbers wrong, too."""
        found = self._weights()
        if any(_gathered(self.ranks, bool(found))):
            return found
        at_once = self._first_weights, self._evaluation, self._gradients
        for checks in (at_once, (self._masks, self._updates), (self._restart,)):
            found += [each for check in checks for each in check()]
            if any(_gathered(self.ranks, any(each.check not in ALONE[:-1] for each in found))):
                break
        return found

    def _finding(
        self, check: str, kind: str, where: Any, off: float = 0, limit: float = 0, names: Any = ()
    ) -> Finding:
        line = where if isinstance(where, str) else diagnosis.line_of(where)
        return Finding("", check, (*names,), (self.ranks.rank,), off, limit, kind, line)

    def _weights(self) -> list[Finding]:
        """Whether the parts together are the whole model, and have the weights that `make` was given."""
        where, size = type(self.training), len(self.whole.gradient)
        drawn = [name for name, each in self.numbers.items() if (each != each.round().clamp(1, size)).any()]
        if any(_gathered(self.ranks, drawn)):
            kind = "make does not keep the weights that it is given: it draws, scales, rounds or adds some"
            return [self._finding("weights", kind, where, names=drawn)] if drawn else []
        self.places = {name: each.long() - 1 for name, each in self.numbers.items()}
        self.held = self._summed({name: torch.ones_like(each) for name, each in self.numbers.items()})
        lost, kind = self.whole.owners((self.held == 0).nonzero()), "no rank has all of their numbers"
        return [self._finding("weights", kind, where, names=lost)] if lost else []

    def _first_weights(self) -> list[Finding]:
        """Whether ranks that draw their own weights draw those of one process."""
        if not hasattr(self.training, "initialise"):
            self.left_out.append("first weights: the training has no initialise")
            return []
        training = self.made(self.whole.still)
        torch.manual_seed(self.whole.seed)
        training.initialise()
        weights, first = _parameters(training), self.whole.first
        wrong = self._wrong(weights, first, 1e-12 + torch.zeros_like(first))
        if not wrong:
            return []
        kind = "not those that one process draws"
        names = self.whole.owners(torch.cat([self.places[name] for name in wrong]))
        return [self._finding("first weights", kind, training.initialise, max(wrong.values()), 1e-12, names)]

    def _evaluation(self) -> list[Finding]:
        """The mean over two batches of different sizes."""
        if not hasattr(self.training, "evaluate"):
            self.left_out.append("evaluation: the training has no evaluate")
            return []
        whole, examples = self.whole, len(self.whole.batch[0])
        short = tuple(each[: max(1, examples - 1)] for each in whole.batch)
        modes = [each.training for each in self.training.module.modules()]
        value = _number(self.training.evaluate([whole.batch, short]))
        right = whole.mean_loss(whole.batch, short)
        limit, where, found = whole.loss_tolerance, self.training.evaluate, list[Finding]()
        if modes != [each.training for each in self.training.module.modules()]:
            kind = "layers are left in evaluation mode, or come out of it: the next step has other dropout"
            found.append(self._finding("evaluation", kind, where))
        if value is None or abs(value - right) <= limit:
            return found
        kind = FOLLOWS
        if abs(value - (whole.mean_loss(whole.batch) + whole.mean_loss(short)) / 2) <= limit:
            kind = "batches count alike, although they hold unequally much"
        for count in reversed(range(2, len(short[0]) + 1)):
            filled = [tuple(_filled(each, count) for each in batch) for batch in (whole.batch, short)]
            if abs(value - whole.mean_loss(*filled)) <= limit:
                kind = f"examples that were repeated, to make a multiple of {count}, count twice"
        if abs(value / right - 1) <= diagnosis.FLOAT32:
            kind = diagnosis.ROUNDED
        return [*found, self._finding("evaluation", kind, where, abs(value / right - 1), limit / abs(right))]

    def _gradients(self) -> list[Finding]:
        """Loss and gradients of one step."""
        whole, found = self.whole, list[Finding]()
        loss = _number(self.training.step(whole.batch))
        gradients = _parameters(self.training, of_gradients=True)
        if loss is None and self.ranks.size == 1:
            self.left_out.append("loss: step returns None")
        known = [each for each in _gathered(self.ranks, loss) if each is not None]
        loss = whole.loss if loss is None else loss
        wrong = self._wrong(gradients, whole.gradient, whole.tolerance)
        off, limit = abs(loss / whole.loss - 1), whole.loss_tolerance / abs(whole.loss)
        is_rounded = limit < off <= diagnosis.FLOAT32
        if is_rounded:
            found.append(
                self._finding("precision", f"the loss is {diagnosis.ROUNDED}", self.training.step, off, limit)
            )
        is_loss_wrong = not off <= limit and not is_rounded
        forward = any(_gathered(self.ranks, is_loss_wrong))
        if not forward and not any(_gathered(self.ranks, bool(wrong))):
            return found + self._second_gradients()
        total = self._summed(gradients)
        layer, line = self._first_wrong_layer() if forward else ("", "")
        nearest = max(wrong, key=lambda name: int(self.places[name].max()), default=None)
        changed = diagnosis.last_change(self.training, whole.batch, nearest)
        line = line or diagnosis.line_of_layers(self.training, wrong) or changed
        if is_loss_wrong:
            kind = diagnosis.kind_of_loss(whole, loss, layer)
            if len({*known}) > 1 and abs(sum(known) / len(known) - whole.loss) <= whole.loss_tolerance:
                kind = "step returns the loss of each rank's share: the mean of these is right"
            found.append(self._finding("loss", kind, line, off, limit))
        way, limits = self._way_back(wrong), whole.tolerance / whole.largest(whole.gradient)
        for name, error in wrong.items():
            places = self.places[name]
            kind = diagnosis.kind_of_gradient(
                whole, places, gradients[name], self.held[places], total[places]
            )
            if kind or not forward:  # otherwise it follows from the loss
                limit = limits[places].max().item()
                check = "precision" if kind == diagnosis.ROUNDED else "gradient"
                found.append(self._finding(check, kind or way, line, error, limit, whole.owners(places)))
        return found

    def _second_gradients(self) -> list[Finding]:
        """What a step leaves to the next, which has the examples in another order."""
        whole, step = self.whole, self.training.step
        weights = _parameters(self.training)
        if hasattr(self.training, "update"):  # which may clear the gradients; the weights are put back
            self.training.update()
            for name, each in self.training.module.named_parameters():
                part = diagnosis.local(each.detach())
                part.copy_(weights[name].view(part.shape))
        left = _parameters(self.training, of_gradients=True)
        step(whole.flipped)
        second, found = _parameters(self.training, of_gradients=True), list[Finding]()
        for name, error in self._wrong(second, whole.second, whole.tolerance).items():
            added = self._wrong({name: second[name] - left[name]}, whole.second, 4 * whole.tolerance)
            kind = "right in the first step, and not in the second: something is left of the step before"
            if not added:
                kind = "gradients of the step before are still in it: nothing clears them"
            found.append(self._finding("gradient", kind, step, error, 0, whole.owners(self.places[name])))
        return found

    def _first_wrong_layer(self) -> tuple[str, str]:
        """Of all ranks, and its line."""
        found, whole = diagnosis.first_wrong_layer(self.whole, self.training, self.places), self.whole
        own: tuple[int, str, str] = len(whole.names), "", ""
        if found:
            name, line, dtype = found
            first = (number for number, each in enumerate(whole.names) if each.startswith(name))
            words = (name or "the model") + f", in {dtype}," * (dtype != torch.float64)
            own = next(first), words, line
        _, name, line = min(map(tuple, _gathered(self.ranks, own)))
        return name, line

    def _way_back(self, wrong: Iterable[str]) -> str:
        """How far gradients are right on any rank."""
        owners = {self.whole.owners(self.places[name])[-1] for name in wrong}
        names = self.whole.names
        last = max(
            (names.index(each) for rank in _gathered(self.ranks, [*owners]) for each in rank), default=0
        )
        until = f"right back to {names[last + 1]}, and " if last + 1 < len(names) else ""
        return f"the loss is right, so the forward pass is; gradients are {until}wrong from {names[last]} on"

    def _masks(self) -> list[Finding]:
        """Whether equal activations lose equal places, and others others, over two steps with dropout."""
        if not has_dropout(self.whole.model):
            self.left_out.append("random states: the model has no nn.Dropout")
            return []
        whole, (masks, again, scored) = self.whole, [diagnosis.Masks() for _ in range(3)]
        training = self.made(whole.model)
        with masks:
            training.step(whole.batch)
            if hasattr(training, "update"):
                training.update()
        first, state = masks.lost, torch.get_rng_state()
        if hasattr(training, "state_dict") and hasattr(training, "load_state_dict"):
            saved = copy.deepcopy(training.state_dict())
            restarted = self.made(whole.model)
            restarted.load_state_dict(saved)
            with again:
                restarted.step(whole.flipped)
        torch.set_rng_state(state)
        if hasattr(training, "evaluate"):
            with scored:
                training.evaluate([whole.batch])
        with masks:
            training.step(whole.flipped)
        if not first:
            self.left_out.append("random states: too little is dropped to tell masks apart")
        by_rank, keys_of = list[dict[float, list[str]]](), dict[str, set[float]]()
        for seen in _gathered(self.ranks, masks.seen):
            by_rank.append({})
            for key, places in seen:
                by_rank[-1].setdefault(key, []).append(places)
                keys_of.setdefault(places, set()).add(key)
        found = []
        for one, other in itertools.combinations(by_rank, 2):  # those that have most activations in common
            shared = one.keys() & other.keys()
            if 2 * len(shared) >= min(len(one), len(other)) and any(one[key] != other[key] for key in shared):
                found = [
                    "ranks with the same activations get different dropout masks: they need one random state"
                ]
        if scored.seen:
            found.append("evaluate drops activations: the layers are in training mode")
        if first and again.lost == first != masks.lost[len(first) :]:
            found.append("a restart draws the first step's random numbers again: their state is not saved")
        if any(len(keys) > 1 for keys in keys_of.values()):
            found.append(
                "different activations get the same dropout mask: they need random states of their own"
            )
        return [self._finding("dropout", kind, training.step) for kind in found]

    def _updates(self) -> list[Finding]:
        """Norms, and what three updates make, which must be what they make of one rank's training."""
        if not hasattr(self.training, "update"):
            self.left_out.append("norm, updates and restart: the training has no update")
            return []
        whole, update, found = self.whole, self.training.update, list[Finding]()
        gradients = _parameters(self.training, of_gradients=True).values()
        squares = _gathered(self.ranks, sum(each.square().sum().item() for each in gradients))
        numbers, self.weights, self.saved = self._run(self.made(whole.still))
        self.third = numbers.pop("third loss")
        right, limit, norm = whole.gradient.norm().item(), whole.tolerance.norm().item(), numbers["norm"]
        if norm is not None and not abs(norm - right) <= limit:
            kind = f"it is {norm / right:.4g} times as long as it should be"
            of = [rank for rank, each in enumerate(squares) if abs(norm - math.sqrt(each)) <= limit]
            if of and self.ranks.size > 1:
                whose = "this rank" if self.ranks.rank in of else f"rank {of[0]}"
                kind = f"the norm of what {whose} holds alone"
            if abs(norm - math.sqrt(sum(squares))) <= limit:
                kind = "what is held more than once counts each time"
            found.append(self._finding("norm", kind, update, abs(norm / right - 1), limit / right))
        if any(_gathered(self.ranks, bool(found))):
            return found
        still = self._wrong(self.weights, flat(whole.still.parameters()), 0 * whole.gradient)
        moves = whole.gradient.abs() > whole.tolerance
        idle = [name for name in self.weights if name not in still and moves[self.places[name]].any()]
        if idle:
            owners = whole.owners(torch.cat([self.places[name] for name in idle]))
            found.append(self._finding("updated weights", "no update moves them", update, names=owners))
        self.mean = mean = self._summed(self.weights) / self.held
        if self.ranks.size == 1 and not whole.numbers:
            others, moved, _ = self._run(self.made(whole.moved(0)))
            whole.take(numbers, mean, others, self._summed(moved) / self.held)
        expected = mean if whole.weights is None else whole.weights
        limits = whole.weights_tolerance / whole.largest(expected)
        for name, error in self._wrong(self.weights, expected, whole.weights_tolerance).items():
            places = self.places[name]
            kind = "not what the updates of one rank make"
            if ((self.weights[name] - mean[places]).abs() > whole.weights_tolerance[places]).any():
                kind = "ranks that hold the same weights have come apart"
            limit = limits[places].max().item()
            found.append(self._finding("updated weights", kind, update, error, limit, whole.owners(places)))
        if any(_gathered(self.ranks, bool(found))):  # what follows comes of it
            return found
        for name, value in numbers.items():
            known, limit = whole.numbers.get(name, (value, 0.0))
            if off := _off(value, known, limit):
                kind = "not what it is with one rank"
                found.append(self._finding(name, kind, update, off, limit / abs(known or 1.0)))
        return found

    def _run(
        self, training: Any, is_scored: bool = True
    ) -> tuple[dict[str, float | None], dict[str, Tensor], Any]:
        """Three steps with their updates: what they returned, the weights, and the state after the first."""
        whole, numbers = self.whole, dict[str, float | None]()
        numbers["loss"], numbers["norm"] = _number(training.step(whole.batch)), _number(training.update())
        state = copy.deepcopy(training.state_dict()) if hasattr(training, "state_dict") else None
        numbers["second loss"] = _number(training.step(whole.flipped))
        numbers["second norm"] = _number(training.update())
        can_score = is_scored and hasattr(training, "evaluate")
        if can_score:
            training.evaluate([whole.batch])  # which must not disturb what follows
        numbers["third loss"] = _number(training.step(whole.batch))
        training.update()
        weights = _parameters(training)
        if can_score:
            numbers["evaluation after the updates"] = _number(training.evaluate([whole.batch]))
        return numbers, weights, state

    def _undisturbed(self) -> list[Finding] | None:
        """Whether the training goes on as one that is not evaluated on the way; None if it does on all ranks."""
        whole, (unscored, *_) = self.whole, self._run(self.made(self.whole.still), is_scored=False)
        off = _off(self.third, unscored["third loss"], whole.loss_tolerance)
        if not any(_gathered(self.ranks, bool(off))):
            return None
        kind = "an evaluation changes what the training goes on with"
        if not hasattr(self.training, "evaluate"):
            kind = "two trainings from the same weights, batches and seed are not the same"
        where = getattr(self.training, "evaluate", self.training.update)
        limit = whole.loss_tolerance / abs(whole.loss)
        return [self._finding("evaluation", kind, where, off, limit)] if off else []

    def _restart(self) -> list[Finding]:
        """Whether going on from what was saved after one update is going on."""
        if not hasattr(self.training, "load_state_dict") or self.saved is None:
            self.left_out.append("restart: the training has no state_dict and load_state_dict")
            return self._undisturbed() or [] if hasattr(self.training, "update") else []
        whole, again = self.whole, self.made(self.whole.still)
        again.load_state_dict(copy.deepcopy(self.saved))
        loaded, saved = (tree_flatten_with_path(each)[0] for each in (again.state_dict(), self.saved))
        lost = [path for path, each in saved if not diagnosis.equal(each, dict(loaded).get(path))]
        again.step(whole.flipped)
        again.update()
        third = _number(again.step(whole.batch))
        again.update()
        wrong = self._wrong(_parameters(again), self.mean, whole.weights_tolerance)
        differs = bool(wrong or _off(third, self.third, whole.loss_tolerance))
        if any(_gathered(self.ranks, differs)) and (found := self._undisturbed()) is not None:
            return found
        if hasattr(again, "evaluate"):
            value = _number(again.evaluate([whole.batch]))
            if off := _off(value, *whole.numbers.get("evaluation after the updates", (None, 0.0))):
                wrong[""] = off
        if not wrong:
            return []
        kind = (
            f"state{keystr(lost[0])} is not what was saved" if lost else "something that matters is not saved"
        )
        names = [owner for name in wrong if name for owner in whole.owners(self.places[name])]
        limit = whole.loss_tolerance / abs(whole.loss)
        return [self._finding("restart", kind, again.load_state_dict, max(wrong.values()), limit, names)]

    def _summed(self, values: Mapping[str, Tensor]) -> Tensor:
        """Over ranks, each number where it belongs in the whole model."""
        total = torch.zeros_like(self.whole.gradient)
        for name, each in values.items():
            total.index_add_(0, self.places[name], each)
        ring_all_reduce(self.ranks, total.numpy())
        return total

    def _wrong(self, values: Mapping[str, Tensor], right: Tensor, tolerance: Tensor) -> dict[str, float]:
        """The error, relative to the parameter's largest number, of this rank's values that are wrong."""
        errors, largest = {}, self.whole.largest(right)
        for name, value in values.items():
            places = self.places[name]
            off = (value - right[places]).abs()
            if not (off <= tolerance[places]).all():
                errors[name] = (off / largest[places]).max().item()
        return errors


def _parameters(training: Any, of_gradients: bool = False) -> dict[str, Tensor]:
    """By name, this rank's numbers of each parameter, or of its gradient, in one row; zeros where there is none."""
    values = {}
    for name, parameter in training.module.named_parameters():
        value = parameter.detach()
        if of_gradients:
            value = torch.zeros_like(value) if parameter.grad is None else parameter.grad.detach()
            if hasattr(value, "redistribute"):  # the optimizer would add up a Partial, too
                value = value.redistribute(placements=parameter.placements)
        values[name] = diagnosis.local(value).reshape(-1).double().clone()
    return values


def _merged(cut: str, found: Sequence[Finding], whole: Reference) -> list[Finding]:
    """One finding for each check and kind; of parameters, those nearest to the loss first."""
    together: dict[tuple[str, str], list[Finding]] = {}
    checks = {each.check for each in found}
    for each in found:
        if each.kind != FOLLOWS or "loss" not in checks:
            together.setdefault((each.check, each.kind), []).append(each)
    merged = []
    for (check, kind), rows in together.items():
        names = {name for row in rows for name in row.parameters}
        ordered = [name for name in reversed(whole.names) if name in names]
        ranks = sorted({rank for row in rows for rank in row.ranks})
        worst = max(rows, key=lambda row: row.error)
        parameters = (*ordered, *sorted(names - {*ordered}))
        merged.append(
            Finding(cut, check, parameters, tuple(ranks), worst.error, worst.tolerance, kind, worst.line)
        )
    return merged


def _number(value: Any) -> float | None:
    return None if value is None else float(diagnosis.local(value))


def _off(value: float | None, right: float | None, limit: float) -> float:
    """How far it is off, relative; 0 where no more than the limit, or where one of the two is not known."""
    if value is None or right is None or abs(value - right) <= limit:
        return 0.0
    return abs(value / right - 1)


def _filled(x: Tensor, count: int) -> Tensor:
    """With the first examples once more, until there are a multiple of `count`."""
    return torch.cat([x, x[: -len(x) % count]])
