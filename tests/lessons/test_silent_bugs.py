"""Lesson 17's check judges a verifier by what it finds, however it is written."""

import copy

import pytest
import torch

from workshop_utils.lessons.checks import silent_bugs
from workshop_utils.lessons.gauntlet.model import loss_of
from workshop_utils.lessons.gauntlet.planting import compiled, function_at

pytestmark = pytest.mark.processes


def numbers(module):
    return torch.cat([each.detach().flatten() for each in module.parameters()])


def by_parameter(make, model, batches, mesh):
    """By lengths of differences instead of largest ones; the second step's gradients, too, by a loaded training."""
    counted = copy.deepcopy(model)
    order = torch.arange(len(numbers(counted)), dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(order, counted.parameters())
    held = [each.detach().long() for each in make(counted, mesh).module.parameters()]
    ends = torch.tensor([each.numel() for each in model.parameters()]).cumsum(0)

    whole = copy.deepcopy(model)
    loss = loss_of(whole, batches[0])
    right = torch.cat([each.flatten() for each in torch.autograd.grad(loss, [*whole.parameters()])])
    training, wrong = make(model, mesh), []
    given = training.step(batches[0])
    if given is not None and abs(given / loss.item() - 1) > 1e-11:
        wrong.append("loss")
    for place, each in zip(held, training.module.parameters(), strict=True):
        whose = int(torch.searchsorted(ends, place.flatten()[0], right=True))
        of = slice(int(ends[whose - 1]) if whose else 0, int(ends[whose]))
        if (each.grad - right[place]).norm() > 1e-11 * right[of].norm():
            wrong.append([name for name, _ in model.named_parameters()][whose])
    if abs(training.update() - right.norm().item()) > 1e-11 * right.norm():
        wrong.append("norm")
    loaded = make(model, mesh)
    loaded.load_state_dict(copy.deepcopy(training.state_dict()))
    for each in (training, loaded):
        each.step(batches[2])
        each.update()
    if (numbers(training.module) - numbers(loaded.module)).norm() > 1e-11 * numbers(loaded.module).norm():
        wrong.append("resume")
    few = [(batches[0][0][:3], batches[0][1][:3])]
    mean = make(model, mesh).evaluate(few)
    if mean is not None and abs(mean / loss_of(model, few[0]).item() - 1) > 1e-11:
        wrong.append("evaluation")
    return tuple(wrong)


def test_a_verifier_of_another_style_is_right():
    verdict = silent_bugs.my_verifier(by_parameter)
    assert verdict.state == "right", verdict


def test_each_hidden_bug_can_be_planted():
    for row in silent_bugs.hidden():
        for change in row.changes:
            assert compiled(function_at(change.where)[0], change)
