"""How many bytes all ranks together send in a step and its update, by the closed forms of `parallel`.

Forms are means over ranks, exact in their sum, so sums are what is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.lessons.gauntlet.model import Batch, Options, whole_model
from workshop_utils.parallel import context, experts, gpt, tensor
from workshop_utils.parallel.schedule import schedule_of

ITEM = 8  # bytes of a float64, and of a count
WHOLE = "norm", "position", "router", "out.bias", "down.bias"  # in names of what each tensor rank has whole


def bytes_sent(layout: Mapping[str, int], options: Options, batch: Batch, kept: Sequence[Tensor]) -> float:
    """Of a `trainer.Training` in this layout, where ranks divide all sizes.

    Args:
        batch: the whole one.
        kept: as in `expert_bytes_sent`, for each time that some ranks' tokens were sent to experts.
    """
    t, c, d, p = (layout.get(name, 1) for name in ("tensor", "context", "data", "pipeline"))
    replicas, world, count = d * c, t * c * d * p, options.microbatches
    plan = schedule_of(options.schedule, p, count, 2 if options.schedule == "interleaved" else 1)
    crossings = sum(plan.rank_of(stage) != plan.rank_of(stage + 1) for stage in range(plan.stages - 1))
    tokens = len(batch[0]) // (count * d) * options.sequence // c
    nbytes = tokens * options.width * ITEM  # of a microbatch's activations between blocks
    way = context.ring_attention_bytes_sent if options.how == "ring" else context.ulysses_bytes_sent

    # A microbatch of one replica, forward and backward.
    block = t * tensor.block_bytes_sent(t, nbytes, options.sequence_parallel) + way(c, nbytes)
    if options.experts:  # instead of a sum of all tokens there and back, one of k rows a token
        block += (options.k - 1) * 2 * t * ring_bytes_sent(t, nbytes)
    pipe = 2 * crossings * nbytes * (1 if options.sequence_parallel else t)
    ends = t * tensor.ends_bytes_sent(t, nbytes, 0, options.sequence_parallel)
    total = count * replicas * (options.layers * block + pipe + ends)
    total += _losses(batch, options, d, c) * t * ring_bytes_sent(t, 3 * tokens * ITEM)
    total += sum(float(experts.expert_bytes_sent(each, options.width * ITEM).sum()) for each in kept)

    # Gradients, and weights where they are cut: all tensor ranks' of a replica.
    every, whole, of_experts, tied = _held(options, t)
    times = {"plain": 2, "overlapped": 2, "zero1": 3, "fully_sharded": 3 * count}[options.data_parallel]
    total += times * (replicas - 1) * every + 2 * (replicas // layout.get("experts", 1) - 1) * of_experts
    copies = 1 if options.data_parallel == "fully_sharded" else replicas
    if options.sequence_parallel:
        total += copies * t * ring_bytes_sent(t, whole)
    if plan.rank_of(0) != plan.rank_of(plan.stages - 1):
        total += copies * 2 * ring_bytes_sent(2, tied)

    # Single numbers: counted targets, the loss, the norm; and loads.
    total += (world + replicas * t) * ring_bytes_sent(replicas, ITEM)
    total += world * sum(ring_bytes_sent(size, ITEM) for size in (t, replicas, p))
    loads = options.layers * options.experts * bool(options.bias_rate)
    return total + replicas * t * ring_bytes_sent(replicas, ITEM * loads)


def _losses(batch: Batch, options: Options, data: int, ranks: int) -> int:
    """How many microbatches have a target that counts, and so a loss, on how many replicas."""
    zig_zag, microbatches = options.how == "ring", batch[1].chunk(options.microbatches * data)
    places = [context.own_tokens(options.sequence, rank, ranks, zig_zag) for rank in range(ranks)]
    return sum(bool((each[:, own] != tensor.IGNORED).any()) for each in microbatches for own in places)


def _held(options: Options, ranks: int) -> tuple[int, int, int, int]:
    """Bytes of a replica on all its tensor ranks, but for experts; on each of them; of experts; of a tied weight."""
    every = whole = of_experts = 0
    for name, each in whole_model(**vars(options)).named_parameters():
        is_whole = any(part in name for part in WHOLE)
        nbytes = each.nbytes * (ranks if is_whole else 1)
        if ".experts." in name:
            of_experts += nbytes
        else:
            every, whole = every + nbytes, whole + is_whole * each.nbytes
    tied = options.tied * gpt.BYTES * options.width * ITEM
    return every + tied, whole, of_experts, tied
