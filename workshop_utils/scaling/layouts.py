"""Every way to spread a model over some machines, and for each that cannot be used the reason.

    found = search(model("llama-3.1-8b"), instance("p5.48xlarge"), sequences=512)
    found["reason"].value_counts()

A hundred thousand layouts are a few NumPy calls: what cannot be is sorted out first, by rules of divisibility, and only
the rest is asked for its memory and time. A tensor-parallel group never leaves its machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from workshop_utils.scaling.catalogue import Dtype, Instance, Transformer
from workshop_utils.scaling.step_time import step_time
from workshop_utils.scaling.worker_memory import RECOMPUTE, Layout, blocks_of_stages, worker_memory

# The part of an accelerator's memory that a plan may fill. The rest is for the framework, the communication library and
# the allocator's gaps: an allowance, not a measurement.
USABLE_MEMORY = 0.9

PIPELINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CHUNKS = (1, 2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8, 16)
ZERO_STAGES = (0, 1, 2, 3)

# Why a layout is out, in the order in which it is asked; a layout has the first reason that applies.
REASONS = {
    "fits": "it can be used",
    "workers": "tensor × pipeline does not divide the accelerators",
    "heads": "tensor parallelism gives every worker whole heads, and does not divide them, or those of the keys",
    "layers": "there are too few layers for so many stages",
    "batch": "data × micro-batch does not divide the batch",
    "rounds": "an interleaved pipeline takes micro-batches in rounds of its length, which does not divide them",
    "alone": "ZeRO shards between data-parallel workers, and there is one only",
    "regather": "with ZeRO-2 and -3 a pipeline would reduce gradients, or gather parameters, for every micro-batch",
    "memory": "a worker's memory is too small",
}
_CODES = {reason: code for code, reason in enumerate(REASONS)}

COLUMNS = [
    "machines",
    "data",
    "tensor",
    "pipeline",
    "chunks",
    "zero",
    "micro_batch",
    "microbatches",
    "recompute",
]
RESULTS = ["memory_nbytes", "step_seconds", "compute", "tensor_seconds", "bubble", "data_seconds", "mfu"]


def search(
    model: Transformer,
    instance: Instance,
    sequences: int,
    machines: Sequence[int],
    dtype: Dtype = "bfloat16",
) -> pd.DataFrame:
    """All layouts on so many `machines`, for a step of `sequences`: one a row, with its reason.

    Columns: instance, machines; data, tensor, pipeline, chunks, zero, micro_batch, microbatches and recompute as in
    Layout; memory_nbytes and, where memory is enough, step_seconds, compute, tensor_seconds, bubble and data_seconds
    (seconds all) and mfu; reason, one of REASONS. What was not asked for is NaN.
    """
    grid = _grid(instance, machines)
    workers = grid["machines"] * instance.accelerators
    model_workers = grid["tensor"] * grid["pipeline"]
    grid["data"] = np.maximum(1, workers // model_workers)
    share = grid["data"] * grid["micro_batch"]
    grid["microbatches"] = np.maximum(1, sequences // share)
    _, rest = blocks_of_stages(model, grid["pipeline"], grid["chunks"])
    interleaved = grid["chunks"] > 1
    tests = {
        "workers": workers % model_workers != 0,
        "heads": (model.heads % grid["tensor"] != 0) | (model.kv_heads % grid["tensor"] != 0),
        "layers": rest < 1,
        "batch": sequences % share != 0,
        "rounds": interleaved & (grid["microbatches"] % grid["pipeline"] != 0),
        "alone": (grid["data"] == 1) & (grid["zero"] > 0),
        "regather": (grid["pipeline"] > 1) & (grid["zero"] > 1),
    }
    reason = np.select(list(tests.values()), [_CODES[name] for name in tests], _CODES["fits"]).astype(np.int8)
    results = {name: np.full(len(reason), np.nan) for name in RESULTS}

    possible = np.flatnonzero(reason == _CODES["fits"])
    layout = _layout(grid, possible)
    needed = np.broadcast_to(worker_memory(model, layout, dtype).total, possible.shape)
    results["memory_nbytes"][possible] = needed
    small = needed > USABLE_MEMORY * instance.memory_nbytes
    reason[possible[small]] = _CODES["memory"]

    usable = possible[~small]
    time = step_time(model, instance, _layout(grid, usable), dtype)
    parts = (time.seconds, time.compute, time.tensor, time.bubble, time.data, time.mfu)
    for name, values in zip(RESULTS[1:], parts, strict=True):
        results[name][usable] = values
    return _table(instance, grid, results, reason)


def layout_of(row: pd.Series) -> Layout:
    """The layout in a row of `search`."""
    numbers = {name: int(row[name]) for name in COLUMNS[1:-1]}
    return Layout(**numbers, recompute=str(row["recompute"]))


def describe(layout: Layout) -> str:
    """A layout in words."""
    words = [f"data {layout.data} × tensor {layout.tensor} × pipeline {layout.pipeline}"]
    if layout.chunks != 1:
        words.append(f"{layout.chunks} stages a worker")
    words.append(f"ZeRO-{layout.zero}" if layout.zero else "not sharded")
    sequences = "sequence" if layout.micro_batch == 1 else "sequences"
    words.append(f"{layout.microbatches} × {layout.micro_batch} {sequences} a step")
    words.append("nothing recomputed" if layout.recompute == "none" else f"{layout.recompute} recomputation")
    return ", ".join(words)


def _grid(instance: Instance, machines: Sequence[int]) -> dict[str, npt.NDArray[np.int64]]:
    """All combinations, flat; `recompute` by its place in RECOMPUTE. A pipeline of one stage has one chunk only."""
    tensors = [
        2**power for power in range(instance.accelerators.bit_length()) if 2**power <= instance.accelerators
    ]
    pipelines = [(stages, chunks) for stages in PIPELINES for chunks in (CHUNKS if stages > 1 else (1,))]
    axes = (machines, tensors, range(len(pipelines)), ZERO_STAGES, MICRO_BATCHES, range(len(RECOMPUTE)))
    names = ("machines", "tensor", "stages", "zero", "micro_batch", "recompute")
    meshes = np.meshgrid(*(np.array(axis, dtype=np.int64) for axis in axes), indexing="ij")
    grid = {name: mesh.ravel() for name, mesh in zip(names, meshes, strict=True)}
    pairs = np.array(pipelines)[grid.pop("stages")]
    return grid | {"pipeline": pairs[:, 0], "chunks": pairs[:, 1]}


def _layout(grid: dict[str, npt.NDArray[np.int64]], rows: npt.NDArray[np.int64]) -> Layout:
    numbers = {name: grid[name][rows] for name in COLUMNS[1:-1]}
    return Layout(**numbers, recompute=np.array(RECOMPUTE)[grid["recompute"][rows]])


def _table(
    instance: Instance,
    grid: dict[str, npt.NDArray[np.int64]],
    results: dict[str, npt.NDArray[np.float64]],
    reason: npt.NDArray[np.int8],
) -> pd.DataFrame:
    columns = {name: grid[name] for name in COLUMNS[:-1]}
    table = pd.DataFrame(columns | results)
    names = pd.Categorical.from_codes(np.zeros(len(reason), dtype=np.int8), pd.Index([instance.name]))
    table.insert(0, "instance", pd.Series(names))
    table["recompute"] = pd.Categorical.from_codes(grid["recompute"], pd.Index(RECOMPUTE))
    table["reason"] = pd.Categorical.from_codes(reason, pd.Index(list(REASONS)))
    return table
