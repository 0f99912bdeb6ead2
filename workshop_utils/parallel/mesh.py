"""Ranks in five directions at once: data × tensor × pipeline × context, and experts across data × context.

    mesh = mesh_of(communicator, data=2, tensor=2, pipeline=2)     # 8 ranks
    mesh.tensor, mesh.data, mesh.pipeline                          # this rank's group in each direction
    synchronise(module, mesh)                                      # gradients are now those of one process
    clip_gradients(module, mesh, max_norm=1.0)                     # and no longer than 1

Neighbours in number are neighbours in the direction that talks most: ranks of one tensor group are next to each other,
so that they are on one machine; then come context and data; ranks of one pipeline are farthest apart (Narayanan et al.
2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 3; the order is
Megatron-LM's).

A gradient is right once it is summed over all ranks that have a part of it:

| parameters | cut over | their gradients are parts of a sum over |
| --- | --- | --- |
| of a layer that tensor ranks share | tensor, pipeline | data, context |
| whole on tensor ranks: norms, positions, last biases | pipeline | data, context; tensor, if it cuts the sequence |
| of experts | experts, pipeline | ranks with the same experts, once tokens have come from all others |
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.subset import Subset
from workshop_utils.parallel.experts import Experts, expert_parameters
from workshop_utils.parallel.fully_sharded import FullySharded
from workshop_utils.parallel.schedule import check_counts
from workshop_utils.parallel.tensor import all_reduce_gradients, cut_parameters


class Mesh(NamedTuple):
    """The groups of ranks that differ from this one in one direction only; each counts its own traffic.

    Attributes:
        data, tensor, pipeline, context: a direction each.
        experts: neighbours in data × context who share the experts of the same layers.
        replicas: data × context, all ranks with the same weights, but for experts.
        expert_replicas: those of `replicas` with the same experts as this rank.
    """

    data: Subset
    tensor: Subset
    pipeline: Subset
    context: Subset
    experts: Subset
    replicas: Subset
    expert_replicas: Subset


def check(
    ranks: int, data: int = 1, tensor: int = 1, pipeline: int = 1, context: int = 1, experts: int = 1
) -> None:
    """Refuse a mesh of these sizes that has not as many places as there are `ranks`.

    Raises:
        ValueError: then, or if `experts` does not divide data × context.
    """
    check_counts(data=data, tensor=tensor, pipeline=pipeline, context=context, experts=experts)
    sizes = data, tensor, pipeline, context
    if math.prod(sizes) != ranks:
        shape = f"data × tensor × pipeline × context is {' × '.join(map(str, sizes))}"
        raise ValueError(f"{shape}; it must make {ranks}, the number of workers")
    if data * context % experts:
        right = f"it must divide data × context, {data * context}, whose ranks share the experts"
        raise ValueError(f"experts is {experts} ranks; {right}")


def mesh_of(
    communicator: Communicator,
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    experts: int = 1,
) -> Mesh:
    """This rank's groups in a mesh of all ranks with these sizes; `experts` ranks share the experts of a layer.

    Raises:
        ValueError: as `check`.
    """
    check(communicator.size, data, tensor, pipeline, context, experts)
    grid = np.arange(communicator.size).reshape(pipeline, data, context, tensor)
    p, d, c, t = np.unravel_index(communicator.rank, grid.shape)
    replicas = grid[p, :, :, t].reshape(-1, experts)  # a row is an expert group
    row, column = divmod(int(d * context + c), experts)
    lines = grid[p, :, c, t], grid[p, d, c, :], grid[:, d, c, t], grid[p, d, :, t]
    groups = *lines, replicas[row], replicas.reshape(-1), replicas[:, column]
    return Mesh(*(Subset(communicator, group.tolist()) for group in groups))


def synchronise(module: nn.Module, mesh: Mesh) -> None:
    """Replace gradients of each replica's loss by those of the mean over all replicas, data and context alike.

    Every rank calls it once a step, after the last backward pass and `finish_gradients`. Context ranks have equal
    shares of the sequence, so the mean of their mean losses is that of the whole sequence. An expert's gradient is
    already the sum over the tokens of its expert group, so what is left to sum over are the ranks with the same
    experts; it is divided by the number of replicas, too, not by the number of those ranks: a second call would divide
    it again.

    A parameter that got no gradient here, but could, gets zeros: other ranks may have used it. Shards of a FullySharded
    have the mean over replicas already.

    Raises:
        ValueError: as `gradient_norm`.
    """
    shards = _shards(module, mesh)
    of_experts = [each for each in expert_parameters(module) if each not in shards]
    done = shards.union(of_experts)
    others = [each for each in module.parameters() if each not in done]
    for parameter in (*others, *of_experts):
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    all_reduce_gradients(others, mesh.replicas, "mean")
    # In this order: that of a set differs between ranks.
    all_reduce_gradients(of_experts, mesh.expert_replicas, "mean")
    for parameter in of_experts:
        if parameter.grad is not None:
            parameter.grad.div_(mesh.experts.size)


def _shards(module: nn.Module, mesh: Mesh) -> set[nn.Parameter]:
    """Parameters that are cut over replicas; ValueError if they, or experts, are cut over ranks other than a mesh's."""
    shards = set()
    for each in module.modules():
        if not isinstance(each, FullySharded | Experts):
            continue
        name = "experts" if isinstance(each, Experts) else "replicas"
        group, size = getattr(mesh, name), each.communicator.size if each.communicator else 1
        ranks = [*each.communicator.ranks] if each.communicator and size > 1 else group.ranks
        if size != group.size or ranks != group.ranks:
            right = f"cut it over mesh.{name}, which has {group.size}: {group.ranks}"
            raise ValueError(f"communicator of {type(each).__name__} has {size} ranks; {right}")
        if isinstance(each, FullySharded):
            shards |= {sharded.shard for sharded in each.sharded.values()}
    return shards


def gradient_norm(module: nn.Module, mesh: Mesh, counted_elsewhere: Container[nn.Parameter] = ()) -> float:
    """The length of the whole model's gradient, the same number on every rank: that of one process.

    Each number counts once, on the first of the ranks that hold it; what ranks hold parts of counts on all of these.
    Squares are then summed over tensor ranks, replicas and pipeline stages (so does Megatron-LM's
    `get_grad_norm_fp32`, over the tensor and pipeline ranks at once). Shards of a FullySharded count on each of
    `mesh.replicas`: lesson 07's sum over data ranks, too.

    Args:
        module: this rank's part of the model, after `synchronise`, or after the backward pass of a FullySharded.
        mesh: of all ranks; all call this together.
        counted_elsewhere: parameters that another stage counts, such as the last one's copy of a tied embedding.

    Raises:
        ValueError: if a FullySharded in `module` is not over `mesh.replicas`, or experts are not over `mesh.experts`.
    """
    shards = _shards(module, mesh)
    cut, experts = cut_parameters(module), {*expert_parameters(module)}
    squares = np.zeros(1)
    for parameter in module.parameters():
        alike = mesh.expert_replicas if parameter in experts else mesh.replicas  # who hold the same numbers
        is_first = alike.rank == 0 or parameter in shards
        is_first &= mesh.tensor.rank == 0 or parameter in cut
        if is_first and parameter.grad is not None and parameter not in counted_elsewhere:
            squares += parameter.grad.double().square().sum().item()
    for group in (mesh.tensor, mesh.replicas, mesh.pipeline):
        ring_all_reduce(group, squares)
    return math.sqrt(squares.item())


def clip_gradients(
    module: nn.Module, mesh: Mesh, max_norm: float, counted_elsewhere: Container[nn.Parameter] = ()
) -> float:
    """Scale all gradients, in place, so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`.

    Arguments are those of `gradient_norm`. A norm that is NaN or infinite makes all gradients NaN or zero, as there.

    Returns:
        The norm before.

    Raises:
        ValueError: if `max_norm` is not above zero, and as `gradient_norm`.
    """
    if max_norm is None or not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be above zero")
    norm = gradient_norm(module, mesh, counted_elsewhere)
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:  # also for NaN
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm
