"""ZeRO-1 equals training in one process, sends what the formula says, and holds only its share of the state."""

import pytest
import torch
from parallel_training import (
    MODULES,
    OPTIMIZERS,
    by_one_process,
    divisible,
    flat,
    held_numbers,
    made,
    one_step,
    train,
)
from torch import nn

from workshop_utils.comm import threads
from workshop_utils.parallel.data import BucketedDataParallel
from workshop_utils.parallel.experts import Experts, cut_experts
from workshop_utils.parallel.sharded import ShardedOptimizer, owners

pytestmark = pytest.mark.processes


def model_and_optimizer(module, communicator, kind, **options):
    model = BucketedDataParallel(module, communicator, 400)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, ShardedOptimizer(trainable, communicator, kind, **options)


def trained(communicator, name, optimizer, parts=1):
    """All parameters after training by this rank and the others. Only rank 0 starts with those of seed 0."""
    kind, options = OPTIMIZERS[optimizer]
    model, optimize = model_and_optimizer(made(name, seed=communicator.rank), communicator, kind, **options)
    train(model, optimize, communicator, parts)
    return flat(model.module)


CASES = [(name, "AdamW", size, 1) for name in MODULES for size in (1, 3)]
CASES += [("plain", "AdamW", 2, 2)]  # gradients of two backward passes add up
CASES += [("tied", "Adafactor", 2, 1)]  # which looks at whole matrices


@pytest.mark.parametrize(("name", "optimizer", "size", "parts"), CASES)
def test_sharded_equals_serial_from_rank_0s_parameters(name, optimizer, size, parts):
    expected = by_one_process(made(name), optimizer, size)
    for parameters in threads.run(size, lambda communicator: trained(communicator, name, optimizer, parts)):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


class OfALearner(torch.optim.SGD):
    """Who knows what it does."""


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, OfALearner])
def test_an_optimizer_that_may_not_treat_every_parameter_by_itself_is_refused(kind):
    said = f"optimizer is {kind.__name__}; it must be one that is known to treat each parameter by itself"
    with pytest.raises(ValueError, match=said):
        threads.run(1, lambda communicator: model_and_optimizer(made("plain"), communicator, kind))


def test_parameters_that_differ_between_ranks_as_cut_experts_do_are_refused():
    def program(communicator):
        layer = cut_experts(Experts(3, [nn.Linear(3, 3) for _ in range(communicator.size)], 1), communicator)
        nn.init.ones_(layer.router.scores.weight)
        before = layer.experts[str(communicator.rank)].weight.detach().clone()
        with pytest.raises(ValueError, match="2 of 3 parameters differ between ranks; make them alike first"):
            ShardedOptimizer(layer.parameters(), communicator, torch.optim.SGD)
        ShardedOptimizer([nn.Parameter(torch.ones(1).expand(3))], communicator, torch.optim.SGD)
        assert torch.equal(layer.experts[str(communicator.rank)].weight, before)

    threads.run(2, program)


def test_the_largest_parameter_has_its_owner_first_so_that_shares_are_even():
    small, many, large = (
        nn.Parameter(torch.zeros(count, dtype=kind))
        for count, kind in ((1, torch.float32), (3, torch.float32), (2, torch.float64))
    )
    assert owners([small, many, large], 2) == {large: 0, many: 1, small: 1}  # 16 bytes each


@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_sends_and_holds_what_the_formula_says(size):
    def program(communicator):
        model, optimizer = model_and_optimizer(divisible(), communicator, torch.optim.Adam)
        communicator.traffic.reset()
        one_step(model, optimizer)
        return int(communicator.traffic.bytes_sent.sum()), held_numbers(optimizer.own)

    whole = sum(parameter.numel() for parameter in divisible().parameters())
    results = threads.run(size, program)
    # A reduce-scatter, an all-gather, and a broadcast of K bytes: (N − 1)/N · K each, on average.
    assert sum(sent for sent, _ in results) == 3 * 8 * whole * (size - 1)
    for _, held in results:
        assert abs(held - 2 * whole / size) <= 2 * 72  # the largest parameter, and a bias
