"""Sharded data parallelism: what N ranks would all hold, each holds an N-th of (ZeRO).

Plain data parallelism keeps everything N times. The three stages of ZeRO cut away one kind of copy each. With K bytes
of parameters and an optimizer that keeps s numbers a parameter (Adam: 2), a rank holds between two steps, and sends in
a step, on average over the ranks:

| | parameters | gradients | optimizer | sent |
| --- | --- | --- | --- | --- |
| `data.NaiveDataParallel` and its successors | K | K | s·K | 2 (N − 1)/N · K |
| ZeRO-1: `ShardedOptimizer`, on top of them | K | K | s·K/N | 3 (N − 1)/N · K |
| ZeRO-2: `ShardedGradients` | K | K/N | s·K/N | 2 (N − 1)/N · K |
| ZeRO-3: `FullySharded` | K/N | K/N | s·K/N | 3 (N − 1)/N · K |

Stage 1 all-reduces gradients and then broadcasts what each owner has updated. Stage 2 needs only a reduce-scatter of
gradients and an all-gather of parameters, which together are what an all-reduce is. Stage 3 gathers parameters twice,
for the forward and for the backward pass, and keeps neither. (A linear layer whose input needs no gradient, as the
first one's, is gathered once, so it sends a little less.)

    model = FullySharded(module, communicator)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)

Source: Rajbhandari et al. (2020), "ZeRO: memory optimizations toward training trillion parameter models", sections 5
and 7; for stage 3 also Zhao et al. (2023), "PyTorch FSDP: experiences on scaling fully sharded data parallel".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from workshop_utils.comm.communicator import Communicator, chunk
from workshop_utils.comm.ring import ring_all_gather, ring_reduce_scatter
from workshop_utils.comm.tree import tree_broadcast
from workshop_utils.parallel import data

# PyTorch's optimizers treat every number by itself, but for those that look at whole parameters, and the rest.
BY_PARAMETER = {optim.Adafactor, optim.Muon}
OTHERS = {optim.LBFGS, optim.SparseAdam}


def by_number(optimizer: type[Optimizer]) -> bool:
    """Whether `optimizer` is known to treat every number by itself."""
    return optimizer.__module__.startswith("torch.optim") and optimizer not in BY_PARAMETER | OTHERS


# Stage 1.


class ShardedOptimizer:
    """ZeRO-1: each parameter has an owner, the rank that keeps its optimizer state, updates it, and tells the others.

    Gradients are averaged beforehand, by one of the classes of `data`. Owners have whole parameters, so the optimizer
    may do with a parameter what it likes, as Muon and Adafactor do with a matrix; it may not mix parameters, as LBFGS
    does.

    Args:
        parameters: of the model; the same on all ranks.
        communicator: of these ranks.
        optimizer: the class of the optimizer; `options` are its arguments.

    Attributes:
        own: the optimizer of this rank's parameters.

    Raises:
        ValueError: if the optimizer is not known to treat every parameter by itself.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        communicator: Communicator,
        optimizer: type[Optimizer],
        **options: Any,
    ) -> None:
        if not by_number(optimizer) and optimizer not in BY_PARAMETER:
            right = "one that is known to treat each parameter by itself, such as AdamW"
            raise ValueError(f"optimizer is {optimizer.__name__}; it must be {right}: ranks have some each")
        self.communicator = communicator
        self._owner = owners(list(parameters), communicator.size)
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


def owners(parameters: Sequence[nn.Parameter], size: int) -> dict[nn.Parameter, int]:
    """The owner of each parameter: the largest first, always to the rank that has least so far."""
    load, owner = [0] * size, {}
    for parameter in sorted(parameters, key=lambda each: -each.nbytes):  # stable, so the same on all ranks
        owner[parameter] = rank = load.index(min(load))
        load[rank] += parameter.nbytes
    return owner


# Stages 2 and 3.


Named = dict[str, nn.Parameter]


class Flat:
    """Some parameters laid end to end in one vector, cut into N chunks, of which this rank's is the `shard`.

    `shard` is a parameter of its own, which the optimizer takes in their place, and `shard.grad` its gradient. Which
    chunk that is, is what a ring's reduce-scatter leaves here. With `keep`, the whole vector stays, and the shard is
    a view of it. Otherwise it exists only between `gather` and `free`; outside, the parameters keep their shapes,
    without memory, and are NaN (integers are 0).
    """

    def __init__(self, communicator: Communicator, named: Named, keep: bool) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self._communicator, self._keep = communicator, keep
        self._gradient: Tensor | None = None  # of the whole vector, while it comes in
        self._came: set[nn.Parameter] = set()
        self.is_reduced = False  # in this step
        whole = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        self.whole: Tensor | None = whole
        self._length = len(whole)
        mine = self._mine(whole)
        self.shard = nn.Parameter(mine if keep else mine.clone(), self.parameters[0].requires_grad)
        self._place_parameters()
        if not keep:
            self.free()

    def _mine(self, vector: Tensor) -> Tensor:
        part: Tensor = chunk(vector, self._communicator.rank + 1, self._communicator.size)
        return part

    def _place_parameters(self) -> None:
        assert self.whole is not None
        for parameter, view in data.views(self.whole, self.parameters).items():
            parameter.data = view

    def gather(self) -> None:
        """Put the whole vector together from all ranks' shards, as an all-gather."""
        if self.whole is None:
            self.whole = torch.empty(self._length, dtype=self.shard.dtype)
            self._mine(self.whole).copy_(self.shard.detach())
            self._place_parameters()
        elif not self._keep:
            return  # it is whole already
        ring_all_gather(self._communicator, self.whole)

    def free(self) -> None:
        """Let go of the whole vector."""
        nothing = torch.nan if self.shard.dtype.is_floating_point else 0
        for parameter in self.parameters:
            parameter.data = torch.full((), nothing, dtype=self.shard.dtype).expand(parameter.shape)
        self.whole = None

    def take(self, parameter: nn.Parameter) -> bool:
        """Move the parameter's gradient here; with the last one, reduce them. Returns whether that was it."""
        assert parameter.grad is not None
        if self._gradient is None:
            self._gradient = torch.empty(self._length, dtype=self.shard.dtype)
        data.views(self._gradient, self.parameters)[parameter].copy_(parameter.grad)
        parameter.grad = None
        self._came.add(parameter)
        if len(self._came) < len(self.parameters):
            return False
        self._reduce(self._gradient)
        self._gradient, self.is_reduced = None, True
        self._came.clear()
        return True

    def _reduce(self, gradient: Tensor) -> None:
        """Leave in `shard.grad` this rank's chunk of the mean gradient, on top of what was there."""
        ring_reduce_scatter(self._communicator, gradient, "mean")
        chunk_of_mean = self._mine(gradient)
        if self.shard.grad is None:
            # A copy, so that the whole gradient can go.
            self.shard.grad = chunk_of_mean.clone()
        else:
            self.shard.grad += chunk_of_mean

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the whole vector."""
        at = tensor.untyped_storage().data_ptr()
        return self.whole is not None and at == self.whole.untyped_storage().data_ptr()

    def missing(self) -> list[str]:
        """The names of parameters whose gradients have not come in this step."""
        if not self.shard.requires_grad or (self.is_reduced and not self._came):
            return []
        return [name for name, p in zip(self.names, self.parameters, strict=True) if p not in self._came]


class _Sharded(nn.Module):
    """What stages 2 and 3 share: flats, whose gradients are reduced as the backward pass gives them.

    It communicates in the order in which the passes go, so all ranks must go through the same layers.
    """

    def __init__(self, module: nn.Module, communicator: Communicator) -> None:
        super().__init__()
        self.module = module
        self.flats: list[Flat] = []
        self.communicator = communicator

    def _watch(self, flat: Flat) -> None:
        """Let `flat` take gradients as they come."""
        self.flats.append(flat)
        for parameter in flat.parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, flat=flat: self._on_gradient(flat, p))

    def _on_gradient(self, flat: Flat, parameter: Any) -> None:
        flat.take(parameter)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass."""
        return self.module(*args, **kwargs)

    def optimizer(self, kind: type[Optimizer], **options: Any) -> Optimizer:
        """An optimizer of this kind for the shards: its `step`, `zero_grad`, `state_dict` are those of any other.

        A shard is a piece of several parameters, end to end. So the optimizer must treat every number by itself, as
        SGD, Adam and most others do; and all parameters have the same options.

        Raises:
            ValueError: if it is not known to, as Muon, Adafactor and LBFGS, which look at whole matrices or at
                everything.
        """
        if not by_number(kind):
            does_not = "does not" if kind.__module__.startswith("torch.optim") else "may not"
            refused = f"optimizer is {kind.__name__}, which {does_not} treat every number by itself"
            advice = "use one that does, such as AdamW, or ShardedOptimizer, which shards by whole parameters"
            raise ValueError(f"{refused}; on shards it would compute something else: {advice}")
        made = kind([flat.shard for flat in self.flats if flat.shard.requires_grad], **options)
        made.register_step_pre_hook(self._before_step)
        made.register_step_post_hook(self._after_step)
        return made

    def _before_step(self, *_: Any) -> None:
        data.refuse_unused([name for flat in self.flats for name in flat.missing()], self.communicator)

    def _after_step(self, *_: Any) -> None:
        for flat in self.flats:
            flat.is_reduced = False


class ShardedGradients(_Sharded):
    """ZeRO-2: every rank has all parameters, but only its chunk of the gradients and of the optimizer's state.

    During the backward pass, a bucket of gradients is reduced as soon as it is full, and all but this rank's chunk of
    it is let go. After the optimizer's step, parameters are gathered. A second backward pass before the step adds to
    the gradients, and sends as much again.

    Frozen and tied parameters, buffers: as in `data`. A parameter without a gradient is refused, and all ranks must
    go through the same layers, for that is the order in which they send.

    Args:
        module: on the CPU; of the same structure on all ranks.
        communicator: of these ranks. While a step is under way, nobody else may use it.
        bucket_bytes: about how many bytes of gradients are reduced together, and so held beside the chunks. A bucket is
            closed once it has reached them, so a large parameter makes a larger one.

    Raises:
        ValueError: if `bucket_bytes` is not above zero.
    """

    def __init__(
        self, module: nn.Module, communicator: Communicator, bucket_bytes: int = 25 * data.MEBIBYTE
    ) -> None:
        super().__init__(module, communicator)
        data.broadcast_from_first(communicator, itertools.chain(module.parameters(), module.buffers()))
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for bucket in data.buckets_of(trainable, bucket_bytes):
            self._watch(Flat(communicator, bucket, keep=True))

    def _after_step(self, *_: Any) -> None:
        super()._after_step()
        _gather(self.flats)


class FullySharded(_Sharded):
    """ZeRO-3: of parameters, gradients and optimizer state every rank has its chunk alone.

    The module's children are its units. A unit's parameters are gathered when its forward pass begins, and let go when
    it ends; autograd keeps a note in their place. When the backward pass asks for one, the unit is gathered again, and
    let go once all its gradients have come and have been reduced.

    Frozen and tied parameters as in `data`; what belongs to no child, or to two of them, is gathered around the whole.
    A parameter without a gradient is refused, and all ranks must go through the same layers, for that is the order in
    which they send.

    Args:
        module: on the CPU; of the same structure on all ranks.
        communicator: of these ranks. While a step is under way, nobody else may use it.
    """

    def __init__(self, module: nn.Module, communicator: Communicator) -> None:
        super().__init__(module, communicator)
        self._unit_of: dict[Flat, list[Flat]] = {}  # the flats of a unit, by each of them
        for unit, names in units_of(module).items():
            parameters = {name: p for name, p in module.named_parameters() if name in names}
            buffers = [buffer for name, buffer in module.named_buffers() if name in names]
            data.broadcast_from_first(communicator, [*parameters.values(), *buffers])
            groups: dict[Any, Named] = {}  # of one dtype, all trainable or all frozen
            for name, parameter in parameters.items():
                groups.setdefault((parameter.dtype, parameter.requires_grad), {})[name] = parameter
            flats = [Flat(communicator, group, keep=False) for group in groups.values()]
            for flat in flats:
                self._watch(flat)
                self._unit_of[flat] = flats
            unit.register_forward_pre_hook(partial(_gather, flats))
            unit.register_forward_hook(partial(_free, flats), always_call=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass."""
        with saved_tensors_hooks(self._note, self._look_up):
            return self.module(*args, **kwargs)

    def _note(self, tensor: Tensor) -> Any:
        """What autograd is to keep for the backward pass instead of `tensor`: of a parameter, where it was."""
        flat = next((flat for flat in self.flats if flat.holds(tensor)), None)
        if flat is None:
            return tensor
        return flat, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _look_up(self, noted: Any) -> Tensor:
        """What autograd kept, or the parameter that it took a note of, gathered again if need be."""
        if isinstance(noted, Tensor):
            return noted
        flat, *where = noted
        flat.gather()
        return flat.whole.as_strided(*where)

    def _on_gradient(self, flat: Flat, parameter: Any) -> None:
        if flat.take(parameter):
            _free(self._unit_of[flat])

    def _after_step(self, *_: Any) -> None:
        super()._after_step()
        _free(self.flats)  # frozen units may still be whole

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with all its parameters, to be looked at or saved; all ranks enter the block together.

        Do not call the module inside: it lets its parameters go afterwards.
        """
        _gather(self.flats)
        try:
            yield self.module
        finally:
            _free(self.flats)


def units_of(module: nn.Module) -> dict[nn.Module, list[str]]:
    """The names of each unit's parameters and buffers: what one child alone has is its own, the rest the module's."""
    children: dict[Tensor, list[nn.Module]] = {}  # that have it
    for child in module.children():
        for tensor in itertools.chain(child.parameters(), child.buffers()):
            children.setdefault(tensor, []).append(child)
    units: dict[nn.Module, list[str]] = {module: []}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        owners = children.get(tensor, [])
        units.setdefault(owners[0] if len(owners) == 1 else module, []).append(name)
    return units


def _gather(flats: Iterable[Flat], *_: object) -> None:  # may be a hook, as `_free` may
    for flat in flats:
        flat.gather()


def _free(flats: Iterable[Flat], *_: object) -> None:
    for flat in flats:
        flat.free()
