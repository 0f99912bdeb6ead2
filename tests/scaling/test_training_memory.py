"""The formulas for a worker's memory and work, held against PyTorch and against what others published."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from workshop_utils.scaling.compute import training_flops
from workshop_utils.scaling.memory import (
    mixed_precision_adam,
    mlp_activation_nbytes,
    training_memory,
    zero_memory,
)
from workshop_utils.scaling.published import PEAK_FLOPS_PER_SECOND, TRAINING_RUNS

WIDTHS = (13, 7, 10)


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in zip((5, *WIDTHS), WIDTHS, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("sgd", lambda parameters: torch.optim.SGD(parameters, 0.1)),
        ("momentum", lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)),
        ("adam", torch.optim.Adam),
    ],
)
def test_the_formulas_count_what_pytorch_keeps(name, optimizer):
    model = network()
    parameters = list(model.parameters())
    kept = optimizer(parameters)
    cross_entropy(model(torch.rand(3, 5)), torch.tensor([0, 1, 2])).backward()
    kept.step()
    expected = training_memory(sum(parameter.numel() for parameter in parameters), name)
    state = [
        value
        for of_parameter in kept.state.values()
        for value in of_parameter.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0  # Adam's step counter is one number
    ]
    assert nbytes(parameters) == expected.parameters
    assert nbytes(parameter.grad for parameter in parameters) == expected.gradients
    assert nbytes(state) == expected.optimizer
    assert expected.total == expected.parameters + expected.gradients + expected.optimizer


@pytest.mark.parametrize("batch", [1, 11])
def test_the_activations_are_those_that_the_backward_pass_keeps(batch):
    model, inputs = network(), torch.rand(batch, 5)
    known = {parameter.data_ptr() for parameter in model.parameters()} | {inputs.data_ptr()}
    saved: dict[int, int] = {}

    def pack(tensor):
        if tensor.data_ptr() not in known and tensor.is_floating_point() and tensor.dim() == 2:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = cross_entropy(model(inputs), torch.zeros(batch, dtype=torch.long))
    assert sum(saved.values()) == mlp_activation_nbytes(batch, WIDTHS)
    del loss


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="optimizer is 'adamw'; it must be one of sgd, momentum, adam"):
        training_memory(1, "adamw")


def test_mixed_precision_takes_16_bytes_a_parameter_as_in_the_zero_paper():
    # Rajbhandari et al. (2020), section 3.1: GPT-2 with 1.5 billion parameters needs at least 24 GB.
    assert mixed_precision_adam(1.5e9).total == 24e9


def test_each_stage_of_zero_shards_one_thing_more() -> None:
    # Rajbhandari et al. (2020), figure 1, in bytes a parameter, here of 4 bytes each and with 4 workers.
    totals = [zero_memory(1, 4, stage).total for stage in (0, 1, 2, 3)]
    assert totals == [16, 4 + 4 + 2, 4 + 1 + 2, 1 + 1 + 2]
    assert zero_memory(10, 1, 3, "momentum") == training_memory(10, "momentum")


def test_a_stage_or_number_of_workers_that_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="stage is 4; it must be 0, 1, 2 or 3"):
        zero_memory(1, 2, 4)
    with pytest.raises(ValueError, match="workers is 0; there must be at least 1"):
        zero_memory(1, 0, 3)


def test_the_work_of_gpt_3_is_that_of_its_paper():
    # Brown et al. (2020), table D.1: 174.6 billion parameters, 300 billion tokens, 3.14e23 operations.
    assert training_flops(174.6e9, 300e9) == pytest.approx(3.14e23, rel=0.01)


@pytest.mark.parametrize("run", TRAINING_RUNS, ids=lambda run: run.name)
def test_published_runs_used_three_to_six_tenths_of_the_peak(run):
    spent = run.device_hours * 3600 * PEAK_FLOPS_PER_SECOND[run.device]
    assert 0.3 < training_flops(run.parameters, run.tokens) / spent < 0.6
