"""A vector of parameters of which every rank keeps a chunk: what stages 2 and 3 of `sharded` are built of."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from workshop_utils.comm.communicator import Communicator, as_array, chunk
from workshop_utils.comm.ring import ring_all_gather, ring_reduce_scatter
from workshop_utils.parallel.data import views


class Flat:
    """Some parameters laid end to end in one vector, cut into N chunks, of which this rank's is the `shard`.

    `shard` is a parameter of its own, which the optimizer takes in their place, and `shard.grad` its gradient. Which
    chunk that is, is what a ring's reduce-scatter leaves here. With `keep`, the whole vector stays, and the shard is
    a view of it. Otherwise it exists only between `gather` and `free`; outside, the parameters keep their shapes,
    without memory, and are NaN.
    """

    def __init__(self, communicator: Communicator, named: dict[str, nn.Parameter], keep: bool) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self._communicator, self._keep = communicator, keep
        self._gradient: Tensor | None = None  # of the whole vector, while it comes in
        self._came: set[nn.Parameter] = set()
        self._is_reduced = False  # in this step
        whole = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        self.whole: Tensor | None = whole
        self._dtype, self._length = whole.dtype, len(whole)
        mine = torch.from_numpy(self._mine(as_array(whole)))
        self.shard = nn.Parameter(mine if keep else mine.clone(), self.parameters[0].requires_grad)
        self._place_parameters()
        if not keep:
            self.free()

    def _mine(self, vector: np.ndarray) -> np.ndarray:
        part: np.ndarray = chunk(vector, self._communicator.rank + 1, self._communicator.size)
        return part

    def _place_parameters(self) -> None:
        assert self.whole is not None
        for parameter, view in views(self.whole, self.parameters).items():
            parameter.data = view

    def gather(self) -> None:
        """Put the whole vector together from all ranks' shards, as an all-gather."""
        if self.whole is None:
            self.whole = torch.empty(self._length, dtype=self._dtype)
            self._mine(as_array(self.whole))[:] = as_array(self.shard)
            self._place_parameters()
        elif not self._keep:
            return  # it is whole already
        ring_all_gather(self._communicator, self.whole)

    def free(self) -> None:
        """Let go of the whole vector."""
        for parameter in self.parameters:
            parameter.data = torch.full((), torch.nan, dtype=self._dtype).expand(parameter.shape)
        self.whole = None

    def take(self, parameter: nn.Parameter) -> bool:
        """Move the parameter's gradient here; with the last one, reduce them. Returns whether that was it."""
        assert parameter.grad is not None
        if self._gradient is None:
            self._gradient = torch.empty(self._length, dtype=self._dtype)
        views(self._gradient, self.parameters)[parameter].copy_(parameter.grad)
        parameter.grad = None
        self._came.add(parameter)
        if len(self._came) < len(self.parameters):
            return False
        self._reduce(self._gradient)
        self._gradient, self._is_reduced = None, True
        self._came.clear()
        return True

    def _reduce(self, gradient: Tensor) -> None:
        """Leave in `shard.grad` this rank's chunk of the mean gradient, on top of what was there."""
        chunk_of_mean = torch.from_numpy(ring_reduce_scatter(self._communicator, as_array(gradient), "mean"))
        if self.shard.grad is None:
            self.shard.grad = chunk_of_mean.clone()  # a copy, so that the whole gradient can go
        else:
            self.shard.grad += chunk_of_mean

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the whole vector."""
        return (
            self.whole is not None
            and tensor.untyped_storage().data_ptr() == self.whole.untyped_storage().data_ptr()
        )

    def missing(self) -> list[str]:
        """The names of parameters whose gradients have not come in this step."""
        if not self.shard.requires_grad or (self._is_reduced and not self._came):
            return []
        return [name for name, p in zip(self.names, self.parameters, strict=True) if p not in self._came]

    def end_step(self) -> None:
        """Expect the next step's gradients."""
        self._is_reduced = False
