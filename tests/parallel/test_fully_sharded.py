"""FullySharded equals training in one process, sends what the formula says, and holds its rows alone."""

import copy
import threading
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from parallel_training import (
    MODULES,
    OPTIMIZERS,
    by_one_process,
    divisible,
    held_numbers,
    made,
    one_step,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from workshop_utils import on_ranks
from workshop_utils.comm import threads
from workshop_utils.comm.communicator import CommunicationError
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel import gpt
from workshop_utils.parallel.data import UnusedParameters
from workshop_utils.parallel.fully_sharded import FullySharded

pytestmark = pytest.mark.processes

SIZES = gpt.GPTSizes(layers=3, width=12, heads=3, sequence=6, vocabulary=7)


def trained(communicator, name, parts=1, **options):
    """All parameters after training by this rank and the others. Only rank 0 starts with those of seed 0."""
    kind, of_optimizer = OPTIMIZERS["AdamW"]
    module = made(name, seed=communicator.rank)
    names = [name for name, _ in module.named_parameters()]
    with FullySharded(module, communicator, **options) as model:
        optimize = kind([each for each in model.parameters() if each.requires_grad], **of_optimizer)
        train(model, optimize, communicator, parts)
        state = model.full_state_dict()
    return torch.cat([state[name].reshape(-1) for name in names])


CASES = [(name, size, 1) for name in MODULES for size in (1, 2, 3)]
CASES += [("plain", 2, 2)]  # gradients of two backward passes add up
WAYS = [{}, {"prefetch": False}, {"reshard_after_forward": False}]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("name", "size", "parts"), CASES)
def test_sharded_equals_serial_from_rank_0s_parameters(name, size, parts, way):
    expected = by_one_process(made(name), "AdamW", size)
    for parameters in threads.run(size, lambda each: trained(each, name, parts, **way)):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


def test_sharded_processes_over_tcp_train_what_one_process_trains():
    expected = by_one_process(made("tied"), "AdamW", 3)
    for parameters in on_ranks(3, trained, {"name": "tied"}).values:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


# A GPT, wrapped by block.


class Checkpointed(nn.Module):
    """A block whose activations, or those of whose MLP alone, are computed again in the backward pass."""

    def __init__(self, block, whole, reentrant):
        super().__init__()
        self.block, self.whole, self.reentrant = block, whole, reentrant

    def forward(self, x):
        if self.whole:
            return checkpoint(self.block, x, use_reentrant=self.reentrant)
        x = x + self.block.attention(self.block.norm1(x))
        return x + checkpoint(lambda y: self.block.mlp(self.block.norm2(y)), x, use_reentrant=self.reentrant)


def model_of(how="plain", dtype=torch.float64):
    model = gpt.GPT(SIZES, dtype=dtype)
    layers = model.layers
    if how == "tied":
        layers[-1].vocabulary.weight = layers[0].token.weight
    elif how == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "norm" in name or name.startswith("layers.3.mlp")
        layers[2].requires_grad_(False)
    elif how.startswith("checkpoint"):
        for index in range(1, 4):
            layers[index] = Checkpointed(layers[index], "block" in how, "reentrant" in how)
    return model


def units_of(model):
    """Its blocks; of one that is checkpointed as a whole, what is called again in the backward pass."""
    return [each.block if getattr(each, "whole", False) else each for each in list(model.layers)[1:-1]]


def half_of(rank, size):
    tokens, targets = (each % 7 for each in gpt.batch_of(gpt.manual(), 1, 2 * size, 6))
    return tokens[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]


HOWS = ("plain", "tied", "frozen", "checkpoint mlp", "checkpoint block", "checkpoint block reentrant")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("how", HOWS)
def test_gradients_are_rows_of_those_of_one_process_added_up_over_two_passes(how, size):
    alone = model_of(how)
    for rank in range(size):
        tokens, targets = half_of(rank, size)
        (2 * gpt.cross_entropy(alone(tokens), targets) / size).backward()

    def program(communicator):
        tokens, targets = half_of(communicator.rank, size)
        module = model_of(how)
        ignored = [module.layers[1].norm1, module.layers[-1].norm.weight] if how == "plain" else []
        replicated = (
            {"layers.1.norm1.weight", "layers.1.norm1.bias", "layers.4.norm.weight"} if ignored else set()
        )
        with FullySharded(module, communicator, units=units_of(module), ignored=ignored) as model:
            for _ in range(2):
                gpt.cross_entropy(model(tokens), targets).backward()
            assert [name for name, _ in module.named_parameters()] == [
                name for name, _ in alone.named_parameters()
            ]
            for (name, whole), shard in zip(alone.named_parameters(), module.parameters(), strict=True):
                rows = (whole, whole.grad)
                if name not in replicated:
                    parts = [None if each is None else each.chunk(size) for each in rows]
                    none = whole[:0]
                    at = communicator.rank
                    rows = [None if part is None else part[at] if at < len(part) else none for part in parts]
                torch.testing.assert_close(shard.detach(), rows[0].detach(), rtol=0, atol=0)
                if rows[1] is None:
                    assert shard.grad is None
                else:
                    torch.testing.assert_close(shard.grad, rows[1].detach(), rtol=0, atol=1e-12)
                assert module.state_dict()[name].shape == shard.shape

    threads.run(size, program)


def test_whole_parameters_are_let_go_of_in_evaluation_and_after_failures():
    def program(communicator):
        module = model_of()
        tokens, _ = half_of(communicator.rank, 2)
        with FullySharded(module, communicator, units=units_of(module)) as model, torch.no_grad():
            first, second = model(tokens), model(tokens)
            expected = model_of()(tokens)
            torch.testing.assert_close(first, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(second, expected, rtol=0, atol=1e-12)
            assert held(model) == 0
        with FullySharded(divisible(), communicator) as model:
            with pytest.raises(RuntimeError, match="shapes"):
                model(torch.ones(1, 3).double())
            assert held(model) == 0
            one_step(model, torch.optim.SGD(model.parameters()))

    threads.run(2, program)


def held(model):
    """Bytes of whole parameters."""
    return sum(each.padded.untyped_storage().nbytes() for each in set(model.sharded.values()))


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_mixed_precision_shards_and_gradients_keep_their_dtype(dtype, reduce_dtype):
    tokens = [half_of(rank, 2)[0] for rank in range(2)]
    alone = [model_of(dtype=torch.float32).to(dtype) for _ in range(2)]
    for model, each in zip(alone, tokens, strict=True):
        model(each).float().square().mean().backward()

    def program(communicator):
        module = model_of(dtype=torch.float32)
        options = {"param_dtype": dtype, "reduce_dtype": reduce_dtype}
        with FullySharded(module, communicator, units=units_of(module), **options) as model:
            given = model(tokens[communicator.rank])
            assert given.dtype == dtype
            given.float().square().mean().backward()
            for shard, *others in zip(
                module.parameters(), *(each.parameters() for each in alone), strict=True
            ):
                assert shard.dtype == shard.grad.dtype == torch.float32
                mean = torch.stack([each.grad.float() for each in others]).mean(0)
                rows = mean.chunk(2)
                at = communicator.rank
                expected = rows[at] if at < len(rows) else mean[:0]
                atol = 0.0 if reduce_dtype != torch.float16 else 2e-3
                torch.testing.assert_close(shard.grad, expected, rtol=0, atol=atol)

    threads.run(2, program)


# What is sent, and when.


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("reshard", "passes"), [(False, 2), (True, 3)])
def test_it_sends_what_the_formula_says_and_holds_an_nth_between_steps(size, reshard, passes):
    def program(communicator):
        with FullySharded(divisible(), communicator, reshard_after_forward=reshard) as model:
            optimizer = torch.optim.Adam(model.parameters())
            communicator.traffic.reset()
            one_step(model, optimizer)
            assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 8 * whole / size
            assert sum(p.grad.numel() for p in model.parameters()) == whole / size
            assert held_numbers(optimizer) == 2 * whole / size
            assert held(model) == 0
            return int(communicator.traffic.bytes_sent.sum())

    whole = sum(parameter.numel() for parameter in divisible().parameters())
    for sent in threads.run(size, program):
        assert sent == passes * 8 * whole * (size - 1) / size


@pytest.mark.parametrize("prefetch", [True, False])
def test_at_most_two_units_are_whole_at_a_time(prefetch):
    unit = 8 * (8 * 8 + 8)

    def program(communicator):
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)]).double()
        with FullySharded(module, communicator, prefetch=prefetch) as model:
            seen = []
            for layer in module:
                layer.register_forward_hook(lambda *_: seen.append(held(model) / unit))
                layer.register_full_backward_hook(lambda *_: seen.append(held(model) / unit))
            for _ in range(2):
                model(torch.ones(1, 8).double().requires_grad_()).sum().backward()
            assert len(seen) == 2 * (5 + 5)
            return max(seen)

    assert max(threads.run(2, program)) <= 1 + prefetch  # the next one's memory may not be there yet


def test_events_are_the_same_on_all_ranks_in_the_order_of_the_passes():
    def program(communicator):
        with FullySharded(divisible(), communicator) as model:
            model.events = []
            one_step(model, torch.optim.SGD(model.parameters()))
            assert all(event.start <= event.end for event in model.events)
            return [f"{event.kind} {event.unit}" for event in model.events]

    first, second = threads.run(2, program)
    assert first == second == ["gather 0", "gather 1", "gather 2", "gather 2", "gather 1", "reduce 2", "gather 0",
                               "reduce 1", "reduce 0"]  # fmt: skip


# State, clipping, errors.


def test_a_whole_state_is_what_one_process_has_and_can_be_loaded_by_other_numbers_of_ranks():
    module = model_of("tied")
    state = module.state_dict()

    def program(communicator):
        other = model_of("tied")
        with torch.no_grad():
            for each in other.parameters():
                each.zero_()
        with FullySharded(other, communicator, units=units_of(other)) as model:
            model.load_full_state_dict(state)
            communicator.traffic.reset()
            full = model.full_state_dict()
            sent = sum(communicator.traffic.bytes_sent)
            assert sent == sum(8 * each.width for each in set(model.sharded.values())) * (
                communicator.size - 1
            )
            assert list(full) == list(state)
            assert all(torch.equal(full[name], state[name]) for name in state)
            assert full["layers.0.token.weight"] is full["layers.4.vocabulary.weight"]
            with pytest.raises(
                ValueError, match=r"layers\.0\.token\.weight has shape \(2, 2\); it must be \(7, 12\)"
            ):
                model.load_full_state_dict(state | {"layers.0.token.weight": torch.ones(2, 2)})
            with pytest.raises(RuntimeError, match="Missing key"):
                model.load_full_state_dict({})

    for size in (1, 3):
        threads.run(size, program)


def test_a_parameter_without_a_gradient_is_named():
    def program(communicator):
        module = nn.ModuleDict({"used": nn.Linear(5, 3), "idle": nn.Linear(5, 3)}).double()
        module.forward = lambda inputs: module["used"](inputs)
        with FullySharded(module, communicator) as model:
            model(torch.ones(1, 5).double()).sum().backward()

    with pytest.raises(UnusedParameters, match=r"idle\.(weight|bias).* had no part in this step on rank 0"):
        threads.run(1, program)


REFUSED = {
    r"units has a Linear that is not within the module": (nn.Linear(3, 2), {"units": [nn.Linear(1, 1)]}),
    r"units has a ModuleList, which is never called": (
        blocks := nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(3, 2)])}),
        {"units": [*blocks.children()]},
    ),
    r"max_norm of embedding '0' is 1\.0; it must be None": (
        nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)),
        {},
    ),
    r"weight is complex; make two real parameters": (nn.Linear(3, 2, dtype=torch.complex64), {}),
    r"reduce_dtype is torch\.bfloat16, .* use torch\.float32": (
        nn.Linear(3, 2),
        {"reduce_dtype": torch.bfloat16},
    ),
    r"reduce_dtype is torch\.int32, .* use torch\.float32": (nn.Linear(3, 2), {"reduce_dtype": torch.int32}),
    r"ignored has a tensor \[3\]; list parameters": (nn.Linear(3, 2), {"ignored": torch.ones(2, 3)}),
    r"ignored has a tensor \[1, 7\]; list parameters": (
        nn.Linear(3, 2),
        {"ignored": [nn.Linear(7, 1, bias=False)]},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_sharded_is_refused(message):
    module, options = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        threads.run(1, lambda each: FullySharded(module, each, **options))


def test_units_are_children_unless_told_and_layers_of_lists_which_are_never_called():
    def program(communicator):
        lists = {
            "blocks": nn.ModuleDict({"deep": nn.ModuleList(nn.Linear(5, 5) for _ in range(2))}),
            "scales": nn.ParameterList([ones]),
        }
        module = nn.ModuleDict({"first": nn.Linear(5, 5), **lists})
        module.forward = lambda x: nn.Sequential(module.first, *module.blocks.deep)(x) * module.scales[0]
        with FullySharded(module, communicator) as model:
            model.events = []
            model(ones)
            return {event.unit for event in model.events}

    ones = torch.ones(5)
    assert threads.run(2, program) == [{"", "first", "blocks.deep.0", "blocks.deep.1"}] * 2


class Layers(nn.Module):
    """Three, of which a pass may leave the last ones out, or fail on the way back."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3)).double()

    def forward(self, x, most=3, fail=None):
        for layer in self.layers[:most]:
            if fail is not None and layer is self.layers[1]:
                x.register_hook(fail)
            x = layer(x).tanh()
        return x


def steps(model, layers):
    """One with each layer frozen in turn, and one of which the activations are computed again."""
    inputs = torch.arange(10).view(2, 5).double().requires_grad_()
    for frozen in (0, 1, 2, None):
        for index, layer in enumerate(layers):
            layer.requires_grad_(index != frozen)
        model(inputs).sum().backward()
    checkpoint(model, inputs, use_reentrant=False).sum().backward()
    return inputs.grad


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_failed_and_shorter_passes_leave_nothing_behind_and_layers_may_be_frozen_between_steps(way):
    alone = Layers()
    copies = [copy.deepcopy(alone) for _ in range(2)]
    expected = steps(alone, alone.layers)

    def fail(_):
        raise ArithmeticError

    def program(communicator):
        module, ones = copies[communicator.rank], np.ones(6)
        inputs = torch.ones(2, 5).double().requires_grad_()
        with FullySharded(module, communicator, units=module.layers, **way) as model:
            with pytest.raises(UnusedParameters):
                model(inputs, most=2).sum().backward()
            model.zero_grad()
            with pytest.raises(ArithmeticError):  # once the last layer's gradient has been reduced
                model(inputs, fail=fail).sum().backward()
            model.zero_grad()
            state = model.full_state_dict()
            assert held(model) == 0
            assert all(torch.equal(state[name], whole) for name, whole in alone.state_dict().items())
            with torch.no_grad():
                model(inputs)
                model(inputs, most=1)  # the second layer is gathered ahead
            ring_all_reduce(communicator, ones)
            assert ones.tolist() == [2] * 6
            torch.testing.assert_close(steps(model, module.layers), expected, rtol=0, atol=1e-12)
            for (name, whole), shard in zip(alone.named_parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(
                    shard.grad, model.sharded[name].cut(whole.grad), rtol=0, atol=1e-12
                )
            module.load_state_dict(module.state_dict(), assign=True)
            with pytest.raises(RuntimeError, match=r"layers\.0\.weight was replaced after sharding"):
                model(inputs)

    threads.run(2, program)


class Rows(nn.Linear):
    """Returns rows of its weight."""

    def forward(self, x):
        return self.weight[: len(x)]


class Head(nn.Module):
    """Whose first layer's weight is used again outside its pass, or returned from it."""

    def __init__(self, way):
        super().__init__()
        kinds = (Rows if way == "returned" else nn.Linear, nn.Linear)
        self.layer, self.last = (kind(5, 5, bias=False).double() for kind in kinds)
        self.way = way

    def forward(self, x):
        y = self.last(self.layer(x))
        return y @ self.layer.weight.T if self.way == "used" else y


OUTSIDE = {
    "used": r"layer\.weight was used outside its unit's pass; leave its module out of units",
    "returned": r"a unit returns a view of layer\.weight; clone it, or leave it out of units",
    "changed": r"parameters of unit 'last' have changed since the forward pass",
}


@pytest.mark.parametrize("way", OUTSIDE)
def test_parameters_used_outside_their_units_pass_or_changed_before_the_backward_pass_are_refused(way):
    inputs = torch.ones(2, 5).double()

    def step(model):
        loss = model(inputs).sum()
        if way == "changed":
            nn.init.ones_(model.module.last.weight)
        loss.backward()

    def program(communicator):
        with FullySharded(Head(way), communicator) as model:
            for _ in range(2):
                with pytest.raises(RuntimeError, match=OUTSIDE[way]):
                    step(model)
            if way == "returned":
                with pytest.raises(RuntimeError, match=OUTSIDE[way]), torch.no_grad():
                    model(inputs)
        if way != "changed":  # with the layer left out of units
            module = copy.deepcopy(alone)
            with FullySharded(module, communicator, units=[module.last]) as model:
                step(model)
                expected = model.sharded["layer.weight"].cut(alone.layer.weight.grad)
                torch.testing.assert_close(module.layer.weight.grad, expected, rtol=0, atol=1e-12)

    alone = Head(way)
    alone(inputs).sum().backward()
    threads.run(2, program)


def test_an_error_of_communication_reaches_who_waits_and_no_thread_is_left():
    def program(communicator):
        with FullySharded(divisible(), communicator) as model:
            if communicator.rank == 1:
                raise ZeroDivisionError
            with pytest.raises(CommunicationError, match="rank 1"):
                one_step(model, torch.optim.SGD(model.parameters()))

    with pytest.raises(ZeroDivisionError):
        threads.run(2, program)
    assert not [each for each in threading.enumerate() if each.name.startswith("workshop-communication")]


class Odd(nn.Module):
    """A scalar, a parameter without rows, and numbers of several sizes in one unit."""

    def __init__(self):
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(0, 3))
        self.empty = nn.Embedding(0, 3)
        self.short = nn.Parameter(torch.ones(5).half())
        self.steps = nn.Parameter(torch.arange(3), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(1, 4).double())

    def forward(self, x):
        return self.scale * (x * self.short.sum() + self.wide.sum() + self.none.sum() + self.steps.sum()) + (
            self.empty(self.steps[:0]).sum()
        )


def test_scalars_and_empty_parameters_are_replicated_and_dtypes_may_be_mixed():
    def program(communicator):
        module = Odd()
        with FullySharded(module, communicator) as model:
            model(torch.ones(1) * (1 + communicator.rank)).sum().backward()
            assert module.scale.grad == 12 + (5 + 10) / 2 - 5
            assert module.short.grad.tolist() == [3.0] * (3 if communicator.rank == 0 else 2)
            assert module.wide.grad.shape == module.wide.shape == (1 - communicator.rank, 4)
            assert module.none.grad.shape == module.empty.weight.grad.shape == (0, 3)
            full = model.full_state_dict()
            with torch.no_grad():
                module.scale.fill_(5)
            assert (full["scale"], full["empty.weight"].shape) == (2, (0, 3))
            assert {name: each.dtype for name, each in module.named_parameters()} == {
                name: each.dtype for name, each in Odd().named_parameters()
            }

    threads.run(2, program)


@dataclass
class Outputs:
    each: torch.Tensor
    cell: torch.Tensor


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 3)

    def forward(self, x):
        each, (_, cell) = self.lstm(x)
        return Outputs(each, cell)


class Twice(nn.Module):
    """A unit that is called twice in a pass, beside one that gives two outputs; some are changed in place."""

    def __init__(self):
        super().__init__()
        self.layer, self.recurrent = nn.Linear(5, 5), Recurrent()
        self.double()

    def forward(self, x):
        outputs = self.recurrent(self.layer(self.layer(x).tanh_()))
        return Outputs(outputs.each.relu_(), outputs.cell)


def loss_of(outputs):
    return outputs.each.square().sum() + outputs.cell.sum()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_units_called_twice_and_two_forward_passes_before_both_backward_passes(way):
    torch.manual_seed(0)
    alone = Twice()
    inputs = torch.randn(2, 4, 5, dtype=torch.float64).requires_grad_()  # 3-D: a linear layer returns a view
    for _ in range(2):
        loss_of(alone(inputs)).backward()
        loss_of(alone(2 * inputs)).backward()
    copies = [Twice() for _ in range(2)]
    for each in copies:
        each.load_state_dict(alone.state_dict())

    def program(communicator):
        module, given = copies[communicator.rank], inputs.detach().clone().requires_grad_()
        with FullySharded(module, communicator, **way) as model:
            for _ in range(2):
                first, second = loss_of(model(given)), loss_of(model(2 * given))
                first.backward()
                second.backward()
            torch.testing.assert_close(given.grad, inputs.grad, rtol=0, atol=1e-12)
            for (name, whole), shard in zip(alone.named_parameters(), module.parameters(), strict=True):
                expected = model.sharded[name].cut(whole.grad)
                torch.testing.assert_close(shard.grad, expected, rtol=0, atol=1e-12)

    threads.run(2, program)


class Beside(nn.Linear):
    """Returns something else, too, or adds its result to it in place."""

    def __init__(self, way):
        super().__init__(5, 5)
        self.way, self.prompt = way, nn.Parameter(torch.ones(2, 5), "ignored" in way)

    def forward(self, x, context):
        y = super().forward(context["x"]) + x
        if self.way == "sum":
            x += y
            return x, x
        others = {
            "input": x.view_as(x),
            "context": context["x"].view_as(x),
            "ignored": self.prompt,
            "view of ignored": self.prompt.view_as(x),
        }
        return y, others[self.way]


class Context(UserDict):
    """No container that PyTorch looks into."""


class AddedBeside(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.beside = nn.Linear(5, 5), Beside(way)

    def forward(self, x):
        x = self.first(x)
        one, other = self.beside(x.view_as(x), Context(x=2 * x))
        return one.mul_(3) * other


@pytest.mark.parametrize("way", ["input", "context", "sum", "ignored", "view of ignored"])
def test_a_unit_that_returns_its_input_or_an_ignored_parameter_is_gathered_once_a_pass(way):
    torch.manual_seed(0)
    alone, x = AddedBeside(way), torch.randn(2, 5)
    copies = [copy.deepcopy(alone) for _ in range(2)]
    optimizer = torch.optim.SGD(alone.parameters())
    for _ in range(2):
        alone(x).sum().backward()
        optimizer.step()

    def program(communicator):
        module = copies[communicator.rank]
        with FullySharded(module, communicator, ignored=[module.beside.prompt]) as model:
            model.events = []
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(2):
                model(x).sum().backward()
                optimizer.step()
            torch.testing.assert_close(model.full_state_dict(), alone.state_dict())
            return [event.unit for event in model.events if event.kind == "gather"]

    assert threads.run(2, program) == [["first", "beside", "beside", "first"] * 2] * 2


def test_a_unit_is_whole_before_earlier_hooks_on_its_output_as_those_of_emulated_devices():
    def program(communicator):
        module, shapes = divisible(), []
        for layer in module:
            note = lambda _, layer=layer: shapes.append(layer.weight.shape)  # noqa: E731
            layer.register_forward_hook(lambda _, __, output, note=note: output.register_hook(note) and None)
        with FullySharded(module, communicator) as model:
            one_step(model, torch.optim.SGD(model.parameters()))
        return shapes

    assert threads.run(2, program) == [[(4, 8), (8, 8), (8, 5)]] * 2
