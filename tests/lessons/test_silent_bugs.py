"""Lesson 17's check judges a verifier by what it finds, however it is written."""

import copy

import pytest
import torch

from workshop_utils.lessons.checks import silent_bugs
from workshop_utils.lessons.gauntlet.model import loss_of
from workshop_utils.lessons.gauntlet.planting import compiled, function_at
from workshop_utils.parallel.tensor import IGNORED

pytestmark = pytest.mark.processes


def numbers(module):
    return torch.cat([each.detach().flatten() for each in module.parameters()])


def by_parameter(make, model, batches, mesh):
    """By lengths of differences instead of largest ones, and beside an optimizer of one process."""
    counted = copy.deepcopy(model)
    order = torch.arange(len(numbers(counted)), dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(order, counted.parameters())
    held = [each.detach().long() for each in make(counted, mesh).module.parameters()]
    ends = torch.tensor([each.numel() for each in model.parameters()]).cumsum(0)

    whole = copy.deepcopy(model)
    loss = loss_of(whole, batches[0])
    loss.backward()
    right = torch.cat([each.grad.flatten() for each in whole.parameters()])
    training, wrong = make(model, mesh), []
    given = training.step(batches[0])
    if given is not None and not abs(given / loss.item() - 1) <= 1e-11:
        wrong.append("loss")
    for place, each in zip(held, training.module.parameters(), strict=True):
        whose = int(torch.searchsorted(ends, place.flatten()[0], right=True))
        of = slice(int(ends[whose - 1]) if whose else 0, int(ends[whose]))
        if each.grad is None or not (each.grad - right[place]).norm() <= 1e-11 * right[of].norm():
            wrong.append([name for name, _ in model.named_parameters()][whose])
    if not abs(training.update() - right.norm().item()) <= 1e-11 * right.norm():
        wrong.append("norm")
    options = training.options
    # Momentum makes no difference to the first step.
    kind = torch.optim.SGD if options.optimizer == "sgd" else torch.optim.Adam
    torch.nn.utils.clip_grad_norm_(whole.parameters(), options.max_norm)
    kind(whole.parameters(), options.learning_rate).step()
    loaded = make(model, mesh)
    loaded.load_state_dict(copy.deepcopy(training.state_dict()))
    second = loss_of(whole, batches[2]).item()
    for each in (training, loaded):
        given = each.step(batches[2])
        # An update makes rounding larger.
        if given is not None and not abs(given / second - 1) <= 1e-9:
            wrong.append("loss")
        each.update()
    on, again = numbers(training.module), numbers(loaded.module)
    if not (on - again).norm() <= 1e-11 * again.norm():
        wrong.append("resume")
    few = [tuple(part[:3] for part in batches[0]), tuple(part[5:] for part in batches[1])]
    counts = torch.tensor([(targets != IGNORED).sum() for _, targets in few]).double()
    losses = torch.stack([loss_of(model, each).detach() for each in few])
    due = (counts @ losses / counts.sum()).item()
    mean = make(model, mesh).evaluate(few)
    if mean is not None and not abs(mean / due - 1) <= 1e-11:
        wrong.append("evaluation")
    return tuple(wrong)


def test_a_verifier_of_another_style_is_right():
    verdict = silent_bugs.my_verifier(by_parameter)
    assert verdict.state == "right", verdict


def test_each_hidden_bug_can_be_planted():
    for row in silent_bugs.hidden():
        for change in row.changes:
            assert compiled(function_at(change.where)[0], change)
