"""Context parallelism: every rank has some tokens of each sequence, and attention alone needs those of others.

Norms, MLPs and projections work on one token at a time. Between attention's queries and the keys and values of all
tokens before them, ranks meet in one of two ways:

| | ring attention | Ulysses |
| --- | --- | --- |
| from | Liu, Zaharia, Abbeel (2023) | Jacobs et al. (2023), "DeepSpeed Ulysses" |
| a rank computes | its tokens' queries, all heads, one rank's keys and values after the other | all tokens, its heads |
| what is sent | keys and values round a ring, backward with gradients | an all-to-all to heads, one back to tokens |
| bytes a rank sends, forward and backward | 6 (N − 1) K | 8 (N − 1)/N K |
| limit | one token a rank | one head a rank |

K is the size of a rank's own keys. A block of keys and values is mixed by the same kernel as whole attention, which
keeps no matrix of tokens × tokens (FlashAttention-2, Dao 2023), and tells the logarithm of the sum of exponentials of
each query's scores. From these logarithms the parts of a row are put together: online softmax, Milakov and Gimelshein
(2018).

    own = cut_context(model, communicator, length)         # this rank's tokens, and what attention needs for them
    loss = cross_entropy(model(tokens[:, own]), targets[:, own])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from workshop_utils.comm.all_to_all import all_to_all_bytes_sent
from workshop_utils.comm.communicator import Communicator
from workshop_utils.parallel.exchange import exchange_rows
from workshop_utils.parallel.gpt import Attention, Embedding
from workshop_utils.parallel.tensor import VocabularyParallelEmbedding

Block = tuple[slice, slice, bool]  # own queries, their keys, and whether the mask cuts through

_mix = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_mix_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def own_tokens(length: int, rank: int, size: int, zig_zag: bool = True) -> Tensor:
    """The places, in a sequence of `length` tokens, of those that `rank` holds.

    With `zig_zag` the sequence is cut into 2N chunks, and rank r has chunks r and 2N − 1 − r: an early and a late one,
    so that under a causal mask all ranks have equally many keys to look at (as in ring-flash-attention, Zhu 2024, and
    in Llama 3, section 3.3.2). Otherwise it is cut into N, and one rank has all tokens in their order.

    Raises:
        ValueError: if there is no such rank, or the chunks would not be equally long.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}; it must be one of {size}, at least 0 and at most {size - 1}")
    numbers = _chunks(rank, size, zig_zag)
    chunks = size * len(numbers)
    if length < 1 or length % chunks:
        cut = f"{size} ranks cut it into {chunks} equal chunks" + " (zig-zag: two each)" * (len(numbers) - 1)
        raise ValueError(f"the sequence's length is {length}; {cut}: choose a multiple of {chunks}")
    return torch.cat([torch.arange(length).chunk(chunks)[number] for number in numbers])


def _chunks(rank: int, size: int, zig_zag: bool) -> tuple[int, ...]:
    return (rank, 2 * size - 1 - rank) if zig_zag and size > 1 else (rank,)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    communicator: Communicator,
    zig_zag: bool = True,
    is_causal: bool = True,
) -> Tensor:
    """What the queries of this rank's tokens mix from the values of all ranks' tokens up to theirs.

    All tensors are (batch, heads, own tokens, head width), float32 or float64, with the tokens of `own_tokens`, in its
    order. Scores are divided by √(head width): where a model has a scale of its own, scale the query first. There is no
    window and no dropout.

    Raises:
        ValueError: if the mask is not causal, the three are not of one shape and dtype, or the own tokens are no two
            equal chunks where `zig_zag` needs them.
    """
    _check(query, key, value, is_causal)
    if zig_zag and communicator.size > 1 and query.shape[2] % 2:
        tokens = f"this rank has {query.shape[2]} tokens"
        raise ValueError(f"{tokens}; a zig-zag share is two equal chunks: choose an even number")
    if key.shape[1] != query.shape[1]:
        heads = f"query has {query.shape[1]} heads and key {key.shape[1]}"
        raise ValueError(f"{heads}; repeat those of key and value until there are as many")
    if query.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"query is {query.dtype}; the ring needs float32 or float64")
    if query.stride(3) != 1:  # the kernel reads what follows in memory; `torch.stack` makes key and value so
        query = query.contiguous()
    mixed: Tensor = _RingAttention.apply(query, key, value, communicator, zig_zag)
    return mixed


def _check(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> None:
    """Refuse what neither way can mix; the kernel of the ring would read, or divide, by what is not there."""
    if not is_causal:
        raise ValueError(f"is_causal is {is_causal}; each token looks at those up to it here: pass True")
    if query.dim() != 4 or not query.numel():
        axes = "(batch, heads, own tokens, head width), each at least 1"
        raise ValueError(f"query has the shape {tuple(query.shape)}; it must be {axes}")
    right = query.shape[0], max(1, key.shape[1]) if key.dim() == 4 else query.shape[1], *query.shape[2:]
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != right or tensor.dtype != query.dtype:
            given = f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}"
            raise ValueError(f"{given}; beside this query it must be {query.dtype} of shape {right}")


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, communicator: Communicator, zig_zag: bool
    ) -> Tensor:
        mixed = torch.zeros_like(query)
        log_sums = query.new_full(query.shape[:-1], -torch.inf)
        for visiting, blocks in _visits(torch.stack([key, value]), communicator, zig_zag):
            for mine, theirs, is_diagonal in blocks:
                part, log_sum = _mix(query[:, :, mine], *visiting[:, :, :, theirs], is_causal=is_diagonal)
                before = log_sums[:, :, mine]
                total = torch.logaddexp(before, log_sum)
                old, new = (torch.exp(each - total)[..., None] for each in (before, log_sum))
                mixed[:, :, mine] = old * mixed[:, :, mine] + new * part
                log_sums[:, :, mine] = total
        ctx.save_for_backward(query, key, value, mixed, log_sums)
        ctx.communicator, ctx.zig_zag = communicator, zig_zag
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """FlashAttention-2's backward pass block by block, with the sums of whole rows.

        The gradients of a block of keys and values travel one step behind it, and one step further: home.
        """
        query, key, value, mixed, log_sums = ctx.saved_tensors
        of_query, own = torch.zeros_like(query), torch.stack([key, value])
        at_home = travelling = torch.zeros_like(own)
        for step, (visiting, blocks) in enumerate(_visits(own, ctx.communicator, ctx.zig_zag)):
            of_visiting = torch.zeros_like(visiting)
            for mine, theirs, is_diagonal in blocks:
                rows = [each[:, :, mine] for each in (gradients[0], query, mixed, log_sums)]
                pair = visiting[:, :, :, theirs]
                parts = _mix_backward(*rows[:2], *pair, *rows[2:], dropout_p=0.0, is_causal=is_diagonal)
                of_query[:, :, mine] += parts[0]
                of_visiting[:, :, :, theirs] += torch.stack(parts[1:])
            if step == 0:
                at_home = of_visiting
            else:
                travelling = of_visiting + (_from_left(travelling, ctx.communicator) if step > 1 else 0)
        if ctx.communicator.size > 1:
            at_home += _from_left(travelling, ctx.communicator)
        return of_query, at_home[0], at_home[1], None, None


def _visits(own: Tensor, communicator: Communicator, zig_zag: bool) -> Iterator[tuple[Tensor, list[Block]]]:
    """Every rank's keys and values, one after the other, this rank's own first.

    With them come the blocks that a causal mask leaves to be computed: own queries, their keys, and whether these are
    the same tokens, so that the mask hides half.
    """
    rank, size = communicator.rank, communicator.size
    mine, visiting = _chunks(rank, size, zig_zag), own
    length = own.shape[3] // len(mine)
    for step in range(size):
        if step:
            visiting = _from_left(visiting, communicator)
        theirs = _chunks((rank - step) % size, size, zig_zag)
        blocks = [
            (slice(i * length, (i + 1) * length), slice(j * length, (j + 1) * length), own_chunk == chunk)
            for i, own_chunk in enumerate(mine)
            for j, chunk in enumerate(theirs)
            if chunk <= own_chunk
        ]
        yield visiting, blocks


def _from_left(outgoing: Tensor, communicator: Communicator) -> Tensor:
    """Send to the right, and return what came from the left."""
    right, left = (communicator.rank + 1) % communicator.size, (communicator.rank - 1) % communicator.size
    incoming = torch.empty_like(outgoing)
    communicator.send_recv(right, outgoing.numpy(), left, incoming.numpy())
    return incoming


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, communicator: Communicator, is_causal: bool = True
) -> Tensor:
    """The same as `ring_attention`, with whole sequences of this rank's share of the heads in between.

    All tensors are (batch, heads, own tokens, head width), with the tokens of `own_tokens(…, zig_zag=False)`. Key and
    value may have fewer heads than the query, each of which then serves several (grouped-query attention).

    Raises:
        ValueError: if the mask is not causal, the three differ in more than heads, or the ranks do not divide the heads
            of query or key, or those of the key the query's.
    """
    _check(query, key, value, is_causal)
    for name, tensor in (("query", query), ("key", key)):
        if tensor.shape[1] % communicator.size:
            dealt = f"Ulysses deals out whole heads, and {communicator.size} ranks do not divide them"
            raise ValueError(f"{name} has {tensor.shape[1]} heads; {dealt}: take fewer ranks, or the ring")
    if query.shape[1] % key.shape[1]:
        heads = f"query has {query.shape[1]} heads and key {key.shape[1]}"
        raise ValueError(f"{heads}; each of the key's must serve equally many of the query's")
    grouped = key.shape[1] != query.shape[1]
    query, key, value = (_exchanged(each, communicator, 1, 2) for each in (query, key, value))
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return _exchanged(mixed, communicator, 2, 1)


def _exchanged(x: Tensor, communicator: Communicator, cut: int, completed: int) -> Tensor:
    """`x` after an all-to-all that cuts one dimension and completes another."""
    ranks, share = communicator.size, [len(x)] * communicator.size
    arrived = exchange_rows(torch.cat(x.chunk(ranks, dim=cut)), share, share, communicator)
    return torch.cat(arrived.chunk(ranks), dim=completed)


def cut_context(
    model: nn.Module, communicator: Communicator, length: int, how: Literal["ring", "ulysses"] = "ring"
) -> Tensor:
    """Let every Attention of a GPT, or of a stage of it, work on this rank's tokens of sequences of `length`, in place.

    The embedding gets to know where these tokens stand. Feed `tokens[:, own]`, `own` being what is returned; other
    tokens, as many, give a wrong loss without an error. With the loss of each rank the mean over its own tokens, the
    gradient of the whole sequence's is the mean over the ranks of `communicator` (`mesh.synchronise`).

    For whole sequences again, as in an evaluation on one rank, set each Attention's `core` to `gpt.causal_attention`
    and the embedding's `places` to None.

    Returns:
        The own tokens' places: zig-zag for a ring, in one piece for Ulysses.

    Raises:
        ValueError: if `how` is neither, `own_tokens` has no equal chunks, there is no Attention, or the embedding, if
            it is in `model`, has fewer places than `length`.
    """
    ways: dict[str, Callable[..., Tensor]] = {"ring": ring_attention, "ulysses": ulysses_attention}
    if how not in ways:
        raise ValueError(f"how is {how!r}; it must be one of {', '.join(ways)}")
    own = own_tokens(length, communicator.rank, communicator.size, zig_zag=how == "ring")
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    if not layers:
        advice = "in another model's attention call ring_attention, its positions being own_tokens"
        raise ValueError(f"the model has no parallel.gpt.Attention; {advice}")
    for module in model.modules():
        if isinstance(module, Embedding | VocabularyParallelEmbedding):
            position = module.position
            places = len(position.weight if isinstance(position, nn.Embedding) else position)
            if length > places:
                raise ValueError(
                    f"the sequence's length is {length}; the model has positions for {places} tokens"
                )
            module.places = own
    for layer in layers:
        layer.core = partial(ways[how], communicator=communicator)
    return own


def ring_attention_bytes_sent(size: int, nbytes: int) -> float:
    """Bytes that each of `size` ranks sends for one ring attention, forward and backward: 6 (N − 1) K.

    K, `nbytes`, is the size of the own keys: batch · heads · own tokens · head width · itemsize. In N − 1 steps forward
    keys and values are sent, in as many backward these and their gradients.
    """
    return 6 * (size - 1) * nbytes


def ulysses_bytes_sent(size: int, nbytes: int) -> float:
    """Bytes that each of `size` ranks sends for one Ulysses attention, forward and backward: 8 (N − 1)/N · K.

    K is as for the ring, with as many heads of keys as of queries: query, key, value and what was mixed are exchanged
    once forward and once backward (Jacobs et al. 2023, section 3.2).
    """
    return 8 * all_to_all_bytes_sent(size, nbytes)
