"""Where the memory of a training step goes: parameters, gradients, the optimizer's state, activations.

    training_memory(1e6).total                           # a model of which only the size is known
    layout = Layout(data=8, tensor=8, pipeline=2, zero=1, microbatches=32, recompute="selective")
    worker_memory(model("llama-3.1-70b"), layout).total  # a transformer, spread over workers

All sizes are in bytes. Numbers may be NumPy arrays: one call then answers for as many layouts.

Sources: Rajbhandari et al. (2020), "ZeRO: memory optimizations toward training trillion parameter models", sections 3
and 5, for parameters, gradients and the optimizer's state; Korthikanti et al. (2022), "Reducing Activation
Recomputation in Large Transformer Models", section 4, for activations.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from workshop_utils.comm.topology import Numbers
from workshop_utils.scaling.catalogue import Transformer
from workshop_utils.scaling.cost import plain

RECOMPUTE = ("none", "selective", "full")

# How many gradients are reduced at once where gradients or optimizer state are sharded. Source: DeepSpeed's default of
# reduce_bucket_size.
BUCKET_NUMBERS = 5e8
LOGIT_NBYTES = 4  # the loss is computed in 32 bits


@dataclass(frozen=True)
class TrainingMemory:
    """What one worker holds during a step, in bytes: numbers, or arrays for as many layouts."""

    parameters: Any
    gradients: Any
    optimizer: Any
    activations: Any = 0
    buffers: Any = 0

    @property
    def total(self) -> Any:
        """All together. The peak is a little lower: gradients come as activations go."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def training_memory(parameters: Numbers) -> TrainingMemory:
    """Adam in 32 bits, without activations: it keeps means of the gradient and of its square.

    Source: Kingma and Ba (2015), algorithm 1.
    """
    own = 4 * parameters
    return TrainingMemory(own, own, 2 * own)


def mixed_precision_adam(parameters: Numbers) -> TrainingMemory:
    """Adam in mixed precision: 16 bytes a parameter, without activations.

    2 for the parameter and 2 for its gradient in 16 bits, 12 for the optimizer: its two means and the parameter itself
    in 32 bits. Source: Rajbhandari et al. (2020), section 3.1.
    """
    return TrainingMemory(2 * parameters, 2 * parameters, 12 * parameters)


def sharded(whole: TrainingMemory, workers: Numbers, stage: Numbers) -> TrainingMemory:
    """What each of `workers` holds of the `whole` between two steps, by ZeRO's stages.

    Stage 0 shards nothing; 1 the optimizer's state; 2 the gradients too; 3 the parameters too. Source: Rajbhandari et
    al. (2020), section 5.
    """
    stages = np.asarray(stage)
    return TrainingMemory(
        whole.parameters / np.where(stages >= 3, workers, 1),
        whole.gradients / np.where(stages >= 2, workers, 1),
        whole.optimizer / np.where(stages >= 1, workers, 1),
    )


@dataclass(frozen=True)
class Layout:
    """How a model is spread: data × tensor × pipeline workers, and what each of them does at a time.

    Attributes:
        data, tensor, pipeline: workers in each direction.
        zero: what data-parallel workers shard: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.
        micro_batch: sequences that go through the model together.
        microbatches: how many of them one replica works through in a step.
        recompute: what the backward pass computes again. "selective" is attention's scores, as FlashAttention does;
            "full" is all but each block's input; "none" keeps everything.
        sequence_parallel: whether norms and residuals are cut along the sequence by the tensor-parallel workers.
        chunks: stages that one worker has of the pipeline; with more than one it is interleaved.
        number_nbytes: of a parameter or an activation: 2 in mixed precision, or 4.
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
    number_nbytes: int = 2

    @property
    def workers(self) -> Numbers:
        """All of them."""
        return self.data * self.tensor * self.pipeline

    @property
    def sequences(self) -> Numbers:
        """In a step, of all workers together: the global batch."""
        return self.data * self.micro_batch * self.microbatches

    @property
    def sequence_share(self) -> Numbers:
        """Among how many workers norms and residuals are cut."""
        return np.where(self.sequence_parallel, self.tensor, 1)

    def __str__(self) -> str:
        words = [f"data {self.data} × tensor {self.tensor} × pipeline {self.pipeline}"]
        if self.chunks != 1:
            words.append(f"{self.chunks} stages a worker")
        words.append(f"ZeRO-{self.zero}" if self.zero else "not sharded")
        sequences = "sequence" if self.micro_batch == 1 else "sequences"
        words.append(f"{self.microbatches} × {self.micro_batch} {sequences} a step")
        words.append("nothing recomputed" if self.recompute == "none" else f"{self.recompute} recomputation")
        return ", ".join(words)


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
    workers. Source: Shoeybi et al. (2019), section 3, for what is cut.
    """
    block = (model.block_matrix_parameters + model.block_cut_biases) / tensor + model.block_whole_parameters
    table = model.vocabulary * model.width / tensor
    begin = table + model.positions * model.width
    end = model.extra_parameters + (model.norm_parameters if model.last_norm else 0)
    alone = np.asarray(pipeline) == 1
    most, rest = blocks_of_stages(model, pipeline, chunks)
    first = most * block + begin + np.where(alone, end + (0 if model.tied else table), 0)
    return first, np.where(alone, first, rest * block + table + end)


def block_activation_nbytes(model: Transformer, layout: Layout) -> Numbers:
    """What one block keeps of one micro-batch until its backward pass.

    For 16 bits, dropout, GELU, as many key as query heads and an MLP of 4 h it is the paper's
    sbh (10 + 24/t + 5as/(ht)), equation 2; sbh/t (34 + 5as/h) with sequence parallelism, equation 4; without the
    term in a where attention is recomputed, equation 6; and 2sbh, or with sequence parallelism 2sbh/t, where the whole
    block is. The terms are counted one by one as in section 4.1, so that they hold for gated MLPs and shared keys too.
    """
    recompute = np.asarray(layout.recompute)
    others = block_nbytes_per_token(model, layout)
    per_token = np.select(
        [recompute == "none", recompute == "selective"],
        [others + score_nbytes_per_token(model, layout), others],
        layout.number_nbytes * model.width / layout.sequence_share,
    )
    return plain(layout.micro_batch * model.sequence * per_token)


def block_nbytes_per_token(model: Transformer, layout: Layout) -> Numbers:
    """Bytes a token of everything that a block makes except attention's scores."""
    h, masks = model.width, 1 if model.dropout else 0
    # Not cut by tensor parallelism: inputs of two norms, of attention and of the MLP; masks of two dropouts.
    whole = (4 * layout.number_nbytes + 2 * masks) * h / layout.sequence_share
    # Cut: queries, keys, values and what they give; the MLP's hidden units before and after the activation function,
    # and with a gate the other factor and the product.
    hidden = (4 if model.gated else 2) * model.mlp_width
    return whole + layout.number_nbytes * (2 * h + 2 * model.kv_width + hidden) / layout.tensor


def score_nbytes_per_token(model: Transformer, layout: Layout) -> Numbers:
    """Bytes a token of attention's scores after the softmax, and with dropout of its mask and its output."""
    nbytes = layout.number_nbytes + ((1 + layout.number_nbytes) if model.dropout else 0)
    return model.heads * model.sequence * nbytes / layout.tensor


def worker_memory(model: Transformer, layout: Layout) -> TrainingMemory:
    """What the fullest worker holds with Adam, of the first stage or of the last; in 16 bits, by mixed precision.

    A pipeline runs 1F1B, so that its first stage keeps activations of `pipeline` micro-batches, or of all if they are
    fewer, and its last stage of one; interleaved, the first keeps (p − 1)/v more (Narayanan et al. 2021b, section 2.2;
    the table in `parallel.schedule`). What a framework, a communication library and an allocator's gaps take is not
    in it.
    """
    first, last = stage_parameters(model, layout.tensor, layout.pipeline, layout.chunks)
    blocks, rest = blocks_of_stages(model, layout.pipeline, layout.chunks)
    chunks = np.asarray(layout.chunks)
    ahead = layout.pipeline + np.where(chunks > 1, (layout.pipeline - 1) / chunks, 0)
    alone = np.asarray(layout.pipeline) == 1
    begin = _stage_memory(model, layout, first, blocks, np.minimum(ahead, layout.microbatches), alone)
    end = _stage_memory(model, layout, last, rest, 1, True)
    parts = zip(astuple(begin), astuple(end), strict=True)
    return TrainingMemory(*(plain(np.where(begin.total >= end.total, *both)) for both in parts))


def _stage_memory(
    model: Transformer, layout: Layout, parameters: Numbers, blocks: Numbers, passes: Numbers, head: Any
) -> TrainingMemory:
    """Of a worker with so many `parameters` and `blocks`, `passes` micro-batches, and where it has one the `head`."""
    number_nbytes = layout.number_nbytes
    whole = mixed_precision_adam(parameters) if number_nbytes == 2 else training_memory(parameters)
    state = sharded(whole, layout.data, layout.zero)
    h, share = model.width, layout.sequence_share
    tokens = layout.micro_batch * model.sequence
    logits = LOGIT_NBYTES * model.vocabulary / layout.tensor

    kept = passes * blocks * block_activation_nbytes(model, layout)
    # While a block is recomputed, all of it is there.
    whole_block = tokens * block_nbytes_per_token(model, layout)
    again = np.where(np.asarray(layout.recompute) == "full", whole_block, 0)
    embedding = passes * tokens * h / share if model.dropout else 0
    inputs = (2 if model.last_norm else 1) * number_nbytes * h / share  # of the head's norm and product
    activations = kept + again + embedding + np.where(head, tokens * (inputs + logits), 0)

    # There for a moment: the logits' gradient, buckets of gradients, gathered parameters, messages.
    bucket = number_nbytes * np.minimum(BUCKET_NUMBERS, parameters)
    # A block that computes, the next one that is being gathered, and gradients of one (Zhao et al. 2023, section 3.3).
    gathered = number_nbytes * 3 * model.block_parameters / layout.tensor
    stage = np.asarray(layout.zero)
    sharding = np.select([stage == 0, stage == 3], [0.0, gathered], bucket)
    message = number_nbytes * tokens * h
    buffers = (
        np.where(head, tokens * logits, 0)
        + np.where(np.asarray(layout.data) > 1, sharding, 0)
        + np.where(np.asarray(layout.tensor) > 1, message, 0)
        + np.where(np.asarray(layout.pipeline) > 1, 2 * message / layout.tensor, 0)
    )
    return replace(state, activations=activations, buffers=buffers)
