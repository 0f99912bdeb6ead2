"""All layouts of a model on given machines: the memory and the time that each takes, or the reason why it is out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from workshop_utils.scaling.catalogue import Instance, Transformer
from workshop_utils.scaling.memory import RECOMPUTE, Layout, blocks_of_stages, worker_memory
from workshop_utils.scaling.step_time import step_time

# The part of an accelerator's memory that a plan may fill. The rest is for the framework, the communication library and
# the allocator's gaps: an allowance, not a measurement.
USABLE_MEMORY = 0.9

# What is tried. A tensor-parallel group never leaves its machine, so it has at most all accelerators of one.
MACHINES = tuple(2**power for power in range(12))  # of a kind: 1 to 2,048
PIPELINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CHUNKS = (1, 2, 4, 8)
ZERO_STAGES = (0, 1, 2, 3)
MICRO_BATCHES = (1, 2, 4, 8, 16)

# Why a layout is out, in the order in which it is asked; a layout has the first reason that applies.
REASONS = {
    "workers": "tensor × pipeline does not divide the accelerators",
    "heads": "tensor parallelism gives every worker whole heads, and does not divide them, or those of the keys",
    "layers": "there are too few layers for so many stages",
    "batch": "data × micro-batch does not divide the batch",
    "rounds": "an interleaved pipeline takes micro-batches in rounds of its length, which does not divide them",
    "alone": "ZeRO shards between data-parallel workers, and there is one only",
    "regather": "with ZeRO-2 and -3 a pipeline would reduce gradients, or gather parameters, for every micro-batch",
    "memory": "a worker's memory is too small",
    "deadline": "it would take longer than the deadline allows",
    "budget": "it would cost more than the budget",
}

LAYOUT_COLUMNS = ("data", "tensor", "pipeline", "zero", "micro_batch", "microbatches", "recompute", "chunks")


def search(
    model: Transformer, instance: Instance, sequences: int, machines: Sequence[int] = MACHINES
) -> pd.DataFrame:
    """All layouts on each number of `machines`, for a step of `sequences`: a row each, without price and hours.

    Rules of divisibility sort out what is impossible; memory and time are calculated for the rest.

    Returns:
        Columns instance, machines, LAYOUT_COLUMNS, memory_nbytes, step_seconds and mfu (NaN where not calculated), and
        `reason`: "fits" or one of REASONS.
    """
    table = _grid(instance, machines)
    grid: dict[str, Any] = {str(name): column.to_numpy() for name, column in table.items()}
    workers = grid["machines"] * instance.accelerators
    model_workers = grid["tensor"] * grid["pipeline"]
    data = np.maximum(1, workers // model_workers)
    share = data * grid["micro_batch"]
    microbatches = np.maximum(1, sequences // share)
    _, blocks_at_end = blocks_of_stages(model, grid["pipeline"], grid["chunks"])
    broken = {
        "workers": workers % model_workers != 0,
        "heads": (model.heads % grid["tensor"] != 0) | (model.kv_heads % grid["tensor"] != 0),
        "layers": blocks_at_end < 1,
        "batch": sequences % share != 0,
        "rounds": (grid["chunks"] > 1) & (microbatches % grid["pipeline"] != 0),
        "alone": (data == 1) & (grid["zero"] > 0),
        "regather": (grid["pipeline"] > 1) & (grid["zero"] > 1),
    }
    table = table.assign(data=data, microbatches=microbatches, instance=instance.name, reason="fits")
    for reason in reversed(broken):
        table.loc[broken[reason], "reason"] = reason

    possible = table.index[table["reason"] == "fits"]
    table.loc[possible, "memory_nbytes"] = worker_memory(model, _layouts(table.loc[possible])).total
    table.loc[table["memory_nbytes"] > USABLE_MEMORY * instance.memory_nbytes, "reason"] = "memory"
    fitting = table.index[table["reason"] == "fits"]
    time = step_time(model, instance, _layouts(table.loc[fitting]))
    table.loc[fitting, "step_seconds"], table.loc[fitting, "mfu"] = time.seconds, time.mfu
    return table


def _grid(instance: Instance, machines: Sequence[int]) -> pd.DataFrame:
    """All combinations, a row each. A pipeline of one stage has one chunk only."""
    axes: dict[str, Sequence[Any]] = {
        "machines": machines,
        "tensor": [2**power for power in range(instance.accelerators.bit_length())],
        "pipeline": PIPELINES,
        "chunks": CHUNKS,
        "zero": ZERO_STAGES,
        "micro_batch": MICRO_BATCHES,
        "recompute": RECOMPUTE,
    }
    grid = pd.MultiIndex.from_product(list(axes.values()), names=list(axes)).to_frame(index=False)
    grid = grid[(grid["pipeline"] > 1) | (grid["chunks"] == 1)].reset_index(drop=True)
    return grid.assign(memory_nbytes=math.nan, step_seconds=math.nan, mfu=math.nan)


def _layouts(rows: pd.DataFrame) -> Layout:
    """Those in rows of a table, as one layout of arrays."""
    columns: dict[str, Any] = {name: rows[name].to_numpy() for name in LAYOUT_COLUMNS}
    return Layout(**columns)
