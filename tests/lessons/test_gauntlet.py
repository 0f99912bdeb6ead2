"""The gauntlet's trainer equals one process under every mesh."""

import copy
import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from workshop_utils import on_ranks
from workshop_utils.comm.subset import Subset
from workshop_utils.lessons.gauntlet.model import loss_of, ragged, whole_model
from workshop_utils.lessons.gauntlet.trainer import Training
from workshop_utils.parallel.experts import Experts, update_bias
from workshop_utils.parallel.gpt import batch_of, manual
from workshop_utils.parallel.mesh import mesh_of

pytestmark = pytest.mark.processes

RANKS = 8
MIXTURE = {"experts": 4, "k": 2}
# layout, options
CASES = {
    "one rank": ({}, {}),
    "accumulation": ({}, {"microbatches": 4}),
    "tied": ({}, {"tied": True}),
    "data": ({"data": 2}, {"microbatches": 2}),
    "data, SGD": ({"data": 2}, {"optimizer": "sgd"}),
    "overlapped": ({"data": 2}, {"data_parallel": "overlapped"}),
    "ZeRO-1": ({"data": 2}, {"data_parallel": "zero1", "tied": True}),
    "fully sharded": ({"data": 2}, {"data_parallel": "fully_sharded", "microbatches": 2, "tied": True}),
    "tensor": ({"tensor": 2}, {"microbatches": 2, "dropout": 0.3, "tied": True}),
    "sequence parallel": ({"tensor": 2}, {"sequence_parallel": True, "microbatches": 2}),
    "naive": ({"pipeline": 2}, {"microbatches": 4, "schedule": "naive"}),
    "1F1B": ({"pipeline": 2}, {"microbatches": 4, "tied": True}),
    "interleaved": (
        {"pipeline": 2},
        {"microbatches": 4, "layers": 4, "schedule": "interleaved", "tied": True},
    ),
    "ZBV": ({"pipeline": 2}, {"microbatches": 4, "layers": 4, "schedule": "zbv", "tied": True}),
    "ring": ({"context": 2}, {}),
    "Ulysses": ({"context": 2}, {"how": "ulysses", "microbatches": 2}),
    "experts": ({"data": 2, "experts": 2}, {**MIXTURE, "balance": 0.1, "microbatches": 2, "bias_rate": 0.01}),
    "experts in context": ({"context": 2, "experts": 2}, {**MIXTURE, "balance": 0.1}),
    "half of the experts": ({"data": 4, "experts": 2}, MIXTURE),
    "data × tensor": ({"data": 2, "tensor": 2}, {"sequence_parallel": True, "initialise": True}),
    "data × tensor, overlapped": ({"data": 2, "tensor": 2}, {"data_parallel": "overlapped"}),
    "data × tensor, fully sharded": (
        {"data": 2, "tensor": 2},
        {"data_parallel": "fully_sharded", "sequence_parallel": True},
    ),
    "data × pipeline": ({"data": 2, "pipeline": 2}, {"microbatches": 2, "tied": True, "average": 0.5}),
    "data × pipeline, ZBV": (
        {"data": 2, "pipeline": 2},
        {"microbatches": 2, "layers": 4, "schedule": "zbv", "tied": True},
    ),
    "data × pipeline, interleaved": (
        {"data": 2, "pipeline": 2},
        {"microbatches": 2, "layers": 4, "schedule": "interleaved"},
    ),
    "data × pipeline, fully sharded": (
        {"data": 2, "pipeline": 2},
        {"microbatches": 4, "data_parallel": "fully_sharded", "tied": True},
    ),
    "data × context": ({"data": 2, "context": 2}, {"microbatches": 2}),
    "data × context, fully sharded": (
        {"data": 2, "context": 2},
        {"data_parallel": "fully_sharded", "how": "ulysses"},
    ),
    "tensor × pipeline": (
        {"tensor": 2, "pipeline": 2},
        {"microbatches": 2, "sequence_parallel": True, "tied": True},
    ),
    "tensor × context": ({"tensor": 2, "context": 2}, {"sequence_parallel": True, "microbatches": 2}),
    "tensor × experts": ({"data": 2, "tensor": 2, "experts": 2}, {**MIXTURE, "balance": 0.1}),
    "data × tensor × pipeline": (
        {"data": 2, "tensor": 2, "pipeline": 2},
        {"microbatches": 2, "sequence_parallel": True, "tied": True, "initialise": True},
    ),
    "tensor × pipeline × context": (
        {"tensor": 2, "pipeline": 2, "context": 2},
        {"microbatches": 2, "tied": True, "average": 0.5},
    ),
    "data × pipeline × context × experts": (
        {"data": 2, "pipeline": 2, "context": 2, "experts": 4},
        {**MIXTURE, "microbatches": 2, "balance": 0.1, "bias_rate": 0.01, "average": 0.5},
    ),
    "three replicas": ({"data": 3}, {"microbatches": 2, "data_parallel": "fully_sharded"}),
    "three for four heads": ({"tensor": 3}, {"tied": True}),
    "three stages": ({"pipeline": 3}, {"layers": 4, "microbatches": 6, "schedule": "zb_h1", "tied": True}),
    "three replicas × two for the sequence": ({"data": 3, "context": 2}, {"data_parallel": "zero1"}),
}


def batches(first, count, examples=8):
    return [ragged(batch_of(manual(), step, examples, 16)) for step in range(first, first + count)]


def relative(got, right):
    """The largest difference, over the largest right number."""
    got, right = (torch.as_tensor(each, dtype=torch.float64) for each in (got, right))
    return ((got - right).abs().max() / right.abs().max().clamp(min=1e-6)).item() if right.numel() else 0.0


class OneProcess:
    """The reference: plain PyTorch, but for the model and for how `update_bias` balances."""

    def __init__(self, options):
        self.model, self.count = whole_model(**options), options.get("microbatches", 1)
        kind = torch.optim.SGD if options.get("optimizer") == "sgd" else torch.optim.Adam
        self.optimizer = kind(
            self.model.parameters(), 0.01, **({"momentum": 0.9} if kind is torch.optim.SGD else {})
        )
        self.bias_rate, self.decay = options.get("bias_rate", 0.0), options.get("average", 0.0)
        self.average = copy.deepcopy(self.model)
        for layer in self.model.modules():
            if isinstance(layer, Experts):
                layer.balance /= self.count

    def step(self, number, batch):
        torch.manual_seed(int(np.random.SeedSequence([0, number, 0, 0, 0]).generate_state(1)[0]))
        self.model.zero_grad()
        total, loss = (batch[1] >= 0).sum(), 0.0
        for tokens, targets in zip(*(each.chunk(self.count) for each in batch), strict=True):
            logits = self.model(tokens).flatten(0, 1)
            part = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / total
            part.backward()
            loss += part.item()
        for each in self.model.parameters():  # of an expert without a token
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        return loss

    def update(self):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        self.optimizer.step()
        if self.bias_rate:
            update_bias(self.model, None, self.bias_rate)
        with torch.no_grad():
            for mean, each in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.copy_(self.decay * mean + (1 - self.decay) * each)
        return norm

    @torch.no_grad()
    def evaluate(self, batches):
        model = copy.deepcopy(self.average if self.decay else self.model).eval()
        for mine, each in zip(model.buffers(), self.model.buffers(), strict=True):
            mine.copy_(each)  # an average is one of weights alone
        tokens, targets = (torch.cat(each) for each in zip(*batches, strict=True))
        return loss_of(model, (tokens, targets)).item()


def errors_of(communicator, layout, options):
    """By what is compared, how far this rank's part of a training is from one process's."""
    groups, whole = mesh_of(communicator, **layout), OneProcess(options)
    model = whole_model(**{**options, "seed": 1}) if options.get("initialise") else whole_model(**options)
    as_given, worst = {**options, "initialise": False}, Counter()

    def note(name, got, right):
        worst[name] = max(worst[name], relative(got, right))

    def note_all(name, got, right):
        of = Training(right, groups, **as_given).module.named_parameters()
        for each, (_, value) in zip(got, of, strict=True):
            note(name, each, value.detach())

    training = Training(model, groups, **options)
    data = batches(0, 3, examples=6 if 3 in layout.values() else 8)
    for number, batch in enumerate(data[:2]):
        loss, right = training.step(batch), whole.step(number, batch)
        assert (loss is None) == (training.last not in training.parts)
        note("loss", right if loss is None else loss, right)
        note_all("gradients", [each.grad for each in training.module.parameters()], whole.model.gradients())
        note("norm", training.update(), whole.update())
    note_all("weights", training.module.parameters(), whole.model)
    right = whole.evaluate(odd := [*batches(5, 2, examples=5), *batches(7, 1, examples=3)])
    evaluated = training.evaluate(odd)
    note("evaluation", right if evaluated is None else evaluated, right)

    again = Training(model, groups, **options)
    again.load_state_dict(training.state_dict())
    for each in (training, again):
        each.step(data[each.batches])
        each.update()
    pairs = zip(again.module.parameters(), training.module.parameters(), strict=True)
    worst["resume"] = float(not all(torch.equal(*pair) for pair in pairs))
    worst["resume"] += again.evaluate(odd) != training.evaluate(odd)
    return dict(worst)


def all_errors(communicator, cases):
    """Every case on as few ranks as it needs, so that several run at once."""
    results = {}
    for size in sorted({ranks_of(layout) for layout, _ in cases.values()}):
        count, number = communicator.size // size, communicator.rank // size  # of groups, and of this rank's
        if number < count:
            group = Subset(communicator, range(number * size, (number + 1) * size))
            named = [name for name, (layout, _) in cases.items() if ranks_of(layout) == size]
            for name in named[number::count]:
                results[name] = errors_of(group, *cases[name])
    return results


def ranks_of(layout):
    return math.prod(size for direction, size in layout.items() if direction != "experts")


@pytest.fixture(scope="module")
def errors():
    worst = {name: Counter() for name in CASES}
    for of_rank in on_ranks(RANKS, all_errors, {"cases": CASES}, timeout="300s").values:
        for name, by_what in of_rank.items():
            worst[name] |= Counter(by_what)
    return worst


@pytest.mark.parametrize("name", CASES)
def test_a_training_on_any_mesh_equals_one_process(errors, name):
    # Adam divides gradients that are rounding alone, as keys' biases have, by its ε of 1e-8.
    bounds = {"weights": 1e-8}
    assert {what: error for what, error in errors[name].items() if not error <= bounds.get(what, 1e-10)} == {}


def masks_of(communicator, layouts):
    """What was left out in two steps of each layout, by its name."""
    masks = {}
    for name, (layout, options) in layouts.items():
        model = whole_model(dropout=0.5, **options)
        training = Training(model, mesh_of(communicator, **layout), **options)
        drawn, keep = [], lambda _, __, result, drawn: drawn.append((result == 0).numpy())
        for layer in training.module.modules():
            if isinstance(layer, nn.Dropout):
                layer.register_forward_hook(partial(keep, drawn=drawn))
        for batch in batches(0, 2):
            training.step(batch)
            masks.setdefault(name, []).append(np.stack(drawn))
            drawn.clear()
        evaluated = training.evaluate(batches(0, 1))
        assert evaluated == training.evaluate(batches(0, 1))
    return masks


def test_ranks_leave_out_the_same_only_where_they_have_the_same_activations():
    layouts = {name: ({name: 2}, {}) for name in ("data", "tensor", "context", "pipeline")}
    layouts["sequence"] = ({"tensor": 2}, {"sequence_parallel": True})
    first, second = on_ranks(2, masks_of, {"layouts": layouts}).values
    same = {name: np.array_equal(first[name], second[name]) for name in layouts}
    assert same == {name: name == "tensor" for name in layouts}
    for step0, step1 in first.values():
        assert not np.array_equal(step0, step1)
