"""Deferred gradients of weights: those of one backward pass, with the same products."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from workshop_utils.parallel.deferred import DeferredWeights
from workshop_utils.parallel.gpt import Block, GPTSizes, Kept

pytestmark = pytest.mark.processes

SIZES = GPTSizes(width=12, heads=3, sequence=7)


def test_two_parts_give_the_gradients_of_one_backward_pass_with_no_product_more():
    torch.manual_seed(0)
    block = Block(SIZES).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    with FlopCounterMode(display=False) as whole:
        block(x).square().sum().backward()
    expected = [each.grad for each in (x, *block.parameters())]
    block.zero_grad()
    x.grad = None
    for times in (1, 2):
        deferred = DeferredWeights()
        with FlopCounterMode(display=False) as counted:
            with Kept(block), deferred:  # hooks see what is saved
                y = block(x)
            y.square().sum().backward()
            assert len(deferred.products) == 4
            assert torch.allclose(x.grad, times * expected[0], rtol=1e-12)
            deferred.add_to_gradients()
        assert not deferred.products
        if times == 1:  # what is added in place, the second time, is not counted
            assert counted.get_total_flops() == whole.get_total_flops()
    assert not any(each.grad.requires_grad for each in block.parameters())  # it would keep the whole graph
    for each, gradient in zip((x, *block.parameters()), expected, strict=True):
        assert not each.grad.requires_grad
        assert torch.allclose(each.grad, 2 * gradient, rtol=1e-12, atol=1e-13)


def test_layers_whose_weights_are_computed_or_frozen_or_have_hooks_are_left_as_they_are():
    layer, hooked, frozen, x = *(nn.Linear(3, 2) for _ in range(3)), torch.ones(1, 3)
    frozen.requires_grad_(False)
    deferred, seen = DeferredWeights(), []
    with deferred:
        nn.functional.linear(x, 2 * layer.weight, layer.bias).sum().backward()
        nn.functional.linear(input=x, weight=layer.weight, bias=layer.bias).sum().backward()
        frozen(x.clone().requires_grad_()).sum().backward()
        layer.weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.clone()))
        layer(x).sum().backward()
        hooked.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        hooked(x).sum().backward()
    assert not deferred.products
    assert [each.tolist() for each in seen] == [[[4.0] * 3] * 2, [[1.0] * 3] * 2]
    assert frozen.weight.grad is None


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_a_layer_takes_one_row_and_is_recomputed(use_reentrant):
    layer, x = nn.Linear(3, 2), torch.arange(3.0).requires_grad_()
    deferred = DeferredWeights()
    again = {} if use_reentrant else {"context_fn": lambda: (nullcontext(), deferred)}
    with deferred:
        y = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant, **again)
    y.sum().backward()
    assert len(deferred.products) == (not use_reentrant)
    deferred.add_to_gradients()
    assert layer.weight.grad.tolist() == [[0.0, 1.0, 2.0]] * 2
    assert torch.equal(x.grad, layer.weight.sum(0))


def test_a_weight_that_was_changed_in_place_since_the_forward_pass_is_refused():
    layer = nn.Linear(3, 2)
    with DeferredWeights():
        y = layer(torch.ones(3, requires_grad=True))
    with torch.no_grad():
        layer.weight.mul_(100)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["x", "gradient"])
def test_what_was_changed_in_place_since_the_backward_pass_is_refused_and_nothing_is_added(name):
    layer, given = nn.Linear(3, 2), {"x": torch.ones(4, 5, 3), "gradient": torch.ones(4, 5, 2)}
    with DeferredWeights() as deferred:
        layer(torch.ones(3)).sum().backward()
        layer(given["x"]).backward(given["gradient"])
    given[name].zero_()
    with pytest.raises(RuntimeError, match="was changed in place since the backward pass; change a copy"):
        deferred.add_to_gradients()
    assert layer.weight.grad is None


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3)])
def test_what_a_layer_gives_can_be_changed_in_place(shape):
    layer, x = nn.Linear(3, 3), torch.randn(shape)
    layer(x).relu_().square().sum().backward()
    expected = [each.grad for each in layer.parameters()]
    layer.zero_grad()
    with DeferredWeights() as deferred:
        y = layer(x).relu_()
    y.square().sum().backward()
    assert deferred.products
    deferred.add_to_gradients()
    for each, gradient in zip(layer.parameters(), expected, strict=True):
        assert torch.allclose(each.grad, gradient, rtol=1e-5)


def test_a_second_derivative_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    x = torch.ones(5, 3, requires_grad=True)
    with DeferredWeights():
        y = model(x)
    (of_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        of_x.square().sum().backward()


def test_layers_under_autocast_are_left_as_they_are():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    with DeferredWeights() as deferred, torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    assert not deferred.products
    assert layer.weight.grad is not None


def test_a_product_that_fails_leaves_those_before_it_added_once():
    layers = [nn.Linear(3, 2) for _ in range(2)]
    with DeferredWeights() as deferred:
        for layer in layers:
            layer(torch.ones(1, 3)).sum().backward()
    deferred.products[1] = deferred.products[1]._replace(x=torch.ones(1, 5))
    layers[1].weight.grad = torch.zeros(2, 3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Bad in-place call"):
            deferred.add_to_gradients()
    assert layers[0].weight.grad.equal(torch.ones(2, 3))
