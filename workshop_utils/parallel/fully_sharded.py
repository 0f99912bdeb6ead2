"""Fully sharded data parallelism by parameter: ZeRO-2 and ZeRO-3, as PyTorch's FSDP2 does it.

    model = FullySharded(module, communicator, units=module.blocks, param_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())     # of shards
    loss_of(model(inputs)).backward()                     # each shard's .grad is now the mean of all ranks
    optimizer.step()

A *unit* is a module whose parameters are gathered and reduced together. What happens to one with K bytes of parameters:

| | on the main thread | meanwhile, on the communication thread |
| --- | --- | --- |
| forward | wait for the unit; its work; let go of it | all-gather of the next unit |
| backward | wait for the unit; its work; let go of it | all-gather of the one before, reduce-scatter of the one after |

Each of these collectives sends (N − 1)/N · K. Between two steps a rank holds an N-th of parameters, gradients and
optimizer state; within one, beside them, two whole units at most, and the whole gradients of two.

Sources: Rajbhandari et al. (2020), "ZeRO: memory optimizations toward training trillion parameter models", section 5;
Zhao et al. (2023), "PyTorch FSDP: experiences on scaling fully sharded data parallel", sections 3 and 4;
`torch.distributed.fsdp.fully_shard`, whose rules are these unless a docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_flatten, tree_map

from workshop_utils.comm.communicator import Communicator, as_array
from workshop_utils.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from workshop_utils.parallel import data


class Event(NamedTuple):
    """What the communication thread did for a unit: `kind` is "gather" or "reduce"; seconds of `communicator.now`."""

    kind: str
    unit: str
    start: float
    end: float


class ShardedParameter:
    """A parameter of which this rank keeps the `shard`, some of its rows, and now and then has the `whole`.

    Rows are cut as torch.chunk cuts them: ⌈rows / N⌉ to each rank while there are some, so the last ones may get fewer,
    or none. Both are parameters; one of them stands in the module.

    Attributes:
        places: where, as modules and names in them.
        rows: of a full shard; `width` is how many numbers it has.
        padded: the memory of `whole`, (N, width), in the dtype in which the unit computes.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, communicator: Communicator, dtype: torch.dtype | None
    ) -> None:
        self.places: list[tuple[nn.Module, str]] = []
        self.name, self.shape, self._rank = name, parameter.shape, communicator.rank
        self.rows = max(1, -(-len(parameter) // communicator.size))
        self.width = self.rows * parameter[:1].numel()
        self.shard = nn.Parameter(self.cut(parameter), parameter.requires_grad)
        dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        self.padded = torch.empty(communicator.size, self.width, dtype=dtype)
        # Of `data`, so that filling the memory again is no change that autograd would complain about.
        self.whole = nn.Parameter(self.unpadded(self.padded.data), parameter.requires_grad)

    def cut(self, whole: Tensor) -> Tensor:
        """A copy of this rank's rows of a tensor that has all of them; ValueError if it has another shape."""
        if whole.shape != self.shape:
            raise ValueError(f"{self.name} has shape {tuple(whole.shape)}; it must be {tuple(self.shape)}")
        start = self._rank * self.rows
        return whole.detach()[start : start + self.rows].clone(memory_format=torch.contiguous_format)

    def unpadded(self, padded: Tensor) -> Tensor:
        """(N, width) in the shape of the parameter."""
        return padded.view(-1)[: self.shape.numel()].view(self.shape)


class Unit:
    """What is gathered and reduced together."""

    def __init__(self, name: str, keeps: bool) -> None:
        self.name, self.keeps = name, keeps  # whether it stays after the forward pass, for the backward pass
        self.parameters: list[ShardedParameter] = []
        self.trainable: list[ShardedParameter] = []  # of which gradients are reduced
        self.gathering: Future[None] | None = None  # None while whole parameters have no memory
        self.in_backward = False

    def register(self, whole: bool) -> None:
        """Put whole parameters, or shards, where modules look for them."""
        for each in self.parameters:
            for module, name in each.places:
                setattr(module, name, each.whole if whole else each.shard)

    def shrink(self) -> None:
        """Let go of whole parameters."""
        self.gathering, self.in_backward = None, False
        self.register(whole=False)
        for each in self.parameters:
            each.padded.untyped_storage().resize_(0)


class FullySharded(nn.Module):
    """Shards parameters, gradients and thereby the optimizer's state; computes what one process would.

    Outside its unit's pass `weight` of a layer is this rank's shard, and so are `.grad` and what `state_dict` has under
    that name, in the dtype that the parameter had. Optimizers must therefore treat every number by itself, as AdamW
    does and Muon does not; a norm, as for clipping, is one over all ranks' shards. `backward` leaves mean gradients, on
    top of those that were there.

    Parameters that no unit has alone, such as tied ones of two units, belong to the whole module, which is a unit, too:
    it is gathered first, and let go last. Parameters become rank 0's, and so do buffers, at the start. One without
    rows, a scalar, is replicated.

    Ranks communicate in the order in which their passes go, so all must go through the same units. Use it as a context
    manager, or call `close` in the end, which ends the thread.

    Args:
        module: on the CPU; of the same structure on all ranks.
        communicator: of these ranks. While a pass is under way, nobody else may use it.
        units: modules within `module`; its children if None. One within another is held beside it.
        ignored: parameters, and modules with all of theirs, that stay replicated; their gradients are all-reduced.
        param_dtype: in which units get their inputs, compute, and travel; each parameter's own if None.
        reduce_dtype: in which gradients travel and are added, not bfloat16, in which NumPy cannot. If None, it is
            float32, or float64 in a unit that has such parameters; FSDP2's is `param_dtype`.
        reshard_after_forward: whether units are let go after the forward pass. If not, they are gathered once a step,
            as in ZeRO-2. The whole module's own parameters always are: the backward pass begins with them.
        prefetch: whether to gather the next unit during the work of this one: in forward passes the one that came next
            last time, in backward passes the one before.

    Attributes:
        sharded: parameters by name.
        events: set to [] to record them.

    Raises:
        ValueError: if a unit is not in `module`, or `reduce_dtype` is bfloat16.
        UnusedParameters: from `backward`, if only some parameters got a gradient.
        CommunicationError: from both passes, if the others cannot be reached, or do something else.
    """

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator,
        *,
        units: Iterable[nn.Module] | None = None,
        ignored: Iterable[nn.Parameter | nn.Module] = (),
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        prefetch: bool = True,
    ) -> None:
        super().__init__()
        self.module, self.communicator, self._thread = module, communicator, data.CommunicationThread()
        self.events: list[Event] | None = None
        self._param_dtype, self._reduce_dtype, self._prefetch = param_dtype, reduce_dtype, prefetch
        data.broadcast_from_first(communicator, module)
        self._root = Unit("", keeps=True)
        names, by_module = {each: name for name, each in module.named_modules()}, {module: self._root}
        for each in module.children() if units is None else units:
            if each not in names:
                raise ValueError(f"units has a {type(each).__name__} that is not within the module")
            by_module.setdefault(each, Unit(names[each], keeps=not reshard_after_forward))
        self._units = list(by_module.values())
        self._replicated = {p for p in module.parameters() if p.dim() == 0}
        for one in ignored:
            self._replicated |= {one} if isinstance(one, nn.Parameter) else set(one.parameters())
        if reduce_dtype == torch.bfloat16:
            raise ValueError("reduce_dtype is torch.bfloat16, in which NumPy cannot add; use torch.float32")
        self._names: dict[nn.Parameter, str] = {}  # of those that get gradients: whole and replicated ones
        self.sharded: dict[str, ShardedParameter] = {}
        self._shard(by_module)
        self._began: list[Unit] = []  # in the order in which this forward pass came to them, or the last one
        self._began_before: list[Unit] = []  # in that of the one before
        self._ended: list[Unit] = []  # in the order in which it was done with them: a backward pass goes back
        self._came: set[nn.Parameter] = set()  # whose gradients are there
        self._reducing: Future[None] | None = None
        self._in_backward = False

    def _shard(self, units: dict[nn.Module, Unit]) -> None:
        found: dict[nn.Parameter, list[tuple[str, Unit, nn.Module, str]]] = {}
        around: dict[str, Unit] = {}  # the innermost unit, by the path of a module
        for path, module in self.module.named_modules(remove_duplicate=False):
            around[path] = units.get(module) or around[path.rpartition(".")[0]]
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                place = (f"{path}.{name}".lstrip("."), around[path], module, name)
                found.setdefault(parameter, []).append(place)
        for parameter, places in found.items():
            paths, holders, *_ = zip(*places, strict=True)
            takes, holder = parameter, None  # what takes its gradient, and the unit that reduces it
            if parameter not in self._replicated:
                holder = holders[0] if len(set(holders)) == 1 else self._root
                one = ShardedParameter(paths[0], parameter, self.communicator, self._param_dtype)
                one.places, takes = [place[2:] for place in places], one.whole
                holder.parameters.append(one)
                holder.trainable += [one] if parameter.requires_grad else []
                self.sharded |= dict.fromkeys(paths, one)
            if parameter.requires_grad:
                self._names[takes] = paths[0]
                takes.register_post_accumulate_grad_hook(partial(self._on_gradient, holder))
        for module, unit in units.items():
            if not unit.parameters and unit is not self._root:
                continue
            # By size, so that each is aligned where all are laid end to end.
            unit.parameters.sort(key=lambda each: -each.padded.itemsize)
            unit.shrink()
            module.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
            module.register_forward_hook(partial(self._after_forward, unit), always_call=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass."""
        return self.module(*args, **kwargs)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state of `module` by name, with whole parameters; all ranks call it together."""
        state: dict[str, Tensor] = self.module.state_dict()
        for name, each in self.sharded.items():
            padded = torch.empty(self.communicator.size, each.width, dtype=each.shard.dtype)
            gather_rows(self.communicator, [(each.shard.detach(), padded)])
            state[name] = each.unpadded(padded)
        return state

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's rows from a state with whole parameters.

        Raises:
            ValueError: if a parameter has another shape.
            RuntimeError: if names are missing, or there are others.
        """
        mine = {name: self.sharded[name].cut(state[name]) for name in state.keys() & self.sharded.keys()}
        self.module.load_state_dict({**state, **mine})

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Both passes, on the main thread.

    def _before_forward(self, unit: Unit, _: nn.Module, *given: Any) -> Any:
        if (
            unit is self._root and torch._C._current_graph_task_id() == -1
        ):  # else a checkpoint's backward pass
            self._reset()
            self._began_before, self._began, self._ended = self._began, [], []
        self._enter(unit)
        self._began.append(unit)
        place = len(self._began)
        if self._began_before[place - 1 : place] == [unit]:
            self._look_ahead(self._began_before[place:])
        inputs: list[Tensor] = []

        def take_in(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value if self._param_dtype is None else value.to(self._param_dtype)
                if value.requires_grad and torch.is_grad_enabled() and not unit.in_backward:
                    # Its gradient comes last of all in this unit.
                    inputs.append(value := value.view_as(value))
            return value

        given = tree_map(take_in, given)
        if inputs:
            register_multi_grad_hook(inputs, lambda _: self._free(unit))
        return given

    def _after_forward(self, unit: Unit, _: nn.Module, __: Any, output: Any) -> None:
        if unit.in_backward:
            return
        tensors = [
            each for each in tree_flatten(output)[0] if isinstance(each, Tensor) and each.requires_grad
        ]
        has_backward = bool(tensors) and torch.is_grad_enabled()
        if has_backward:
            self._ended.append(unit)
            for tensor in tensors:
                hook_first(tensor, partial(self._before_backward, unit))
        if unit.keeps and has_backward:
            unit.register(whole=False)
        else:
            self._free(unit)

    def _before_backward(self, unit: Unit, _: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if not unit.in_backward:  # else another of its outputs came first
            unit.in_backward = True
            self._enter(unit)
            while unit in self._ended and self._ended.pop() is not unit:
                pass
            self._look_ahead(self._ended[::-1])

    def _on_gradient(self, unit: Unit | None, parameter: Any) -> None:
        self._came.add(parameter)
        if unit is not None and all(each.whole in self._came for each in unit.trainable):
            if self._reducing is not None:
                self._reducing.result()  # so that the gradients of two units are held at most
            self._reducing = self._start("reduce", unit.name, self._reduce, *self._packed(unit.trainable))

    def _end_backward(self) -> None:
        came, reducing = self._came, self._reducing
        self._reset()
        if came:
            unused = [name for parameter, name in self._names.items() if parameter not in came]
            data.refuse_unused(unused, self.communicator)
        if reducing is not None:
            reducing.result()
        if gradients := [p.grad for p in self._names if p in self._replicated & came and p.grad is not None]:
            self._start("reduce", "replicated", self._all_reduce, gradients).result()

    def _reset(self) -> None:
        """Be between two passes, also where one has failed."""
        self._came, self._reducing, self._in_backward = set(), None, False
        for unit in self._units:
            self._free(unit)
            unit.in_backward = False
            for each in unit.trainable:
                each.whole.grad = None

    def _look_ahead(self, units: list[Unit]) -> None:
        if self._prefetch and units:
            self._start_gather(units[0])

    def _enter(self, unit: Unit) -> None:
        """Have whole parameters, from now on where the module looks for them."""
        if unit.parameters:
            self._start_gather(unit).result()
            unit.register(whole=True)

    def _start_gather(self, unit: Unit) -> Future[None]:
        if unit.gathering is None:
            unit.gathering = self._start("gather", unit.name, self._gather, unit.parameters)
        return unit.gathering

    def _free(self, unit: Unit) -> None:
        if unit.gathering is not None:
            wait([unit.gathering])
            unit.shrink()

    # What it communicates, on the second thread.

    def _start(self, kind: str, unit: str, job: Callable[..., None], *arguments: Any) -> Future[None]:
        def timed() -> None:
            start = self.communicator.now()
            job(*arguments)
            if self.events is not None:
                self.events.append(Event(kind, unit, start, self.communicator.now()))

        return self._thread.start(timed)

    def _gather(self, parameters: list[ShardedParameter]) -> None:
        for each in parameters:
            each.padded.untyped_storage().resize_(each.padded.nbytes)
        gather_rows(self.communicator, [(each.shard, each.padded) for each in parameters])

    def _packed(self, group: list[ShardedParameter]) -> tuple[Tensor, list[ShardedParameter]]:
        """The gradients laid end to end, (N, numbers of a rank), with each rank's where a ring leaves them."""
        widths, size = [each.width for each in group], self.communicator.size
        dtype = self._reduce_dtype or precise(each.shard for each in group)
        vectors = torch.zeros(size, sum(widths), dtype=dtype)
        for each, columns in zip(group, vectors.split(widths, dim=1), strict=True):
            gradient, each.whole.grad = each.whole.grad, None
            if gradient is not None:  # else it came a second time, from a reentrant checkpoint
                for rank, rows in enumerate(gradient.split(each.rows)):
                    columns[place_of(rank, size), : rows.numel()] = rows.reshape(-1)
        return vectors, group

    def _reduce(self, vectors: Tensor, group: list[ShardedParameter]) -> None:
        ring_reduce_scatter(self.communicator, as_array(vectors).reshape(-1), "mean")
        mine = vectors[place_of(self.communicator.rank, len(vectors))].clone()  # so that the others can go
        for each, gradient in zip(group, mine.split([each.width for each in group]), strict=True):
            gradient = gradient[: each.shard.numel()].view(each.shard.shape).to(each.shard.dtype)
            each.shard.grad = gradient if each.shard.grad is None else each.shard.grad.add_(gradient)

    def _all_reduce(self, gradients: list[Tensor]) -> None:
        dtype = self._reduce_dtype or precise(gradients)
        vector = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
        ring_all_reduce(self.communicator, as_array(vector), "mean")
        for gradient, mean in zip(gradients, vector.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view(gradient.shape))


def precise(tensors: Iterable[Tensor]) -> torch.dtype:
    """In which NumPy can add them without much loss."""
    return torch.float64 if torch.float64 in {each.dtype for each in tensors} else torch.float32


def place_of(rank: int, size: int) -> int:
    """Where a ring leaves this rank's chunk."""
    return (rank + 1) % size


def gather_rows(communicator: Communicator, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Fill the second of each pair, (N, width), with all ranks' shards, of which this one's is the first.

    It is one all-gather of bytes. Wide dtypes come first, so that all are aligned.
    """
    widths = [padded[0].nbytes for _, padded in pairs]
    rest = -sum(widths) % pairs[0][1].itemsize
    packed = torch.empty(communicator.size, sum(widths) + rest, dtype=torch.uint8)
    parts = packed.split([*widths, rest], dim=1)
    for (shard, padded), part in zip(pairs, parts, strict=False):
        mine = part.view(padded.dtype)[place_of(communicator.rank, communicator.size)]
        mine[: shard.numel()] = shard.view(-1)
    ring_all_gather(communicator, as_array(packed).reshape(-1))
    for (_, padded), part in zip(pairs, parts, strict=False):
        padded[:-1], padded[-1] = part.view(padded.dtype)[1:], part.view(padded.dtype)[0]


def hook_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with the gradient of `tensor`, before hooks that are there already, which may take their time."""
    earlier = list(tensor._backward_hooks or ())
    tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    for each in earlier:
        hooks[each] = hooks.pop(each)
