"""ZeRO-1, -2 and -3 equal training in one process, send what the formulas say, and hold only their chunks."""

import pytest
import torch
from parallel_training import MODULES, OPTIMIZERS, by_one_process, flat, made, train
from torch import nn
from torch.nn.functional import mse_loss

from workshop_utils import on_ranks
from workshop_utils.comm import threads
from workshop_utils.parallel.data import BucketedDataParallel, UnusedParameters
from workshop_utils.parallel.sharded import FullySharded, ShardedGradients, ShardedOptimizer

pytestmark = pytest.mark.processes

SMALL = 400  # bytes of a bucket
STAGES = (1, 2, 3)


def model_and_optimizer(stage, module, communicator, kind, **options):
    if stage == 1:
        model = BucketedDataParallel(module, communicator, SMALL)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model, ShardedOptimizer(trainable, communicator, kind, **options)
    model = (
        ShardedGradients(module, communicator, SMALL) if stage == 2 else FullySharded(module, communicator)
    )
    return model, model.optimizer(kind, **options)


def trained(communicator, stage, name, optimizer, parts=1):
    """All parameters after training by this rank and the others. Only rank 0 starts with those of seed 0."""
    kind, options = OPTIMIZERS[optimizer]
    module = made(name, seed=communicator.rank)
    model, optimize = model_and_optimizer(stage, module, communicator, kind, **options)
    train(model, optimize, communicator, parts)
    if stage < 3:
        return flat(model.module)
    assert all(each.whole is None for each in model.flats)  # those of frozen units, too
    with model.gathered() as whole:
        return flat(whole)


CASES = [(name, "AdamW", size, 1) for name in MODULES for size in (1, 3)]
CASES += [("tied", optimizer, 3, 1) for optimizer in ("momentum", "Adam", "RMSprop")]
CASES += [("plain", "AdamW", 2, 2)]  # gradients of two backward passes add up


CASES = [(stage, *case) for stage in STAGES for case in CASES]
CASES += [(1, "tied", "Adafactor", 2, 1)]  # which looks at whole matrices: stage 1 shards whole parameters


@pytest.mark.parametrize(("stage", "name", "optimizer", "size", "parts"), CASES)
def test_sharded_equals_serial_from_rank_0s_parameters(stage, name, optimizer, size, parts):
    expected = by_one_process(made(name), optimizer, size)
    results = threads.run(size, lambda communicator: trained(communicator, stage, name, optimizer, parts))
    for parameters in results:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_sharded_processes_over_tcp_train_what_one_process_trains(stage):
    expected = by_one_process(made("tied"), "AdamW", 3)
    arguments = {"stage": stage, "name": "tied", "optimizer": "AdamW"}
    for parameters in on_ranks(3, trained, arguments).values:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


class OfALearner(torch.optim.SGD):
    """Who knows what it does."""


@pytest.mark.parametrize(
    ("stage", "kind", "said"),
    [
        (1, torch.optim.LBFGS, "optimizer is LBFGS; it must be one that is known to treat each parameter by"),
        (2, torch.optim.Muon, "optimizer is Muon, which does not .* AdamW, or ShardedOptimizer"),
        (3, torch.optim.Adafactor, "optimizer is Adafactor, which does not .* AdamW, or ShardedOptimizer"),
        (3, OfALearner, "optimizer is OfALearner, which may not treat every number by itself"),
    ],
)
def test_an_optimizer_that_would_compute_something_else_on_shards_is_refused(stage, kind, said):
    with pytest.raises(ValueError, match=said):
        threads.run(1, lambda communicator: model_and_optimizer(stage, made("plain"), communicator, kind))


def divisible():
    """Every layer has a multiple of 4 numbers, and the second and third are asked for in the backward pass."""
    return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 4)).double()


def one_step(model, optimizer):
    optimizer.zero_grad()
    mse_loss(model(torch.ones(2, 5).double()), torch.ones(2, 4).double()).backward()
    if hasattr(model, "synchronise"):
        model.synchronise()
    optimizer.step()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_sends_what_the_formula_says(stage, size):
    def program(communicator):
        model, optimizer = model_and_optimizer(stage, divisible(), communicator, torch.optim.Adam)
        communicator.traffic.reset()
        one_step(model, optimizer)
        return int(communicator.traffic.bytes_sent.sum())

    nbytes = sum(parameter.nbytes for parameter in divisible().parameters())
    sent = threads.run(size, program)
    # In reduce-scatters, all-gathers and broadcasts of K bytes: (N − 1)/N · K each. In stage 3 the backward pass does
    # not ask for the first layer.
    passes = {1: 3 * nbytes, 2: 2 * nbytes, 3: 3 * nbytes - 8 * (5 * 8 + 8)}
    assert sum(sent) == passes[stage] * (size - 1)
    assert stage == 1 or len(set(sent)) == 1  # in stage 1 owners send, the larger ones more


def held_numbers(optimizer):
    """Of the optimizer's state, without step counters."""
    return sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim() > 0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_between_steps_each_stage_holds_its_share_of_parameters_gradients_and_state(size):
    whole = sum(parameter.numel() for parameter in divisible().parameters())

    def program(communicator):
        for stage in STAGES:
            module = divisible()
            model, optimizer = model_and_optimizer(stage, module, communicator, torch.optim.Adam)
            one_step(model, optimizer)
            parameters = {
                p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()
            }
            own = optimizer.own if stage == 1 else optimizer
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            if stage == 1:
                assert sum(gradient.numel() for gradient in gradients) == whole
                # The largest parameter, and a bias.
                assert abs(held_numbers(own) - 2 * whole / size) <= 2 * 72
                continue
            assert gradients == []
            shards = [flat.shard for flat in model.flats]
            assert sum(shard.grad.untyped_storage().nbytes() for shard in shards) == 8 * whole / size
            assert held_numbers(own) == 2 * whole / size
            if stage == 2:
                assert sum(parameters.values()) == 8 * whole
            else:
                assert sum(parameters.values()) == 8 * len(parameters)  # one NaN each
                assert sum(shard.untyped_storage().nbytes() for shard in shards) == 8 * whole / size

    threads.run(size, program)


def test_at_most_one_unit_is_whole_at_a_time():
    def program(communicator):
        model, optimizer = model_and_optimizer(3, divisible(), communicator, torch.optim.SGD)
        seen = []
        for layer in model.module:
            count = lambda *_: seen.append(sum(flat.whole is not None for flat in model.flats))  # noqa: E731
            layer.register_forward_pre_hook(count)
            layer.weight.register_hook(count)
        one_step(model, optimizer)
        seen.append(sum(flat.whole is not None for flat in model.flats))
        return seen

    for seen in threads.run(2, program):
        assert seen == [1, 1, 1, 1, 1, 0, 0]  # of the first layer the backward pass asks for nothing


def test_what_was_gathered_is_let_go_of_after_a_look_at_all_of_it_and_a_forward_pass_that_fails():
    def program(communicator):
        model = FullySharded(divisible(), communicator)
        with model.gathered():
            assert all(flat.whole is not None for flat in model.flats)
        assert all(flat.whole is None for flat in model.flats)
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 3).double())
        assert all(flat.whole is None for flat in model.flats)

    threads.run(2, program)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_parameter_without_a_gradient_is_named(stage, to_none):
    def program(communicator):
        module = nn.ModuleDict({"used": nn.Linear(5, 3), "idle": nn.Linear(5, 3)}).double()
        module.forward = lambda inputs: module["used"](inputs)
        model, optimizer = model_and_optimizer(stage, module, communicator, torch.optim.SGD)
        optimizer.zero_grad(set_to_none=to_none)
        model(torch.ones(1, 5).double()).sum().backward()
        optimizer.step()

    with pytest.raises(UnusedParameters, match=r"idle\.(weight|bias).* had no part in this step on rank 0"):
        threads.run(1, program)
