"""ZeRO-1: what an optimizer keeps, each rank keeps for its share of the parameters.

Plain data parallelism keeps everything N times. The three stages of ZeRO cut away one kind of copy each. With K bytes
of parameters and an optimizer that keeps s numbers a parameter (Adam: 2), a rank holds between two steps, and sends in
a step, on average over the ranks:

| | parameters | gradients | optimizer | sent |
| --- | --- | --- | --- | --- |
| `data.NaiveDataParallel` and its successors | K | K | s·K | 2 (N − 1)/N · K |
| ZeRO-1: `ShardedOptimizer`, on top of them | K | K | s·K/N | 3 (N − 1)/N · K |
| ZeRO-2 | K | K/N | s·K/N | 2 (N − 1)/N · K |
| ZeRO-3: `fully_sharded.FullySharded` | K/N | K/N | s·K/N | 3 (N − 1)/N · K |

Stage 1 all-reduces gradients and then broadcasts what each owner has updated. Stage 2 needs only a reduce-scatter of
gradients and an all-gather of parameters, which together are what an all-reduce is; FullySharded sends as much where it
does not reshard after the forward pass. Stage 3 gathers parameters twice, for the forward and for the backward pass,
and keeps neither.

Source: Rajbhandari et al. (2020), "ZeRO: memory optimizations toward training trillion parameter models", sections 5
and 7.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.optim import Optimizer

from workshop_utils.comm.communicator import Communicator, as_array
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.tree import tree_broadcast
from workshop_utils.parallel import data

# PyTorch's optimizers treat every parameter by itself, but for these.
OTHERS = {optim.LBFGS, optim.SparseAdam}


class ShardedOptimizer:
    """ZeRO-1: each parameter has an owner, the rank that keeps its optimizer state, updates it, and tells the others.

    Gradients are averaged beforehand, by one of the classes of `data`. Owners have whole parameters, so the optimizer
    may do with a parameter what it likes, as Muon and Adafactor do with a matrix; it may not mix parameters, as LBFGS
    does.

    Args:
        parameters: of the model; the same on all ranks, as experts that are cut are not.
        communicator: of these ranks.
        optimizer: the class of the optimizer; `options` are its arguments.

    Attributes:
        own: the optimizer of this rank's parameters.

    Raises:
        ValueError: if the optimizer is not known to treat every parameter by itself, or parameters differ.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        communicator: Communicator,
        optimizer: type[Optimizer],
        **options: Any,
    ) -> None:
        if not optimizer.__module__.startswith("torch.optim") or optimizer in OTHERS:
            right = "one that is known to treat each parameter by itself, such as AdamW"
            raise ValueError(f"optimizer is {optimizer.__name__}; it must be {right}: ranks have some each")
        self.communicator = communicator
        self._owner = owners(list(parameters), communicator.size)
        sums = np.array([checksum(parameter) for parameter in self._owner])
        bounds = np.concatenate([sums, -sums])
        ring_all_reduce(communicator, bounds, "max")
        if differ := np.count_nonzero(bounds[: len(sums)] + bounds[len(sums) :]):
            right = "make them alike first, as NaiveDataParallel does, and leave out experts that are cut"
            raise ValueError(f"{differ} of {len(sums)} parameters differ between ranks; {right}")
        mine = [parameter for parameter, owner in self._owner.items() if owner == communicator.rank]
        self.own: Optimizer = optimizer([{"params": mine}], **options)  # in a group, which may be empty

    def zero_grad(self) -> None:
        """Let go of all gradients, also of those of others' parameters."""
        for parameter in self._owner:
            parameter.grad = None

    def step(self) -> None:
        """Update the own parameters, then give every parameter from its owner to all."""
        self.own.step()
        for parameter, owner in self._owner.items():
            with data.contiguous(parameter) as whole_parameter:
                tree_broadcast(self.communicator, whole_parameter, root=owner)


def checksum(parameter: nn.Parameter) -> int:
    """Of its bytes."""
    return zlib.crc32(as_array(parameter.detach().contiguous().view(-1).view(torch.uint8)).data)


def owners(parameters: Sequence[nn.Parameter], size: int) -> dict[nn.Parameter, int]:
    """The owner of each parameter: the largest first, always to the rank that has least so far."""
    load, owner = [0] * size, {}
    for parameter in sorted(parameters, key=lambda each: -each.nbytes):  # stable, so the same on all ranks
        owner[parameter] = rank = load.index(min(load))
        load[rank] += parameter.nbytes
    return owner
