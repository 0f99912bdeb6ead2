"""What each rank of a planted run sees: losses, gradients, weights, shares, masks, routes and bytes.

It is seen from outside the training: what is right is named and counted while no row is planted.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from workshop_utils.comm.communicator import Communicator
from workshop_utils.lessons.gauntlet.model import Batch, Options, loss_of, ragged, whole_model
from workshop_utils.lessons.gauntlet.planting import Row, planted
from workshop_utils.lessons.gauntlet.trainer import Training
from workshop_utils.parallel import experts, gpt, tensor
from workshop_utils.parallel.fully_sharded import FullySharded
from workshop_utils.parallel.mesh import mesh_of

EXAMPLES = 8  # of a batch
STEPS, COMPARED, RESUMED = (
    16,
    8,
    2,
)  # of a run; compared with one process's; the last ones, taken again after a restart


@dataclass
class Seen:
    """What a rank saw of a run.

    Attributes:
        losses, norms: by step; a rank may know no loss.
        compared: losses by step, without dropout.
        gradient_errors: in the first step without dropout, relative to the largest number of each parameter's.
        squares: of the gradients in the first step, by what is held (`held`).
        weights: after the last step, by what is held.
        replica: this rank's; ranks of a replica have the same examples and places.
        shares: how many targets count in what this rank takes of the first "batch", and of the "evaluation".
        total: how many the training says that there are in the batch.
        masks: of dropout, by layer and call: the place of this rank among those with other activations, and the mask.
        evaluations: mean losses of the evaluation set, and of each of its batches.
        resumed: by how much a resumed run differs from this one, relative.
        routed: rows to each expert, by layer and microbatch, in the first step.
        sharing: the ranks that share experts with this one, and its place among them.
        nbytes: sent in the first step and its update.
    """

    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    compared: list[float | None] = field(default_factory=list)
    gradient_errors: dict[str, float] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    replica: int = 0
    shares: dict[str, int] = field(default_factory=dict)
    total: int = 0
    masks: dict[str, tuple[tuple[int, ...], bytes]] = field(default_factory=dict)
    evaluations: list[float | None] = field(default_factory=list)
    resumed: dict[str, float] = field(default_factory=dict)
    routed: list[Tensor] = field(default_factory=list)
    sharing: tuple[tuple[int, ...], int] = (), 0
    nbytes: int = 0


def watch(communicator: Communicator, row: Row) -> Seen:
    """Train with `row` planted, resume, evaluate, and train without dropout."""
    gradients = first_gradients(row)
    with planted(row):
        training = training_of(communicator, row)
        # Cut as the training is, since others may have other parts of the model, and be as right.
        right = training_of(communicator, row, gradients, dropout=0.0, initialise=False)
    names, seen = held(training), Seen(replica=training.mesh.replicas.rank)
    seen.sharing = tuple(training.mesh.experts.ranks), training.mesh.experts.rank
    with planted(row):
        _take_first_step(communicator, training, right, names, seen)
        for step in range(1, STEPS):
            if step == STEPS - RESUMED:
                state = copy.deepcopy(training.state_dict())
            seen.losses.append(training.step(batch_of(step, training.sizes.sequence)))
            seen.norms.append(training.update())
        named = training.module.named_parameters()
        seen.weights = {names[name]: each.detach().clone() for name, each in named}
        _evaluate(training, seen)
        _resume(training_of(communicator, row), state, names, seen)
        seen.compared = seen.losses[:COMPARED]
        if Options(**row.options).dropout:
            _compare(training_of(communicator, row, dropout=0.0), right, seen)
    return seen


def _take_first_step(
    communicator: Communicator, training: Training, right: Training, names: dict[str, str], seen: Seen
) -> None:
    """A step and its update, of which more is noted than of the others."""
    hooks, before = [*_on_routers(training, seen), *_on_dropout(training, seen)], _sent(communicator)
    seen.losses.append(training.step(batch_of(0, training.sizes.sequence)))
    seen.squares = {names[name]: float(each.square().sum()) for name, each in gradients_of(training)}
    seen.shares["batch"] = sum(counted(targets) for _, targets in training.microbatches)
    seen.total = training.total
    seen.gradient_errors = _gradient_errors(training, right)
    seen.norms.append(training.update())
    seen.nbytes = _sent(communicator) - before
    for hook in hooks:
        hook.remove()


def _sent(communicator: Communicator) -> int:
    return int(communicator.traffic.bytes_sent.sum())


def _resume(training: Training, state: Any, names: dict[str, str], seen: Seen) -> None:
    """Go on from `state` in a fresh training, and note how much differs."""
    training.load_state_dict(state)
    pairs = [
        (training.step(batch_of(training.batches, training.sizes.sequence)), training.update())
        for _ in range(RESUMED)
    ]
    losses, norms = zip(*pairs, strict=True)
    for name, ours, theirs in (
        ("loss", losses, seen.losses[-RESUMED:]),
        ("norm", norms, seen.norms[-RESUMED:]),
        ("evaluation", [training.evaluate(evaluation_set(training.sizes.sequence))], seen.evaluations[:1]),
    ):
        seen.resumed[name] = difference(
            *(torch.tensor([each or 0.0 for each in side]) for side in (ours, theirs))
        )
    for name, each in training.module.named_parameters():
        seen.resumed[name] = difference(each.detach(), seen.weights[names[name]])


def _compare(training: Training, right: Training, seen: Seen) -> None:
    """Take the steps that are compared with one process's."""
    seen.compared = []
    for step in range(COMPARED):
        seen.compared.append(training.step(batch_of(step, training.sizes.sequence)))
        if step == 0:
            seen.gradient_errors = _gradient_errors(training, right)
        training.update()


def _gradient_errors(training: Training, right: Training) -> dict[str, float]:
    expected = dict(right.module.named_parameters())
    return {name: difference(each, expected[name].detach()) for name, each in gradients_of(training)}


def _evaluate(training: Training, seen: Seen) -> None:
    """Evaluate the whole set, in which this rank's targets are counted, and each of its batches."""
    own_examples, shares, batches = training.own_examples, [], evaluation_set(training.sizes.sequence)

    def counting(batch: Batch) -> Batch:
        share = own_examples(batch)
        shares.append(counted(share[1]))
        return share

    vars(training)["own_examples"] = counting
    seen.evaluations = [training.evaluate(each) for each in (batches, *([batch] for batch in batches))]
    seen.shares["evaluation"] = sum(shares[: len(batches)])


def _on_routers(training: Training, seen: Seen) -> Iterator[Any]:
    for each in training.module.modules():
        if isinstance(each, experts.Router):
            number = each.scores.out_features
            yield each.register_forward_hook(
                lambda _, __, routes, number=number: seen.routed.append(
                    torch.bincount(routes.chosen.flatten(), minlength=number)
                )
            )


def _on_dropout(training: Training, seen: Seen) -> Iterator[Any]:
    mesh, region = training.mesh, training.region
    place = mesh.data.rank, mesh.context.rank, mesh.tensor.rank if region.sequence_parallel else 0

    def note(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        calls = sum(key.startswith(f"{name}, ") for key in seen.masks)
        seen.masks[f"{name}, call {calls}"] = place, (output == 0).numpy().tobytes()

    for name, each in training.module.named_modules():
        if isinstance(each, nn.Dropout):
            stage = f"stage of rank {mesh.pipeline.rank}, {name}"
            yield each.register_forward_hook(functools.partial(note, stage))


@functools.cache
def batch_of(step: int, sequence: int = Options.sequence) -> Batch:
    """The whole batch of a step; its examples have different numbers of targets that count."""
    return ragged(gpt.batch_of(gpt.manual(), step, EXAMPLES, sequence))


def evaluation_set(sequence: int = Options.sequence) -> list[Batch]:
    """Eight examples, in batches that ranks do not divide."""
    tokens, targets = batch_of(1000, sequence)
    return [(tokens[:5], targets[:5]), (tokens[5:], targets[5:])]


def training_of(
    communicator: Communicator, row: Row, model: gpt.GPT | None = None, **changed: Any
) -> Training:
    """This rank's training of `model`, or of a new one, with the row's layout and options."""
    options = {**row.options, **changed}
    model = first_model(Options(**options)) if model is None else model
    return Training(model, mesh_of(communicator, **row.layout), **options)


def first_model(options: Options) -> gpt.GPT:
    """The whole model; biases and norms are not at zero and one, where what is done wrong with them would not show."""
    model, generator = whole_model(**vars(options)), torch.Generator().manual_seed(options.seed)
    for each in () if options.initialise else model.parameters():
        if each.dim() == 1:
            each.data += 0.1 * torch.randn(each.shape, generator=generator, dtype=each.dtype)
    return model


def first_gradients(row: Row) -> gpt.GPT:
    """One process's gradients in the first step, as a model."""
    return one_process(tuple(sorted(row.options.items())), 1)[1]


@functools.cache
def one_process(options: tuple[tuple[str, Any], ...], steps: int) -> tuple[list[float], gpt.GPT]:
    """Losses of `steps` steps in one process without dropout, and the first step's gradients as a model."""
    chosen, losses, gradients = Options(**dict(options)), [], None
    model = first_model(replace(chosen, dropout=0.0))
    kinds: Any = {"adam": torch.optim.Adam, "sgd": functools.partial(torch.optim.SGD, momentum=0.9)}
    optimizer = kinds[chosen.optimizer](model.parameters(), lr=chosen.learning_rate)
    for layer in model.modules():
        if isinstance(layer, experts.Experts):
            layer.balance /= chosen.microbatches
    for step in range(steps):
        batch, loss = batch_of(step, chosen.sequence), 0.0
        optimizer.zero_grad()
        for part in zip(*(each.chunk(chosen.microbatches) for each in batch), strict=True):
            share = loss_of(model, part) * (counted(part[1]) / counted(batch[1]))
            share.backward()
            loss += share.item()
        losses.append(loss)
        gradients = gradients or model.gradients()
        nn.utils.clip_grad_norm_(model.parameters(), chosen.max_norm)
        optimizer.step()
        if chosen.bias_rate:
            experts.update_bias(model, rate=chosen.bias_rate)
    assert gradients is not None
    return losses, gradients


def counted(targets: Tensor) -> int:
    """How many of them count."""
    return int((targets != tensor.IGNORED).sum())


def gradients_of(training: Training) -> list[tuple[str, Tensor]]:
    """By the parameter's name; zeros where there is none."""
    named = training.module.named_parameters()
    return [(name, torch.zeros_like(each) if each.grad is None else each.grad) for name, each in named]


def difference(one: Tensor, other: Tensor) -> float:
    """The largest, relative to the largest number of `other`; infinite where shapes differ, or only one is zero."""
    if one.shape != other.shape:
        return float("inf")
    if torch.equal(one, other):
        return 0.0
    return float((one - other).abs().max() / other.abs().max())


def held(training: Training) -> dict[str, str]:
    """What this rank's parameters are, by name: where two ranks have the same words, they have the same numbers."""
    mesh, module = training.mesh, training.module
    cut, of_experts = tensor.cut_parameters(module), {*experts.expert_parameters(module)}
    sharded = [each for each in module.modules() if isinstance(each, FullySharded)]
    shards = {each.shard for whole in sharded for each in whole.sharded.values()}
    tied = {*training.tied_copies()} if training.is_tied else set()
    words = {}
    for name, each in module.named_parameters():
        parts = ["the tied weight" if each in tied else f"stage of rank {mesh.pipeline.rank}, {name}"]
        parts += [f"tensor rank {mesh.tensor.rank}"] * (each in cut)
        parts += [f"expert rank {mesh.experts.rank}"] * (each in of_experts)
        words[name] = ", ".join(parts + [f"replica {mesh.replicas.rank}"] * (each in shards))
    return words
