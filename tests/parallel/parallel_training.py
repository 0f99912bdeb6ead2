"""What tests of data parallelism share: small modules, batches, and training by one process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from workshop_utils.comm.communicator import Communicator

STEPS = 3
EACH = 4  # examples a rank
INPUTS, OUTPUTS = 5, 3

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
}


class Tied(nn.Module):
    """Two layers of it have the same weight, at both ends of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 7)
        self.head = nn.Linear(7, 3, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of shape (batch, 3)."""
        return self.head(self.last(self.between(self.first(inputs).tanh()).tanh()).tanh())


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 3))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    for parameter in module[2].parameters():
        parameter.requires_grad = False
    module[4].bias.requires_grad = False
    return module


def nested() -> nn.Module:
    """Fewer numbers in some layers than there are ranks, and a layer that is used twice."""
    twice = nn.Linear(5, 5)
    return nn.Sequential(nn.Sequential(twice, nn.Tanh(), twice), nn.Linear(5, 1, bias=False), nn.Linear(1, 3))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "tied": Tied,
    "frozen": frozen,
    "nested": nested,
}


_ONE_AT_A_TIME = threading.Lock()  # ranks may be threads, and PyTorch has one generator for all


def made(name: str, seed: int = 0) -> nn.Module:
    """A module of MODULES in float64, the same for the same seed."""
    with _ONE_AT_A_TIME, torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODULES[name]().double()


def batches(size: int, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of all `size` ranks together."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(size * EACH, INPUTS, dtype=torch.float64, generator=generator)
        yield inputs, torch.randn(size * EACH, OUTPUTS, dtype=torch.float64, generator=generator)


def share(tensor: Tensor, rank: int) -> Tensor:
    """This rank's examples."""
    return tensor[rank * EACH : (rank + 1) * EACH]


def flat(module: nn.Module) -> Tensor:
    """All parameters end to end."""
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in module.parameters()])


def by_one_process(module: nn.Module, optimizer: str, size: int) -> Tensor:
    """The parameters after training on what `size` ranks would train on."""
    module = copy.deepcopy(module)
    kind, options = OPTIMIZERS[optimizer]
    optimize = kind([p for p in module.parameters() if p.requires_grad], **options)
    for inputs, targets in batches(size):
        optimize.zero_grad()
        mse_loss(module(inputs), targets).backward()
        optimize.step()
    return flat(module)


def train(model: Any, optimizer: Any, communicator: Communicator, parts: int = 1) -> None:
    """Train a parallel model on this rank's share, of which each backward pass has one of `parts`."""
    for batch in batches(communicator.size):
        inputs, targets = (share(tensor, communicator.rank).chunk(parts) for tensor in batch)
        optimizer.zero_grad()
        for part in range(parts):
            (mse_loss(model(inputs[part]), targets[part]) / parts).backward()
        if hasattr(model, "synchronise"):
            model.synchronise()
        optimizer.step()


def divisible() -> nn.Module:
    """Every layer has a multiple of 4 rows."""
    return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 4)).double()


def one_step(model: Any, optimizer: Any) -> None:
    """One step of the module `divisible`."""
    optimizer.zero_grad()
    mse_loss(model(torch.ones(2, 5).double()), torch.ones(2, 4).double()).backward()
    if hasattr(model, "synchronise"):
        model.synchronise()
    optimizer.step()


def held_numbers(optimizer: Any) -> int:
    """Of the optimizer's state, without step counters."""
    return sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim() > 0)
