"""Tensor parallelism: every rank has a part of each layer, and all ranks work on the same microbatch.

Shoeybi et al. (2019), "Megatron-LM", section 3. A pair of linear layers is cut so that only its end must be summed:

    Y = gelu(X A), Z = Y B        A by its columns, B by its rows: Z = Σ over ranks of gelu(X Aᵣ) Bᵣ

The two places where ranks meet are the paper's conjugate operators f, where X comes in, and g, where Z comes out. With
sequence parallelism (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2) they are g and ḡ, and what lies between the pairs, norms and residuals, is cut along the sequence:

| | forward | backward | here |
| --- | --- | --- | --- |
| f | nothing | all-reduce | in `ColumnParallelLinear` |
| g | all-reduce | nothing | `Region.sum_up` |
| g, sequence parallel | all-gather | reduce-scatter, and X gathered once more | `_GatheredLinear` |
| ḡ, sequence parallel | reduce-scatter | all-gather | `Region.sum_up` |

An all-reduce is a reduce-scatter and an all-gather, so both forms send as much, but for X: to keep only its own share
of X until the backward pass, a rank has it gathered again there.

PyTorch's `nn.Linear` keeps A transposed, so that a cut by columns is one by the rows of `weight`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from workshop_utils.comm.communicator import Communicator, Operation
from workshop_utils.comm.ring import ring_all_gather, ring_all_reduce, ring_bytes_sent, ring_reduce_scatter
from workshop_utils.comm.subset import Subset
from workshop_utils.parallel.experts import Experts
from workshop_utils.parallel.gpt import Block, Embedding, Head, places_of

Operator = Callable[[Tensor], Tensor]  # f, g or ḡ
IGNORED = -100  # a target that counts nothing


class Region:
    """The ranks that hold one layer together, and how activations come in and go out.

    Args:
        communicator: those ranks.
        sequence_parallel: whether activations outside are cut along the sequence; they are (batch, sequence, width).
    """

    def __init__(self, communicator: Communicator, sequence_parallel: bool = False) -> None:
        self.communicator, self.sequence_parallel = communicator, sequence_parallel
        # A ring leaves the rank in place r with chunk r + 1. Seen from one place further, that is its own.
        self.ring = Subset(communicator, [*range(1, communicator.size), 0])

    def sum_up(self, partial: Tensor) -> Tensor:
        """The sum over all ranks of what their parts gave: g, or of its sequence this rank's share: ḡ."""
        pair = (self.scatter_sum, self.gather_sequence) if self.sequence_parallel else (self.sum, _same)
        total: Tensor = _Conjugate.apply(partial, *pair)
        return total

    def own(self, length: int) -> slice:
        """This rank's share of `length` equal things: shares differ by one at most."""
        rank, size = self.communicator.rank, self.communicator.size
        return slice(rank * length // size, (rank + 1) * length // size)

    def sum(self, x: Tensor, operation: Operation = "sum") -> Tensor:
        """The all-reduced `x`, as a tensor of its own."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        ring_all_reduce(self.communicator, total.numpy(), operation)
        return total

    def gather_sequence(self, x: Tensor) -> Tensor:
        """All ranks' shares (batch, sequence/N, width), one after the other: (batch, sequence, width)."""
        batch, share, width = x.shape
        size, rank = self.communicator.size, self.communicator.rank
        whole = x.new_empty(size, share, batch, width)  # a rank's share in one piece
        whole[rank] = x.detach().transpose(0, 1)
        ring_all_gather(self.ring, whole.numpy())
        return whole.view(size * share, batch, width).transpose(0, 1)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """This rank's share, along the sequence, of the sum of all ranks' `x`.

        Raises:
            ValueError: if the sequence has no equal shares.
        """
        size = self.communicator.size
        if x.shape[1] % size:
            advice = f"sequence parallelism cuts it into {size} equal shares: choose a multiple of {size}"
            raise ValueError(f"the sequence has {x.shape[1]} tokens; {advice}")
        whole = x.detach().transpose(0, 1).clone(memory_format=torch.contiguous_format)
        ring_reduce_scatter(self.ring, whole.numpy())
        return whole[self.own(x.shape[1])].transpose(0, 1)


class _Conjugate(torch.autograd.Function):
    """One operation forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Operator, backward: Operator) -> Tensor:
        ctx.gradient_of = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.gradient_of(gradients[0]), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


class _GatheredLinear(torch.autograd.Function):
    """g of sequence parallelism with the linear layer, so that the gathered input need not be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: Region) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.region, ctx.has_bias = region, bias is not None
        return functional.linear(region.gather_sequence(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, weight), region = ctx.saved_tensors, ctx.region
        rows = gradients[0].flatten(0, -2)
        whole = region.gather_sequence(x).flatten(0, -2)
        own = region.scatter_sum(gradients[0] @ weight)
        return own, rows.t() @ whole, rows.sum(dim=0) if ctx.has_bias else None, None


class Cut(nn.Module):
    """A layer of which this rank has a part. `cut` names the parameters that are parts; all others are whole."""

    cut: tuple[str, ...] = ("weight",)

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region


def _part(whole: Tensor, own: Any = ...) -> nn.Parameter:
    return nn.Parameter(whole.detach()[own].clone(), whole.requires_grad)


class ColumnParallelLinear(Cut):
    """Some of a linear layer's outputs: input (…, all inputs), output (…, own outputs).

    Args:
        linear: the whole layer; this rank's part of it is copied.
        region: the ranks that share it.
        unit: how many outputs must stay together: those of an attention head.
    """

    cut = ("weight", "bias")

    def __init__(self, linear: nn.Linear, region: Region, unit: int = 1) -> None:
        super().__init__(region)
        own = _share(region, linear.out_features, unit)
        self.weight = _part(linear.weight, own)
        self.bias = None if linear.bias is None else _part(linear.bias, own)

    def forward(self, x: Tensor) -> Tensor:
        if self.region.sequence_parallel:
            return _GatheredLinear.apply(x, self.weight, self.bias, self.region)
        return functional.linear(_Conjugate.apply(x, _same, self.region.sum), self.weight, self.bias)


class RowParallelLinear(Cut):
    """A linear layer fed with some of its inputs: input (…, own inputs), output (…, all outputs), summed."""

    def __init__(self, linear: nn.Linear, region: Region, unit: int = 1) -> None:
        super().__init__(region)
        self.weight = _part(linear.weight, (..., _share(region, linear.in_features, unit)))
        self.bias = None if linear.bias is None else _part(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        total = self.region.sum_up(functional.linear(x, self.weight))
        return total if self.bias is None else total + self.bias  # once, after the sum


def _share(region: Region, features: int, unit: int) -> slice:
    units = features // unit
    if units < region.communicator.size:
        raise ValueError(f"{region.communicator.size} ranks cannot share {units} units of {unit} features")
    own = region.own(units)
    return slice(own.start * unit, own.stop * unit)


class VocabularyParallelEmbedding(Cut):
    """Each rank knows some of the tokens; those of others count as zero before the sum.

    Raises:
        ValueError: if there are more ranks than tokens; in a forward pass, for tokens outside the vocabulary.
    """

    cut = ("token",)

    def __init__(self, embedding: Embedding, region: Region) -> None:
        super().__init__(region)
        self.vocabulary = embedding.token.num_embeddings
        self.tokens = _share(region, self.vocabulary, 1)
        self.token = _part(embedding.token.weight, self.tokens)
        self.position = _part(embedding.position.weight)
        self.places = embedding.places

    def forward(self, tokens: Tensor) -> Tensor:
        _check_tokens("tokens", tokens, self.vocabulary)
        foreign = (tokens < self.tokens.start) | (tokens >= self.tokens.stop)
        local = (tokens - self.tokens.start).masked_fill(foreign, 0)
        own = functional.embedding(local, self.token).masked_fill(foreign.unsqueeze(-1), 0.0)
        position = self.position[places_of(tokens, self.places)]
        share = self.region.own(tokens.shape[1]) if self.region.sequence_parallel else slice(None)
        return self.region.sum_up(own) + position[share]


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, region: Region, vocabulary: int
) -> Any:
    """Mean loss in nats, on every rank, from each rank's logits for its part of the vocabulary.

    Instead of all logits, three numbers a token cross: the largest logit, the sum of exponentials, and the target's
    logit (Shoeybi et al. 2019, section 3).

    Args:
        logits: (batch, sequence, own part of the vocabulary).
        targets: (batch, sequence) tokens of the whole vocabulary, the same on every rank; -100, as with PyTorch's
            `cross_entropy`, leaves a place out.
        region: the ranks whose parts, in their order, make the vocabulary.
        vocabulary: how many tokens there are.

    Raises:
        ValueError: if `logits` are not for as many tokens as this rank's part has, or a target is no token.
    """
    own = region.own(vocabulary)
    if logits.shape[-1] != own.stop - own.start:
        right = f"of a vocabulary of {vocabulary} this rank's part is {own.stop - own.start}"
        raise ValueError(f"logits are for {logits.shape[-1]} tokens; {right}")
    _check_tokens("targets", targets[targets != IGNORED], vocabulary)
    return _VocabularyParallelCrossEntropy.apply(logits, targets, region, own.start)


def _check_tokens(name: str, tokens: Tensor, vocabulary: int) -> None:
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(outside):
        raise ValueError(f"{name} has {outside[0]}; each must be at least 0 and below {vocabulary}")


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, region: Region, first: int) -> Tensor:
        shape = logits.shape
        logits, targets = logits.flatten(0, -2), targets.flatten()
        local, rows = targets - first, torch.arange(len(targets))
        own = (local >= 0) & (local < logits.shape[1])

        shifted = logits - region.sum(logits.max(dim=1).values, "max").unsqueeze(1)
        exponentials = shifted.exp()
        at_target = torch.where(own, shifted[rows, local.clamp(0, logits.shape[1] - 1)], 0.0)
        total, target = region.sum(torch.stack([exponentials.sum(dim=1), at_target]))

        gradient = exponentials / total.unsqueeze(1)
        gradient[rows[own], local[own]] -= 1
        known = targets != IGNORED
        ctx.save_for_backward(gradient * known.unsqueeze(1) / known.sum())
        ctx.shape = shape
        return ((total.log() - target) * known).sum() / known.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradients[0] * gradient).view(ctx.shape), None, None, None


def parallelize(module: nn.Module, region: Region) -> nn.Module:
    """`module` with the layers of every Block, Embedding and Head in it replaced by this rank's parts, in place.

    Every rank must hand over the same whole weights. Behind a Head there are then logits for a part of the vocabulary:
    use `vocabulary_parallel_cross_entropy`.

    Returns:
        `module`, or what replaces it if it is an Embedding itself.

    Raises:
        ValueError: if there are more ranks than attention heads, hidden units or tokens to share, the sequence is to be
            cut too and there are experts, a layer to be cut shares a parameter with another one, or an MLP is not made
            of `up` and `down`; then nothing is cut.
    """
    if region.sequence_parallel and any(isinstance(each, Experts) for each in module.modules()):
        raise ValueError("sequence_parallel is True; experts are cut without it: use Region(communicator)")
    root, parts = nn.ModuleList([module]), dict(_parts(module, region))
    layers_with = Counter(each for layer in module.modules() for each in layer.parameters(recurse=False))
    for path, layer in root.named_modules():
        if layer in parts and any(layers_with[each] > 1 for each in layer.parameters()):
            name = path.partition(".")[2] or "the Embedding"
            raise ValueError(f"{name} shares a parameter with another layer; to be cut it needs its own")
    for path, layer in list(root.named_modules(remove_duplicate=False)):
        if layer in parts:
            owner, _, name = path.rpartition(".")
            setattr(root.get_submodule(owner), name, parts[layer])
    return root[0]


def _parts(module: nn.Module, region: Region) -> Iterator[tuple[nn.Module, Cut]]:
    """Each layer that is to be cut, with this rank's part of it."""
    for each in module.modules():
        if isinstance(each, Embedding):
            yield each, VocabularyParallelEmbedding(each, region)
        elif isinstance(each, Head):
            yield each.vocabulary, ColumnParallelLinear(each.vocabulary, region)
        elif isinstance(each, Block):
            attention, unit = each.attention, each.attention.head_width
            yield attention.qkv, ColumnParallelLinear(attention.qkv, region, 3 * unit)
            yield attention.out, RowParallelLinear(attention.out, region, unit)
            # Of experts each is cut; the router is whole on every rank.
            mlps: Any = each.mlp.experts.values() if isinstance(each.mlp, Experts) else [each.mlp]
            for mlp in mlps:
                if not (hasattr(mlp, "up") and hasattr(mlp, "down")):
                    raise ValueError(f"mlp is a {type(mlp).__name__}; to be cut it needs layers up and down")
                yield mlp.up, ColumnParallelLinear(mlp.up, region)
                yield mlp.down, RowParallelLinear(mlp.down, region)


def cut_parameters(module: nn.Module) -> set[Any]:
    """The parameters of which this rank has a part, where its tensor neighbours have others; all others are whole."""
    cut = [layer for layer in module.modules() if isinstance(layer, Cut)]
    return {getattr(layer, name) for layer in cut for name in layer.cut}


def finish_gradients(module: nn.Module, region: Region) -> None:
    """Sum the gradients of parameters that every rank has whole (norms, positions, biases behind a sum).

    With sequence parallelism each rank has seen only its share of the sequence; without it there is nothing to do.
    To be called after the last backward pass of a step.
    """
    if region.sequence_parallel:
        cut = cut_parameters(module)
        all_reduce_gradients((each for each in module.parameters() if each not in cut), region.communicator)


def all_reduce_gradients(
    parameters: Iterable[nn.Parameter], communicator: Communicator, operation: Operation = "sum"
) -> None:
    """Replace the gradients of `parameters`, which may have none, by their reduction over all ranks: one all-reduce."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    together = torch.cat([gradient.flatten() for gradient in gradients])
    ring_all_reduce(communicator, together.numpy(), operation)
    for gradient, reduced in zip(
        gradients, together.split([each.numel() for each in gradients]), strict=True
    ):
        gradient.copy_(reduced.view_as(gradient))


def block_bytes_sent(ranks: int, nbytes: int, sequence_parallel: bool = False) -> float:
    """Bytes that a rank sends for one Block, forward and backward: 4 all-reduces of `nbytes`.

    `nbytes` is the size of a microbatch's activations between blocks, batch · sequence · width · itemsize. Two
    all-reduces are forward, two backward (Shoeybi et al. 2019, section 3). With sequence parallelism each is an
    all-gather and a reduce-scatter instead, and 2 all-gathers more are backward; what `finish_gradients` sends once a
    step comes on top.
    """
    return (5 if sequence_parallel else 4) * ring_bytes_sent(ranks, nbytes)


def ends_bytes_sent(ranks: int, nbytes: int, tokens: int, sequence_parallel: bool = False) -> float:
    """Bytes that a rank sends for Embedding, Head and loss: 2 all-reduces of `nbytes`, and 3 float32 a token.

    The embedding is summed forward and the gradient of the head's input backward. With sequence parallelism an
    all-gather, half an all-reduce, is added for the head.
    """
    all_reduces = 2.5 if sequence_parallel else 2
    return all_reduces * ring_bytes_sent(ranks, nbytes) + ring_bytes_sent(ranks, 3 * tokens * 4)
