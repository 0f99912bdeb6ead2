"""How long a step takes on given instances in a given layout, and where the time goes.

    layout = Layout(data=64, tensor=8, pipeline=16, microbatches=16, recompute="selective")
    time = step_time(model("llama-3.1-405b"), instance("p5.48xlarge"), layout)
    time.seconds, time.mfu, time.bubble / time.seconds

Arithmetic in bfloat16 at the instance's kernel efficiency, plus what communication cannot hide; each cost is a closed
form of `cost`. Numbers may be NumPy arrays, as in `memory`. Left out: loading data, checkpoints, the optimizer's own
arithmetic, and how small matrix products are slower than large ones. Collectives are rings, which makes latency count
among thousands of data-parallel workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workshop_utils.comm.topology import Link, Numbers
from workshop_utils.scaling import cost, memory
from workshop_utils.scaling.catalogue import Instance, Transformer
from workshop_utils.scaling.memory import Layout

# The part of a link's bandwidth that a collective of large arrays gets: 234.9 of 300 GB/s, all-reduce of 16 GiB between
# the 8 A100 of one machine. Source: Bekman, "Machine Learning Engineering", network benchmarks.
COLLECTIVE_EFFICIENCY = 0.78

FORWARD_PASSES, BACKWARD_PASSES = 2, 4  # through memory, of each array between matrix products


@dataclass(frozen=True)
class StepTime:
    """Where the time of a step goes, in seconds of the busiest stage's workers.

    Attributes:
        compute: arithmetic, with what is computed again, and reading and writing what lies between matrix products.
        tensor: all-reduces inside layers.
        bubble: waiting for other stages, and messages that fill and drain the pipeline.
        data: the part of data parallelism's communication that arithmetic does not hide.
        mfu: the part of all accelerators' peak that goes into the model's own arithmetic, each part counted once.
            Source: Chowdhery et al. (2022, PaLM), appendix B.
    """

    compute: Numbers
    tensor: Numbers
    bubble: Numbers
    data: Numbers
    mfu: Numbers

    @property
    def seconds(self) -> Numbers:
        """The whole step."""
        return self.compute + self.tensor + self.bubble + self.data


def step_time(
    model: Transformer, instance: Instance, layout: Layout, fused_attention: bool = True
) -> StepTime:
    """Of one step of `layout` on as many of `instance` as it needs.

    With `fused_attention`, scores that are not kept do not leave the kernel (Dao et al. 2022, FlashAttention); before
    there was such a kernel, they were written and read.

    Workers are laid out as Megatron-LM does it: a tensor-parallel group inside a machine, then data-parallel ones, then
    the stages (Narayanan et al. 2021b, section 3.3).
    """
    peak = instance.flops_per_second["bfloat16"]
    tokens = layout.micro_batch * model.sequence
    products = _stage_flops(model, layout) / (peak * instance.kernel_efficiency)
    between = _stage_traffic(model, layout, fused_attention) / instance.memory_bytes_per_second
    arithmetic = tokens * (products + between)
    within = _tensor_seconds(model, instance, layout)
    # One micro-batch's activations from one stage to the next; tensor-parallel workers send a share each.
    nbytes = layout.number_nbytes * tokens * model.width / layout.tensor
    message = _across(instance, layout, 1).seconds(nbytes)
    shape = layout.pipeline, layout.microbatches
    through = cost.pipeline_step_seconds(*shape, arithmetic + within, message, layout.chunks)
    exposed = _data_seconds(model, instance, layout, arithmetic)
    busy = layout.microbatches * (arithmetic + within)
    useful = model.flops_per_token * layout.sequences * model.sequence
    return StepTime(
        compute=layout.microbatches * arithmetic,
        tensor=layout.microbatches * within,
        bubble=through - busy,
        data=exposed,
        mfu=useful / (layout.workers * peak * (through + exposed)),
    )


def _stage_flops(model: Transformer, layout: Layout) -> Numbers:
    """Operations a token on one worker of the busiest stage: forward, twice as many backward, and what is repeated."""
    attention = 12 * model.width * model.sequence / (2 if model.causal else 1)
    products = 6 * model.block_matrix_parameters
    recompute = np.asarray(layout.recompute)
    kinds = [recompute == "none", recompute == "selective"]
    again = np.select(kinds, [0, attention], attention + products) / 3
    block, head = products + attention + again, 6 * model.vocabulary * model.width
    most, rest = memory.blocks_of_stages(model, layout.pipeline, layout.chunks)
    return np.maximum(most * block, rest * block + head) / layout.tensor


def _stage_traffic(model: Transformer, layout: Layout, fused_attention: bool) -> Numbers:
    """Bytes a token that one worker of a stage moves to and from memory for what is no matrix product.

    Every array that a block makes is written and read once in the forward pass, and again where it is recomputed; in
    the backward pass it is read, its gradient is read, and another written.
    """
    recompute = np.asarray(layout.recompute)
    in_memory = (recompute == "none") | (not fused_attention)
    scores = np.where(in_memory, memory.score_nbytes_per_token(model, layout), 0)
    made = memory.block_nbytes_per_token(model, layout) + scores
    passes = FORWARD_PASSES * np.where(recompute == "full", 2, 1) + BACKWARD_PASSES
    logits = (FORWARD_PASSES + BACKWARD_PASSES) * memory.LOGIT_NBYTES * model.vocabulary / layout.tensor
    most, rest = memory.blocks_of_stages(model, layout.pipeline, layout.chunks)
    return np.maximum(most * made * passes, rest * made * passes + logits)


def _tensor_seconds(model: Transformer, instance: Instance, layout: Layout) -> Numbers:
    """All-reduces of one micro-batch inside the layers of one stage, as rings; nothing overlaps.

    A layer has two forward and two backward, two more where the forward pass is recomputed; sequence parallelism moves
    the same bytes by reduce-scatters and all-gathers. Source: Shoeybi et al. (2019), "Megatron-LM", section 3.
    """
    nbytes = layout.number_nbytes * layout.micro_batch * model.sequence * model.width
    bandwidth = COLLECTIVE_EFFICIENCY * instance.inner_bytes_per_second
    path = Link(instance.inner_latency_seconds, bandwidth)
    most, _ = memory.blocks_of_stages(model, layout.pipeline, layout.chunks)
    all_reduces = np.where(np.asarray(layout.recompute) == "full", 6, 4)
    return most * all_reduces * cost.all_reduce_seconds("ring", layout.tensor, nbytes, path)


def _across(instance: Instance, layout: Layout, neighbours: Numbers) -> Link:
    """The way of one worker to one on another machine, where `neighbours` of its group share its machine.

    A ring leaves a machine once, so a group has the NIC's share of all its members there. Where one machine holds all
    workers, it is the way inside.
    """
    inside = np.asarray(layout.workers) <= instance.accelerators
    share = np.where(inside, np.inf, instance.network_bytes_per_second * neighbours / instance.accelerators)
    bandwidth = np.minimum(share, instance.inner_bytes_per_second)
    hop = instance.network_latency_seconds - instance.inner_latency_seconds
    latency = instance.inner_latency_seconds + np.where(inside, 0, hop / neighbours)
    return Link(latency, COLLECTIVE_EFFICIENCY * bandwidth)


def _data_seconds(model: Transformer, instance: Instance, layout: Layout, arithmetic: Numbers) -> Numbers:
    """What of a step's gradients and parameters travels while nobody computes.

    Gradients are reduced block by block behind the backward pass: of the last micro-batch for stages 0 and 1, of each
    for stages 2 and 3, which do not keep them whole. Parameters are gathered at the end of a step for stages 1 and 2,
    and block by block behind both passes of each micro-batch for stage 3. Source: Rajbhandari et al. (2020), section 7;
    Zhao et al. (2023, FSDP), section 3.3.
    """
    data, zero, repeats = np.asarray(layout.data), np.asarray(layout.zero), layout.microbatches
    neighbours = np.minimum(data, np.maximum(1, instance.accelerators // np.asarray(layout.tensor)))
    path = _across(instance, layout, neighbours)
    blocks, _ = memory.blocks_of_stages(model, layout.pipeline, layout.chunks)
    sizes = memory.stage_parameters(model, layout.tensor, layout.pipeline, layout.chunks)
    bucket = layout.number_nbytes * np.maximum(*sizes) / blocks  # the ends' tables are spread over the blocks
    half = cost.half_ring_seconds(data, bucket, path)  # to scatter gradients, or to gather parameters
    forward, backward = arithmetic / 3, arithmetic * 2 / 3

    def behind_backward(each: Numbers) -> Numbers:
        return cost.data_parallel_step_seconds(0.0, backward, each, blocks) - backward

    stage3 = repeats * (np.maximum(0, blocks * half - forward) + behind_backward(half + half)) + half
    stage0 = behind_backward(half + half)
    stage1 = behind_backward(half) + blocks * half
    stage2 = repeats * behind_backward(half) + blocks * half
    exposed = np.choose(zero, [stage0, stage1, stage2, stage3])
    return np.where(data > 1, exposed, 0.0)
