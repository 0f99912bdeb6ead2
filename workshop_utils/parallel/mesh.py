"""Ranks in three directions at once: data × tensor × pipeline.

    mesh = mesh_of(communicator, data=2, tensor=2, pipeline=2)     # 8 ranks
    mesh.tensor, mesh.data, mesh.pipeline                          # this rank's group in each direction

Neighbours in number are neighbours in the direction that talks most: ranks of one tensor group are next to each other,
so that they are on one machine; ranks of one pipeline are farthest apart (Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM", section 3).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.subset import Subset


class Mesh(NamedTuple):
    """The groups of ranks that differ from this one in one direction only; each counts its own traffic."""

    data: Subset
    tensor: Subset
    pipeline: Subset


def check(data: int, tensor: int, pipeline: int, ranks: int) -> None:
    """Whether a mesh of these sizes has as many places as there are `ranks`.

    Raises:
        ValueError: if it does not.
    """
    if min(data, tensor, pipeline) < 1 or data * tensor * pipeline != ranks:
        shape = f"data × tensor × pipeline is {data} × {tensor} × {pipeline}"
        raise ValueError(f"{shape}; it must make {ranks}, the number of workers")


def mesh_of(communicator: Communicator, data: int = 1, tensor: int = 1, pipeline: int = 1) -> Mesh:
    """This rank's groups in a mesh of all ranks with these sizes.

    Raises:
        ValueError: if their product is not the number of ranks.
    """
    check(data, tensor, pipeline, communicator.size)
    grid = np.arange(communicator.size).reshape(pipeline, data, tensor)
    p, d, t = np.unravel_index(communicator.rank, grid.shape)
    groups = grid[p, :, t], grid[p, d, :], grid[:, d, t]
    return Mesh(*(Subset(communicator, group.tolist()) for group in groups))
