"""Fully sharded data parallelism by parameter: ZeRO-2 and ZeRO-3, as PyTorch's FSDP2 does it.

    model = FullySharded(module, communicator, units=module.blocks, param_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())     # of shards
    loss_of(model(inputs)).backward()                     # each shard's .grad is now the mean of all ranks
    optimizer.step()

A *unit* is a module whose parameters are gathered and reduced together. For a unit with K bytes of parameters:

| | on the main thread | meanwhile, on the communication thread |
| --- | --- | --- |
| forward | wait for the unit; its work; let go of it | all-gather of the next unit |
| backward | wait for the unit; its work; let go of it | all-gather of the one before, reduce-scatter of the one after |

Each of these collectives sends (N − 1)/N · K. Between two steps a rank holds an N-th of parameters, gradients and
optimizer state. Within one it holds, beside these and the whole module's own, at most two whole units and their whole
gradients, and for a moment a copy of what is being sent. ZeRO-2 is the same without the gather in the backward pass:
`reshard_after_forward=False`. ZeRO-1 shards the optimizer's state alone.

Sources: Rajbhandari et al. (2020), "ZeRO: memory optimizations toward training trillion parameter models", section 5;
Zhao et al. (2023), "PyTorch FSDP: experiences on scaling fully sharded data parallel", sections 3 and 4;
`torch.distributed.fsdp.fully_shard`, whose rules are these unless a docstring says otherwise. Private names of
PyTorch here, such as `_execution_engine`, are those that it and checkpointing use; tried with PyTorch 2.13.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from workshop_utils.comm.communicator import Communicator, as_array
from workshop_utils.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from workshop_utils.parallel import data


class Event(NamedTuple):
    """What the communication thread did for a unit, in seconds of `communicator.now`.

    `kind` is "gather" or "reduce". `unit` is "" for the whole module, and "replicated" for `ignored` parameters.
    """

    kind: str
    unit: str
    start: float
    end: float


class ShardedParameter:
    """A parameter of which this rank keeps the `shard`, some rows, and has the `whole` only during its unit's passes.

    Rows are cut as torch.chunk cuts them: ⌈rows / N⌉ to each rank while there are some, so the last ones may get fewer,
    or none. Both are parameters; one of them stands in the module.

    Attributes:
        owners: modules that have it, and its names in them.
        rows: of a full shard; `width` is how many numbers it has.
        padded: the memory of `whole`, (N, width), in the dtype in which the unit computes.
    """

    def __init__(self, name: str, parameter: Tensor, communicator: Communicator, dtype: torch.dtype) -> None:
        self.owners: list[tuple[nn.Module, str]] = []
        self.name, self.shape, self._rank = name, parameter.shape, communicator.rank
        self.rows = max(1, -(-len(parameter) // communicator.size))
        self.width = self.rows * parameter[:1].numel()
        self.shard = nn.Parameter(self.cut(parameter), parameter.requires_grad)
        self.padded = torch.empty(communicator.size, self.width, dtype=dtype)
        # Of `data`, so that filling the memory again is no change that autograd would complain about.
        self.whole = nn.Parameter(self.unpadded(self.padded.data), parameter.requires_grad)
        self.padded.untyped_storage().resize_(0)

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
    """What is gathered and reduced together; `keeps` says whether whole parameters stay after the forward pass."""

    def __init__(self, name: str, keeps: bool) -> None:
        self.name, self.keeps = name, keeps
        self.parameters: list[ShardedParameter] = []
        self.gathering: Future[None] | None = None  # None while whole parameters have no memory
        self.in_backward, self.began = False, 0  # autograd numbers its nodes; its pass began with this one

    def register(self, whole: bool) -> None:
        """Put whole parameters, or shards, where modules look for them; RuntimeError if another one is there.

        Whether they are frozen is what the shards say.
        """
        for each in self.parameters:
            each.whole.requires_grad_(each.shard.requires_grad)
            for module, name in each.owners:
                if whole and getattr(module, name) not in {each.whole, each.shard}:
                    raise RuntimeError(f"{each.name} was replaced after sharding; copy into it instead")
                setattr(module, name, each.whole if whole else each.shard)

    def free(self) -> None:
        """Let go of whole parameters, once they are there."""
        if self.gathering is not None:
            wait([self.gathering])
            self.gathering, self.in_backward = None, False
            self.register(whole=False)
            for each in self.parameters:
                each.padded.untyped_storage().resize_(0)


class FullySharded(nn.Module):
    """Shards parameters, gradients and thereby the optimizer's state; computes what one process would.

    Outside its unit's pass `weight` of a layer is this rank's shard, and so are `.grad` and what `state_dict` has under
    that name, in the dtype that the parameter had. Make the optimizer of these. It must treat every number by itself,
    as AdamW does, and Muon and Adafactor do not; a norm, as for clipping, is one over all ranks' shards. So
    `torch.amp.GradScaler` and `torch.nn.utils.clip_grad_norm_` must not be used: they see one rank's. `backward` leaves
    mean gradients, on top of those that were there; it cannot be differentiated again. Shards may be frozen and
    unfrozen between steps, and copied into, but not replaced. After a failed backward pass, call `zero_grad` and begin
    with a forward pass.

    Use a unit's parameters only within its pass, and return no views of them: a tied head that calls
    `linear(x, embedding.weight)` needs `units` without the embedding. Instead of a penalty on `parameters()`, use the
    optimizer's `weight_decay`. A unit that changes its input in place, as one does that begins with
    `ReLU(inplace=True)`, stays whole until the backward pass ends.

    Parameters that no unit has alone, such as tied ones of two units, belong to the whole module, which is a unit, too:
    it is gathered first, and let go last. Parameters become rank 0's, and so do buffers, at the start. A scalar, which
    has no rows, and an empty parameter are replicated.

    Ranks communicate in the order in which their passes go, so all must go through the same units; otherwise one unit's
    rows are taken for another's, without an error where sizes agree. Use it as a context manager, or call `close` in
    the end, which ends the thread. It cannot be copied or pickled.

    Args:
        module: on the CPU; of the same structure on all ranks.
        communicator: of these ranks. While a pass is under way, nobody else may use it, nor may two of these share it.
            If it shares its links, as a group of a mesh does, nothing overlaps, and nothing is prefetched.
        units: modules within `module`; if None, its children, and in place of one that is never called (ModuleList,
            ModuleDict) the layers in it. One within another is held beside it.
        ignored: parameters, and modules with all of theirs, that stay replicated; their gradients are all-reduced.
        param_dtype: in which units get their inputs, compute, and travel; each parameter's own if None.
        reduce_dtype: in which gradients travel and are added, not bfloat16, in which NumPy cannot. If None, it is
            float32, or float64 in a unit that has such parameters; FSDP2's is `param_dtype`.
        reshard_after_forward: whether units are let go after the forward pass. If not, they are gathered once a step,
            as in ZeRO-2. The whole module's own parameters always are: the backward pass begins with them.
        prefetch: whether to gather the next unit during the work of this one: forward, the unit that followed last
            time; backward, the one before.

    Attributes:
        sharded: parameters by name.
        events: set to [] to record them.

    Raises:
        ValueError: if a unit is not in `module`, or never called, as a ModuleList is; if `ignored` has a tensor that
            is no parameter of it; if a parameter is complex, or NumPy cannot add in `reduce_dtype`; for modules that
            NaiveDataParallel refuses.
        RuntimeError: from the forward pass, if a unit returns a view of its parameter; from the backward pass, if a
            parameter was used outside its unit's pass, or has changed since the forward pass.
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
        data.refuse_different(module, communicator)
        self.module, self.communicator = module, communicator
        self._thread = data.CommunicationThread(communicator)
        self.events: list[Event] | None = None
        self._param_dtype, self._reduce_dtype = param_dtype, reduce_dtype
        self._prefetch = prefetch and not communicator.shares_links
        self._root = Unit("", keeps=True)
        names, by_module = {each: name for name, each in module.named_modules()}, {module: self._root}
        for each in called_children(module) if units is None else units:
            if type(each).forward is nn.Module.forward:
                raise ValueError(f"units has a {type(each).__name__}, which is never called; give its layers")
            if each not in names:
                raise ValueError(f"units has a {type(each).__name__} that is not within the module")
            by_module.setdefault(each, Unit(names[each], keeps=not reshard_after_forward))
        self._units = list(by_module.values())
        self._replicated = {p for p in module.parameters() if p.dim() == 0 or p.numel() == 0}
        for one in ignored:
            self._replicated |= {one} if isinstance(one, Tensor) else {*one.parameters()}
        if others := self._replicated - {*module.parameters()}:
            raise ValueError(f"ignored has a tensor {[*others.pop().shape]}; list parameters of the module")
        if reduce_dtype not in {None, torch.float16, torch.float32, torch.float64}:
            raise ValueError(f"reduce_dtype is {reduce_dtype}, in which NumPy cannot add; use torch.float32")
        if names_of_complex := [name for name, p in module.named_parameters() if p.is_complex()]:
            raise ValueError(f"{names_of_complex[0]} is complex; make two real parameters of it")
        data.broadcast_from_first(communicator, module)
        vars(module)["sharded_among"] = communicator.ranks  # what `data.refuse_different` looks for
        # Of those that may get gradients: whole and replicated ones.
        self._names: dict[nn.Parameter, str] = {}
        self.sharded: dict[str, ShardedParameter] = {}
        self._shard(by_module)
        self._forward_order: list[Unit] = []  # of this forward pass, as far as it has come, or the last one
        self._last_order: list[Unit] = []  # of the one before
        self._backward_stack: list[Unit] = []  # the unit that ended last is the first of the backward pass
        self._gradients_in: set[nn.Parameter] = set()
        self._reducing: tuple[Future[None], Tensor, list[ShardedParameter]] | None = None
        self._in_backward = False

    def _shard(self, units: dict[nn.Module, Unit]) -> None:
        places_by_parameter: dict[nn.Parameter, list[tuple[str, Unit, nn.Module, str]]] = {}
        around: dict[str, Unit] = {}  # the innermost unit, by the path of a module
        for path, module in self.module.named_modules(remove_duplicate=False):
            around[path] = units.get(module) or around[path.rpartition(".")[0]]
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                place = (f"{path}.{name}".lstrip("."), around[path], module, name)
                places_by_parameter.setdefault(parameter, []).append(place)
        for parameter, places in places_by_parameter.items():
            paths, holders, *_ = zip(*places, strict=True)
            leaves, holder = [parameter], None  # the first gets its gradient, which the holder reduces
            if parameter not in self._replicated:
                holder = holders[0] if len(set(holders)) == 1 else self._root
                dtype = (self._param_dtype if parameter.is_floating_point() else None) or parameter.dtype
                sharded = ShardedParameter(paths[0], parameter, self.communicator, dtype)
                sharded.owners, leaves = [place[2:] for place in places], [sharded.whole, sharded.shard]
                holder.parameters.append(sharded)
                self.sharded |= dict.fromkeys(paths, sharded)
            if parameter.is_floating_point():
                self._names[leaves[0]] = paths[0]
                hook, trained = partial(self._on_gradient, holder, paths[0]), parameter.requires_grad
                for leaf in leaves:
                    # A hook needs requires_grad to be registered, and stays when that changes.
                    leaf.requires_grad_().register_post_accumulate_grad_hook(hook)
                    leaf.requires_grad_(trained)
        for module, unit in units.items():
            if unit.parameters or unit is self._root:
                # By size, so that each is aligned where all are laid end to end.
                unit.parameters.sort(key=lambda each: -each.padded.itemsize)
                unit.register(whole=False)
                before, after = partial(self._before_forward, unit), partial(self._after_forward, unit)
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
                module.register_forward_hook(after, always_call=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass."""
        return self.module(*args, **kwargs)

    def full_state_dict(self) -> dict[str, Tensor]:
        """A copy of the state of `module` by name, with whole parameters; all ranks call it together."""
        self._reset()
        state: dict[str, Tensor] = copy.deepcopy(self.module.state_dict())
        for name, each in self.sharded.items():
            if name == each.name:  # else it is tied to one that has been gathered
                padded = torch.empty(self.communicator.size, each.width, dtype=each.shard.dtype)
                gather_rows(self.communicator, [(each.shard.detach(), padded)])
                state[name] = each.unpadded(padded)
            state[name] = state[each.name]
        return state

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's rows from a state with whole parameters.

        Raises:
            ValueError: if a parameter has another shape.
            RuntimeError: if names are missing, or there are others.
        """
        rows = {name: self.sharded[name].cut(state[name]) for name in state.keys() & self.sharded.keys()}
        self.module.load_state_dict({**state, **rows})

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._reset()
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Both passes, on the main thread.

    def _before_forward(self, unit: Unit, _: nn.Module, *arguments: Any) -> Any:
        # Else it is called again by a checkpoint, in the backward pass.
        if unit is self._root and torch._C._current_graph_task_id() == -1:
            self._reset()
            self._last_order, self._forward_order, self._backward_stack = self._forward_order, [], []
        self._enter(unit)
        self._forward_order.append(unit)
        unit.began = torch._C._autograd._get_sequence_nr()
        place = len(self._forward_order)
        if self._last_order[place - 1 : place] == [unit]:
            self._look_ahead(self._last_order[place:])
        inputs: list[Tensor] = []

        def take_in(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value if self._param_dtype is None else value.to(self._param_dtype)
                if value.requires_grad and torch.is_grad_enabled() and not unit.in_backward:
                    # Its gradient comes last of all in this unit.
                    inputs.append(value := value.view_as(value))
            return value

        arguments = tree_map(take_in, arguments)
        if inputs:
            register_multi_grad_hook(inputs, lambda _: unit.free())
        return arguments

    def _after_forward(self, unit: Unit, _: nn.Module, __: Any, output: Any) -> None:
        if unit.in_backward:
            return
        outputs = tensors_in(output)
        storages = {each.untyped_storage()._cdata for each in outputs}
        if views := [p.name for p in unit.parameters if p.padded.untyped_storage()._cdata in storages]:
            raise RuntimeError(f"a unit returns a view of {views[0]}; clone it, or leave it out of units")
        # A leaf, such as an ignored parameter, would keep its hook after the step.
        tensors = [each for each in outputs if each.grad_fn is not None and torch.is_grad_enabled()]
        if unit is self._root:  # what was gathered ahead for a unit that was not used
            wait([each.gathering for each in self._units if each.gathering is not None])
        versions = {each.shard: each.shard._version for each in unit.parameters}
        # A view that is changed in place loses its hooks; those of its base stay, if it was made here.
        bases = {each._base for each in tensors if each._base is not None}
        made = [each for each in bases if each.grad_fn and each.grad_fn._sequence_nr() >= unit.began]
        for tensor in (*tensors, *made):
            hook_first(tensor, partial(self._before_backward, unit, versions))
        self._backward_stack += [unit] if tensors else []
        if unit.keeps and tensors:
            unit.register(whole=False)
        else:
            unit.free()

    def _before_backward(self, unit: Unit, versions: Mapping[nn.Parameter, int], _: Tensor) -> None:
        if any(shard._version != version for shard, version in versions.items()):
            raise RuntimeError(f"parameters of unit {unit.name!r} have changed since the forward pass")
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if not unit.in_backward:  # else another of its outputs came first
            unit.in_backward = True
            self._enter(unit)
            while unit in self._backward_stack and self._backward_stack.pop() is not unit:
                pass
            self._look_ahead(self._backward_stack[::-1])

    def _on_gradient(self, unit: Unit | None, name: str, parameter: Any) -> None:
        if parameter not in self._names:  # a shard, which autograd has seen in the place of the whole
            raise RuntimeError(f"{name} was used outside its unit's pass; leave its module out of units")
        self._gradients_in.add(parameter)
        group = [each for each in unit.parameters if each.whole.requires_grad] if unit is not None else []
        if unit is not None and all(each.whole in self._gradients_in for each in group):
            self._take_reduced()  # so that the gradients of two units are held at most
            vectors = self._packed(group)
            reduce = partial(ring_reduce_scatter, self.communicator, as_array(vectors).reshape(-1), "mean")
            self._reducing = self._start("reduce", unit.name, reduce), vectors, group

    def _end_backward(self) -> None:
        ready = self._gradients_in
        unused = [name for p, name in self._names.items() if ready and p.requires_grad and p not in ready]
        if not unused:
            self._take_reduced()
        self._reset()
        data.refuse_unused(unused, self.communicator)
        if gradients := [p.grad for p in self._names if p in self._replicated & ready and p.grad is not None]:
            self._start("reduce", "replicated", partial(self._all_reduce, gradients)).result()

    def _reset(self) -> None:
        """Forget the current pass, also after a failure."""
        if self._reducing is not None:
            wait([self._reducing[0]])
        self._gradients_in, self._reducing, self._in_backward = set(), None, False
        for unit in self._units:
            unit.free()
            unit.in_backward = False
            for each in unit.parameters:
                each.whole.grad = None

    def _look_ahead(self, units: list[Unit]) -> None:
        if self._prefetch and units and units[0].parameters:
            self._start_gather(units[0])

    def _enter(self, unit: Unit) -> None:
        """Gather the unit's parameters and put them into the module."""
        if unit.parameters:
            self._start_gather(unit).result()
            unit.register(whole=True)

    def _start_gather(self, unit: Unit) -> Future[None]:
        if unit.gathering is None:
            pairs = [(each.shard, each.padded) for each in unit.parameters]
            unit.gathering = self._start("gather", unit.name, partial(gather_rows, self.communicator, pairs))
        return unit.gathering

    # What it communicates, on the second thread.

    def _start(self, kind: str, unit: str, job: Callable[[], object]) -> Future[None]:
        def timed() -> None:
            start = self.communicator.now()
            job()
            if self.events is not None:
                self.events.append(Event(kind, unit, start, self.communicator.now()))

        return self._thread.start(timed)

    def _packed(self, group: list[ShardedParameter]) -> Tensor:
        """The gradients laid end to end, (N, numbers of a rank), with each rank's where a ring leaves them."""
        widths, size = [each.width for each in group], self.communicator.size
        dtype = self._reduce_dtype or precise(each.shard for each in group)
        vectors = torch.zeros(size, sum(widths), dtype=dtype)
        for each, columns in zip(group, vectors.split(widths, dim=1), strict=True):
            gradient, each.whole.grad = each.whole.grad, None
            if gradient is not None:  # else it came a second time, from a reentrant checkpoint
                for rank, rows in enumerate(gradient.split(each.rows)):
                    columns[rank + 1 - size, : rows.numel()] = rows.reshape(-1)
        return vectors

    @torch.no_grad()
    def _take_reduced(self) -> None:
        """Add what was reduced last to shards' gradients; if a pass fails, what came before it stays there."""
        if self._reducing is not None:
            (future, vectors, group), self._reducing = self._reducing, None
            future.result()
            rows = vectors[self.communicator.rank + 1 - len(vectors)].clone()  # so that the others can go
            for each, gradient in zip(group, rows.split([each.width for each in group]), strict=True):
                gradient = gradient[: each.shard.numel()].view(each.shard.shape).to(each.shard.dtype)
                each.shard.grad = gradient if each.shard.grad is None else each.shard.grad.add_(gradient)

    def _all_reduce(self, gradients: list[Tensor]) -> None:
        dtype = self._reduce_dtype or precise(gradients)
        vector = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
        ring_all_reduce(self.communicator, as_array(vector), "mean")
        for gradient, mean in zip(gradients, vector.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view(gradient.shape))


def called_children(module: nn.Module) -> Iterator[nn.Module]:
    """Children of `module`; instead of one that is never called, as a ModuleList is, its own."""
    for child in module.children():
        yield from called_children(child) if type(child).forward is nn.Module.forward else [child]


def precise(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype in which NumPy adds them."""
    return torch.float64 if torch.float64 in {each.dtype for each in tensors} else torch.float32


def gather_rows(communicator: Communicator, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Fill the second of each pair, (N, width), with all ranks' shards, of which this one's is the first.

    It is one all-gather of bytes. Wide dtypes come first, so that all are aligned. What is filled gets its memory here.
    """
    widths = [padded.nbytes // len(padded) for _, padded in pairs]
    rest = -sum(widths) % pairs[0][1].itemsize
    packed = torch.empty(communicator.size, sum(widths) + rest, dtype=torch.uint8)
    parts = packed.split([*widths, rest], dim=1)
    for (shard, padded), part in zip(pairs, parts, strict=False):
        rows = part.view(padded.dtype)[communicator.rank + 1 - communicator.size]
        rows[: shard.numel()] = shard.view(-1)
    ring_all_gather(communicator, as_array(packed).reshape(-1))
    for (_, padded), part in zip(pairs, parts, strict=False):
        padded.untyped_storage().resize_(padded.nbytes)
        padded[:-1], padded[-1] = part.view(padded.dtype)[1:], part.view(padded.dtype)[0]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in `value`, also inside dataclasses."""
    leaves = tree_leaves(value)
    inner = [[getattr(each, one.name) for one in fields(each)] for each in leaves if is_dataclass(each)]
    return [each for each in leaves if isinstance(each, Tensor)] + (tensors_in(inner) if inner else [])


def hook_first(tensor: Any, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with the gradient of `tensor`, before hooks that are there already, which may take their time."""
    tensor.register_hook(hook)
    for earlier in list(tensor._backward_hooks)[:-1]:
        tensor._backward_hooks[earlier] = tensor._backward_hooks.pop(earlier)
