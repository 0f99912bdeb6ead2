"""What one worker holds while it trains a transformer, for every way to spread the model over workers.

    layout = Layout(data=8, tensor=8, pipeline=2, zero=1, micro_batch=1, microbatches=32, recompute="selective")
    worker_memory(model("llama-3.1-70b"), layout).total / 1e9

Numbers may be NumPy arrays: one call then answers for as many layouts. All sizes are in bytes. `memory` has the same
for a model of which only the number of parameters is known.

Sources: Rajbhandari et al. (2020), "ZeRO", sections 3 and 5, for parameters, gradients and the optimizer's state;
Korthikanti et al. (2022), "Reducing Activation Recomputation in Large Transformer Models", section 4, for activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workshop_utils.scaling.arrays import Numbers, plain
from workshop_utils.scaling.catalogue import NUMBER_NBYTES, Dtype, Transformer
from workshop_utils.scaling.memory import OPTIMIZER_NUMBERS, Optimizer

RECOMPUTE = ("none", "selective", "full")

# How many gradients are reduced at once where gradients or optimizer state are sharded. Source: DeepSpeed's default of
# reduce_bucket_size.
BUCKET_NUMBERS = 5e8
MASTER_NBYTES = 4  # optimizers keep their state, and a copy of 16-bit parameters, in 32 bits


@dataclass(frozen=True)
class Layout:
    """How a model is spread: data × tensor × pipeline workers, and what each of them does at a time.

    Attributes:
        data, tensor, pipeline: workers in each direction.
        zero: what data-parallel workers shard: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.
        micro_batch: sequences that go through the model together.
        microbatches: how many of them one replica works through in a step.
        recompute: what the backward pass computes anew. "selective" is attention's scores, as FlashAttention does;
            "full" is all but each block's input; "none" keeps everything.
        sequence_parallel: whether norms and residuals are cut along the sequence by the tensor-parallel workers.
        chunks: stages that one worker has of the pipeline; with more than one it is interleaved.

    Raises:
        ValueError: for a number below 1, a stage that does not exist, or an unknown `recompute`.
    """

    data: Numbers = 1
    tensor: Numbers = 1
    pipeline: Numbers = 1
    zero: Numbers = 0
    micro_batch: Numbers = 1
    microbatches: Numbers = 1
    recompute: Any = "none"
    sequence_parallel: Any = True
    chunks: Numbers = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "micro_batch", "microbatches", "chunks"):
            value = getattr(self, name)
            if not (np.asarray(value) >= 1).all():
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not np.isin(self.zero, (0, 1, 2, 3)).all():
            raise ValueError(f"zero is {self.zero}; it must be 0, 1, 2 or 3")
        if not np.isin(self.recompute, RECOMPUTE).all():
            raise ValueError(f"recompute is {self.recompute!r}; it must be one of {', '.join(RECOMPUTE)}")

    @property
    def workers(self) -> Numbers:
        """All of them."""
        return self.data * self.tensor * self.pipeline

    @property
    def sequences(self) -> Numbers:
        """In a step, of all workers together: the global batch."""
        return self.data * self.micro_batch * self.microbatches


@dataclass(frozen=True)
class WorkerMemory:
    """What a worker holds at its fullest, in bytes."""

    parameters: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers = 0
    buffers: Numbers = 0

    @property
    def state(self) -> Numbers:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> Numbers:
        """All together."""
        return self.state + self.activations + self.buffers


def state_memory(
    parameters: Numbers,
    data: Numbers = 1,
    zero: Numbers = 0,
    dtype: Dtype = "bfloat16",
    optimizer: Optimizer = "adam",
) -> WorkerMemory:
    """Parameters, gradients and optimizer state of a worker that has `parameters` and shares them with `data` others.

    With 16 bits it is mixed precision: the optimizer has a copy of the parameters in 32 bits. Source: Rajbhandari et
    al. (2020), sections 3.1 and 5.
    """
    own = NUMBER_NBYTES[dtype] * np.asarray(parameters, dtype=float)
    master = 0 if NUMBER_NBYTES[dtype] == MASTER_NBYTES else 1
    kept = MASTER_NBYTES * (master + OPTIMIZER_NUMBERS[optimizer]) * np.asarray(parameters, dtype=float)
    stage = np.asarray(zero)
    return WorkerMemory(
        own / np.where(stage >= 3, data, 1),
        own / np.where(stage >= 2, data, 1),
        kept / np.where(stage >= 1, data, 1),
    )


def blocks_of_stages(model: Transformer, pipeline: Numbers, chunks: Numbers = 1) -> tuple[Numbers, Numbers]:
    """Blocks of a worker at the pipeline's beginning, and of the one at its end.

    All have as many, but the last, which has what is left; below 0, if there are too few blocks for all.
    """
    most = chunks * np.ceil(model.layers / (pipeline * np.asarray(chunks)))
    return most, model.layers - (pipeline - 1) * most


def stage_parameters(
    model: Transformer, tensor: Numbers = 1, pipeline: Numbers = 1, chunks: Numbers = 1
) -> tuple[Numbers, Numbers]:
    """Parameters of one worker of the first stage, and of the last: the two that have more than blocks.

    Matrices, and biases of layers cut by columns, are divided by `tensor`, the embedding by its rows; norms and biases
    of layers cut by rows are on every worker. A tied embedding is kept twice where a pipeline has its ends on two
    workers. Source: Shoeybi et al. (2019), section 3; Narayanan et al. (2021b), section 3.1.
    """
    block = (model.block_matrix_parameters + model.block_cut_biases) / tensor + model.block_whole_parameters
    table = model.vocabulary * model.width / tensor
    begin = table + model.positions * model.width
    end = model.extra_parameters + (model.norm_parameters if model.last_norm else 0)
    alone = np.asarray(pipeline) == 1
    most, rest = blocks_of_stages(model, pipeline, chunks)
    first = most * block + begin + np.where(alone, end + (0 if model.tied else table), 0)
    return first, np.where(alone, first, rest * block + table + end)


def block_activation_nbytes(model: Transformer, layout: Layout, dtype: Dtype = "bfloat16") -> Numbers:
    """What one block keeps of one micro-batch until its backward pass.

    For 16 bits, dropout, GELU, as many key as query heads and an MLP of 4 h it is the paper's
    sbh (10 + 24/t + 5as/(ht)), equation 2; sbh/t (34 + 5as/h) with sequence parallelism, equation 4; without the
    term in a where attention is recomputed, equation 6; and 2sbh where the whole block is. The terms are counted one
    by one as in section 4.1, so that they hold for gated MLPs and shared keys too.
    """
    recompute = np.asarray(layout.recompute)
    tokens = layout.micro_batch * model.sequence
    input_alone = NUMBER_NBYTES[dtype] * model.width / _sequence_share(layout)
    per_token = outside_scores(model, layout, dtype) + np.where(
        recompute == "none", scores(model, layout, dtype), 0
    )
    return plain(tokens * np.where(recompute == "full", input_alone, per_token))


def _sequence_share(layout: Layout) -> Numbers:
    return np.where(layout.sequence_parallel, layout.tensor, 1)


def outside_scores(model: Transformer, layout: Layout, dtype: Dtype) -> Numbers:
    """Bytes a token of all that a block makes, but attention's scores."""
    e, h, masks = NUMBER_NBYTES[dtype], model.width, 1 if model.dropout else 0
    # Not cut by tensor parallelism: inputs of two norms, of attention and of the MLP; masks of two dropouts.
    whole = (4 * e + 2 * masks) * h / _sequence_share(layout)
    # Cut: queries, keys, values and what they give; the MLP's hidden units before and after the activation function,
    # and with a gate the other factor and the product.
    hidden = (4 if model.gated else 2) * model.mlp_width
    return whole + e * (2 * h + 2 * model.kv_width + hidden) / layout.tensor


def scores(model: Transformer, layout: Layout, dtype: Dtype) -> Numbers:
    """Bytes a token of attention's scores behind the softmax, and with dropout of a mask and what it leaves of them."""
    e, masks = NUMBER_NBYTES[dtype], 1 if model.dropout else 0
    return model.heads * model.sequence * (e + masks * (1 + e)) / layout.tensor


def worker_memory(
    model: Transformer, layout: Layout, dtype: Dtype = "bfloat16", optimizer: Optimizer = "adam"
) -> WorkerMemory:
    """What the fullest worker holds, of the first stage or of the last.

    A pipeline runs 1F1B, so that its first stage keeps activations of `pipeline` micro-batches, or of all if they are
    fewer, and its last stage of one; interleaved, the first keeps (p − 1)/v more (Narayanan et al. 2021b, section 2.2;
    the table in `parallel.schedule`). What a framework, a communication library
    and an allocator's gaps take is not in it.
    """
    sizes = stage_parameters(model, layout.tensor, layout.pipeline, layout.chunks)
    blocks = blocks_of_stages(model, layout.pipeline, layout.chunks)
    ahead = layout.pipeline + np.where(
        np.asarray(layout.chunks) > 1, (layout.pipeline - 1) / np.asarray(layout.chunks), 0
    )
    in_flight = np.minimum(ahead, layout.microbatches)
    alone = np.asarray(layout.pipeline) == 1
    ends = [
        WorkerMemory(
            *_states(state_memory(size, layout.data, layout.zero, dtype, optimizer)),
            activations=_activations(model, layout, dtype, block, passes, head),
            buffers=_buffers(model, layout, dtype, size, head),
        )
        for size, block, passes, head in zip(sizes, blocks, (in_flight, 1), (alone, True), strict=True)
    ]
    fuller = ends[0].total >= ends[1].total
    return WorkerMemory(
        *(
            plain(np.where(fuller, getattr(ends[0], part), getattr(ends[1], part)))
            for part in ("parameters", "gradients", "optimizer", "activations", "buffers")
        )
    )


def _states(memory: WorkerMemory) -> tuple[Numbers, Numbers, Numbers]:
    return memory.parameters, memory.gradients, memory.optimizer


def _activations(
    model: Transformer, layout: Layout, dtype: Dtype, blocks: Numbers, passes: Numbers, head: Any
) -> Numbers:
    """Of `blocks` and `passes` micro-batches; with a `head`, its norm's and its product's inputs and its logits."""
    e, h = NUMBER_NBYTES[dtype], model.width
    tokens = layout.micro_batch * model.sequence
    share = _sequence_share(layout)
    kept = passes * blocks * block_activation_nbytes(model, layout, dtype)
    # While a block is recomputed, all of it is there.
    anew = np.where(np.asarray(layout.recompute) == "full", tokens * outside_scores(model, layout, dtype), 0)
    embedding = passes * tokens * h / share if model.dropout else 0
    norm = e * h / share if model.last_norm else 0
    # Logits are in 32 bits for the loss.
    last = tokens * (norm + e * h / share + MASTER_NBYTES * model.vocabulary / layout.tensor)
    return kept + anew + embedding + np.where(head, last, 0)


def _buffers(model: Transformer, layout: Layout, dtype: Dtype, parameters: Numbers, head: Any) -> Numbers:
    """What is there for a moment: the logits' gradient, gathered parameters, buckets of gradients, messages."""
    e = NUMBER_NBYTES[dtype]
    tokens = layout.micro_batch * model.sequence
    logits = np.where(head, MASTER_NBYTES * tokens * model.vocabulary / layout.tensor, 0)
    bucket = e * np.minimum(BUCKET_NUMBERS, parameters)
    # A block that computes, the next one that is being gathered, and gradients of one (Zhao et al. 2023, section 3.3).
    gathered = e * 3 * model.block_parameters / layout.tensor
    sharded = np.select([np.asarray(layout.zero) == 0, np.asarray(layout.zero) == 3], [0.0, gathered], bucket)
    message = e * tokens * model.width
    return (
        logits
        + np.where(np.asarray(layout.data) > 1, sharded, 0)
        + np.where(np.asarray(layout.tensor) > 1, message, 0)
        + np.where(np.asarray(layout.pipeline) > 1, 2 * message / layout.tensor, 0)
    )
