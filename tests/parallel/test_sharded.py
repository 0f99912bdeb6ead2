"""ZeRO-1, -2 and -3 equal training in one process, send what the formulas say, and hold only their chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_training import MODULES, OPTIMIZERS, batches, by_one_process, flat, made, share
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import Communicator
from workshop_utils.parallel.data import BucketedDataParallel, UnusedParameters
from workshop_utils.parallel.separable import treats_alone
from workshop_utils.parallel.sharded import (
    FullySharded,
    ShardedGradients,
    ShardedOptimizer,
    zero_bytes_sent,
)

SMALL = 400  # bytes of a bucket
STAGES = (1, 2, 3)


def model_and_optimizer(
    stage: int, module: nn.Module, communicator: Communicator, kind: Any, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    if stage == 1:
        model = BucketedDataParallel(module, communicator, SMALL)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model, ShardedOptimizer(trainable, communicator, kind, **options)
    if stage == 2:
        sharded: Any = ShardedGradients(module, communicator, SMALL)
    else:
        sharded = FullySharded(module, communicator)
    return sharded, sharded.optimizer(kind, **options)


def parameters_of(model: Any) -> Tensor:
    """All parameters of the whole module."""
    if isinstance(model, FullySharded):
        with model.gathered() as module:
            return flat(module)
    return flat(model.module)


def step(model: Any, inputs: Tensor, targets: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    mse_loss(model(inputs), targets).backward()
    if hasattr(model, "synchronise"):
        model.synchronise()
    optimizer.step()


def trained(communicator: Communicator, stage: int, name: str, kind: Any, **options: Any) -> Tensor:
    """The parameters after training by this rank and the others. Only rank 0 starts with those of seed 0."""
    module = made(name, seed=communicator.rank)
    model, optimizer = model_and_optimizer(stage, module, communicator, kind, **options)
    for inputs, targets in batches(communicator.size):
        step(model, share(inputs, communicator.rank), share(targets, communicator.rank), optimizer)
    return parameters_of(model)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("stage", STAGES)
def test_sharded_equals_serial_from_rank_0s_parameters(stage: int, name: str, size: int) -> None:
    kind, options = OPTIMIZERS["AdamW"]
    expected = by_one_process(made(name), "AdamW", size)
    for found in threads.run(size, lambda communicator: trained(communicator, stage, name, kind, **options)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_sharded_equals_serial_for_any_optimizer(stage: int, optimizer: str) -> None:
    kind, options = OPTIMIZERS[optimizer]
    expected = by_one_process(made("tied"), optimizer, 3)
    for found in threads.run(3, lambda communicator: trained(communicator, stage, "tied", kind, **options)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "name"), [(torch.optim.Adafactor, "tied"), (torch.optim.Muon, "matrices")])
def test_stage_1_shards_whole_parameters_so_optimizers_of_matrices_are_exact(
    kind: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matrices() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))

    monkeypatch.setitem(MODULES, "matrices", matrices)
    expected = by_one_process(made(name), kind, 2, lr=0.05)
    for found in threads.run(2, lambda communicator: trained(communicator, 1, name, kind, lr=0.05)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("stage", "kind", "said"),
    [
        (1, torch.optim.LBFGS, "optimizer is LBFGS, which mixes parameters"),
        (2, torch.optim.Muon, "optimizer is Muon, .* AdamW, or ShardedOptimizer"),
        (3, torch.optim.Adafactor, "optimizer is Adafactor, .* AdamW, or ShardedOptimizer"),
    ],
)
def test_an_optimizer_that_would_compute_something_else_on_shards_is_refused(
    stage: int, kind: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        threads.run(1, lambda communicator: model_and_optimizer(stage, made("plain"), communicator, kind))


class NormClipped(torch.optim.SGD):
    """Scales all gradients by their common norm, so parameters are not treated alone."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "by_parameters", "by_numbers"),
    [
        *((kind, True, True) for kind, _ in OPTIMIZERS.values()),
        (torch.optim.NAdam, True, True),
        (torch.optim.Adafactor, True, False),
        (torch.optim.Muon, True, False),
        (torch.optim.LBFGS, False, False),
        (torch.optim.SparseAdam, False, False),
        (NormClipped, False, False),
    ],
)
def test_what_an_optimizer_treats_alone_is_found_by_trying(
    kind: Any, by_parameters: bool, by_numbers: bool
) -> None:
    assert treats_alone([(2, 3), (4, 2)], [[(2, 3)], [(4, 2)]], kind, {}) is by_parameters
    assert treats_alone([(4, 4)], [[(3,)], [(13,)]], kind, {}) is by_numbers


def test_schedulers_and_groups_of_stage_1_act_on_every_rank() -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(module[0].parameters()), "lr": 0.5}, {"params": list(module[3].parameters())}]

    def train(
        optimizer: torch.optim.Optimizer, step: Callable[[Tensor, Tensor], None], size: int, rank: int
    ) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for inputs, targets in batches(size):
            optimizer.zero_grad()
            step(*(tensor if rank < 0 else share(tensor, rank) for tensor in (inputs, targets)))
            optimizer.step()
            scheduler.step()

    def program(communicator: Communicator) -> Tensor:
        module = made("plain")
        for parameter in module[2].parameters():
            parameter.requires_grad = False
        model = BucketedDataParallel(module, communicator)
        optimizer = ShardedOptimizer(groups(module), communicator, torch.optim.SGD, lr=0.1)

        def step(inputs: Tensor, targets: Tensor) -> None:
            mse_loss(model(inputs), targets).backward()
            model.synchronise()

        train(optimizer, step, communicator.size, communicator.rank)
        assert optimizer.param_groups[0]["lr"] == 0.5**4
        return flat(module)

    alone = made("plain")
    optimizer = torch.optim.SGD(groups(alone), lr=0.1)
    train(optimizer, lambda inputs, targets: mse_loss(alone(inputs), targets).backward(), 2, -1)
    for found in threads.run(2, program):
        torch.testing.assert_close(found, flat(alone), rtol=0, atol=1e-12)


def test_each_rank_saves_and_loads_its_own_part_of_stage_1() -> None:
    def program(communicator: Communicator) -> tuple[int, Tensor, Tensor]:
        module = made("plain")
        model, optimizer = model_and_optimizer(1, module, communicator, torch.optim.Adam, lr=0.1)
        inputs, targets = next(batches(communicator.size))
        step(model, inputs, targets, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        before = flat(module)
        step(model, inputs, targets, optimizer)
        once = flat(module)
        with torch.no_grad():
            for parameter, piece in zip(
                module.parameters(), before.split([p.numel() for p in module.parameters()]), strict=True
            ):
                parameter.copy_(piece.view_as(parameter))
        _, again = model_and_optimizer(1, module, communicator, torch.optim.Adam, lr=0.7)
        again.load_state_dict(saved)
        step(model, inputs, targets, again)
        return len(saved["state"]), once, flat(module)

    for entries, once, again in threads.run(2, program):
        assert 0 < entries < 6
        torch.testing.assert_close(once, again, rtol=0, atol=0)


def divisible() -> nn.Module:
    """Every layer has a multiple of 4 numbers, and the second and third are asked for in the backward pass."""
    return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 4)).double()


def sent_in_a_step(stage: int, size: int) -> tuple[list[int], int]:
    def program(communicator: Communicator) -> tuple[int, int]:
        module = divisible()
        nbytes = sum(parameter.nbytes for parameter in module.parameters())
        model, optimizer = model_and_optimizer(stage, module, communicator, torch.optim.Adam)
        communicator.traffic.reset()
        step(model, torch.ones(2, 5).double(), torch.ones(2, 4).double(), optimizer)
        return int(communicator.traffic.bytes_sent.sum()), nbytes

    sent, nbytes = zip(*threads.run(size, program), strict=True)
    return list(sent), nbytes[0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_stages_1_and_2_send_what_the_formula_says(size: int) -> None:
    sent, nbytes = sent_in_a_step(1, size)
    assert sum(sent) / size == zero_bytes_sent(size, nbytes, 1)  # owners send, so it is the mean that is so
    sent, nbytes = sent_in_a_step(2, size)
    assert set(sent) == {zero_bytes_sent(size, nbytes, 2)}
    assert zero_bytes_sent(size, nbytes, 2) == zero_bytes_sent(size, nbytes, 0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_stage_3_sends_what_the_formula_says_less_a_first_layer_that_is_not_asked_for_again(
    size: int,
) -> None:
    sent, nbytes = sent_in_a_step(3, size)
    first_layer = 8 * (5 * 8 + 8)
    assert set(sent) == {zero_bytes_sent(size, nbytes, 3) - (size - 1) / size * first_layer}


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(ValueError, match="stage is 4; it must be 0, 1, 2 or 3"):
        zero_bytes_sent(2, 1, 4)


def held_numbers(optimizer: torch.optim.Optimizer) -> int:
    """Of the optimizer's state, without step counters."""
    return sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim() > 0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_between_steps_each_stage_holds_its_share_of_parameters_gradients_and_state(size: int) -> None:
    whole = sum(parameter.numel() for parameter in divisible().parameters())

    def program(communicator: Communicator) -> None:
        for stage in STAGES:
            module = divisible()
            model, optimizer = model_and_optimizer(stage, module, communicator, torch.optim.Adam)
            step(model, torch.ones(2, 5).double(), torch.ones(2, 4).double(), optimizer)
            parameters = {
                p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()
            }
            own = optimizer._own if isinstance(optimizer, ShardedOptimizer) else optimizer
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            if stage == 1:
                assert sum(gradient.numel() for gradient in gradients) == whole
                assert (
                    abs(held_numbers(own) - 2 * whole / size) <= 2 * 72
                )  # the largest parameter, and a bias
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


def test_at_most_one_unit_is_whole_at_a_time() -> None:
    def program(communicator: Communicator) -> list[int]:
        model, optimizer = model_and_optimizer(3, divisible(), communicator, torch.optim.SGD)
        seen: list[int] = []
        for layer in model.module:
            count = lambda *_: seen.append(sum(flat.whole is not None for flat in model.flats))  # noqa: E731
            layer.register_forward_pre_hook(count)
            layer.weight.register_hook(count)
        step(model, torch.ones(2, 5).double(), torch.ones(2, 4).double(), optimizer)
        seen.append(sum(flat.whole is not None for flat in model.flats))
        return seen

    for seen in threads.run(2, program):
        assert seen == [1, 1, 1, 1, 1, 0, 0]  # of the first layer the backward pass asks for nothing


def test_a_forward_pass_that_fails_lets_go_of_what_it_had_gathered() -> None:
    def program(communicator: Communicator) -> None:
        model = FullySharded(divisible(), communicator)
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 3).double())
        assert all(flat.whole is None for flat in model.flats)

    threads.run(2, program)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_two_backward_passes_add_up(stage: int) -> None:
    expected = by_one_process(made("plain"), "AdamW", 2)

    def program(communicator: Communicator) -> Tensor:
        kind, options = OPTIMIZERS["AdamW"]
        model, optimizer = model_and_optimizer(stage, made("plain"), communicator, kind, **options)
        for batch in batches(communicator.size):
            inputs, targets = (share(tensor, communicator.rank) for tensor in batch)
            optimizer.zero_grad()
            losses = [mse_loss(model(inputs[half]), targets[half]) / 2 for half in (slice(2), slice(2, 4))]
            for loss in losses:  # both forward passes before both backward passes
                loss.backward()
            optimizer.step()
        return parameters_of(model)

    for found in threads.run(2, program):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_parameter_without_a_gradient_is_named(stage: int, to_none: bool) -> None:
    def program(communicator: Communicator) -> None:
        module = nn.ModuleDict({"used": nn.Linear(5, 3), "idle": nn.Linear(5, 3)}).double()
        module.forward = lambda inputs: module["used"](inputs)  # type: ignore[method-assign]
        model, optimizer = model_and_optimizer(stage, module, communicator, torch.optim.SGD)
        optimizer.zero_grad(set_to_none=to_none)
        model(torch.ones(1, 5).double()).sum().backward()
        optimizer.step()

    with pytest.raises(UnusedParameters, match=r"idle\.(weight|bias).* had no part in this step on rank 0"):
        threads.run(1, program)


class Blocks(nn.Module):
    """A norm whose parameters belong to no unit, two blocks, and a head that is tied to the first layer."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.first = nn.Linear(5, 4, device=device, dtype=torch.float64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6, device=device), nn.Tanh(), nn.Linear(6, 4, device=device)).double()
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(4, device=device, dtype=torch.float64)
        self.head = nn.Linear(5, 4, device=device, dtype=torch.float64)
        self.head.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of shape (batch, 3)."""
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return (self.norm(hidden) @ self.head.weight)[:, :3] + self.head.bias[:3]


@pytest.mark.parametrize("units", ["children", "blocks", "nested", "none", "all"])
def test_any_choice_of_units_equals_serial(units: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "blocks", Blocks)
    expected = by_one_process(made("blocks"), "Adam", 3)

    def program(communicator: Communicator) -> Tensor:
        module = made("blocks", seed=communicator.rank)
        chosen = {
            "children": None
            if not hasattr(module, "blocks")
            else [module.first, *module.blocks, module.norm],
            "blocks": list(module.blocks),
            "nested": [module.blocks[0], module.blocks[0][2], module.blocks[1][0]],
            "none": [],
            "all": [module],
        }[units]
        model = FullySharded(module, communicator, chosen)
        kind, options = OPTIMIZERS["Adam"]
        optimizer = model.optimizer(kind, **options)
        for inputs, targets in batches(communicator.size):
            step(model, share(inputs, communicator.rank), share(targets, communicator.rank), optimizer)
        return parameters_of(model)

    for found in threads.run(3, program):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_unit_that_is_no_submodule_is_refused() -> None:
    with pytest.raises(ValueError, match="units has a Tanh that is not a submodule"):
        threads.run(1, lambda communicator: FullySharded(divisible(), communicator, [nn.Tanh()]))


def test_a_module_on_meta_is_materialised_unit_by_unit_and_starts_as_rank_0_draws_it() -> None:
    def program(communicator: Communicator) -> Tensor:
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        model = FullySharded(module, communicator)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        step(model, torch.eye(5).double(), torch.ones(5, 3).double(), optimizer)
        return parameters_of(model)

    first, second = threads.run(2, program)
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert first.unique().numel() > 40


def test_a_module_on_meta_that_cannot_be_initialised_or_shares_across_units_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, device="meta"))

    with pytest.raises(
        ValueError, match="layer '0', a Bare, is on the device 'meta' and has no reset_parameters"
    ):
        threads.run(1, lambda communicator: FullySharded(nn.Sequential(Bare()), communicator))

    def shared(communicator: Communicator) -> None:
        module = Blocks("meta")
        FullySharded(module, communicator, [module.first])

    with pytest.raises(ValueError, match=r"first\.weight is shared by two units and on the device 'meta'"):
        threads.run(1, shared)
