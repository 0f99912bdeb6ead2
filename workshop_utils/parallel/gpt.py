"""A small GPT that reads bytes, in parts that can be put on different ranks.

The blocks are those of GPT-2 (Radford et al. 2019): layer normalisation before attention and before the MLP, learned
positions. Input and output embeddings are not tied, so that no parameter belongs to two stages of a pipeline.

    model = GPT(GPTSizes(), seed=0)
    loss = cross_entropy(model(tokens), targets)            # tokens, targets: (batch, sequence) of bytes
    first, second = model.stages(2)                         # the same modules, as two parts of a pipeline
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from workshop_utils.parallel.experts import Experts, check_choices

BYTES = 256


@dataclass(frozen=True)
class GPTSizes:
    """How large a GPT is; as it stands, 140,064 parameters.

    Where there are `experts`, every block has so many MLPs, of which a token uses `k` (`experts.Experts`).

    Raises:
        ValueError: for a number that is not positive, a width that heads do not divide, or a k above `experts`.
    """

    layers: int = 4
    width: int = 48
    heads: int = 12
    sequence: int = 48
    vocabulary: int = BYTES
    experts: int = 0
    k: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "experts" else 1
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}; it must be a multiple of the {self.heads} heads")
        if self.experts:
            check_choices(self.k, self.experts)

    @property
    def head_width(self) -> int:
        """Units of one attention head."""
        return self.width // self.heads

    def check_cut(self, tensor: int = 1, stages: int = 1) -> None:
        """Refuse a cut of every layer between `tensor` ranks, and of the layers into `stages`.

        Raises:
            ValueError: if it cannot be; the message names the size that is too small.
        """
        if stages > self.layers:
            raise ValueError(f"layers is {self.layers}; {stages} stages need at least one each")
        if tensor > self.heads:
            raise ValueError(f"heads is {self.heads}; {tensor} tensor-parallel ranks need at least one each")


class Embedding(nn.Module):
    """Tokens (batch, sequence) to activations (batch, sequence, width).

    Attributes:
        places: where in the whole sequence the tokens stand, if this rank has a part of it; None: at its beginning.
    """

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.sequence, sizes.width)
        self.places: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight[places_of(tokens, self.places)]


def places_of(tokens: Tensor, places: Tensor | None) -> Tensor | slice:
    """Where `tokens` stand in the whole sequence; `places` is an embedding's.

    Raises:
        ValueError: if there are places, and not one for each token.
    """
    if places is None:
        return slice(tokens.shape[1])
    if len(places) != tokens.shape[1]:
        own = f"{len(places)}, this rank's share: pass tokens[:, own]"
        raise ValueError(f"the sequence has {tokens.shape[1]} tokens; after cut_context it must have {own}")
    return places


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What each token's query mixes from the values of those up to it; all (batch, heads, sequence, head width)."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention (Vaswani et al. 2017, section 3.2).

    The rows of `qkv` are ordered by heads: query, key and value of the first head, of the second, and so on. Any heads'
    rows, with the same heads' columns of `out`, are therefore an Attention too.

    Attributes:
        core: mixes values, as `causal_attention` does; another one may know of other ranks, or compute again.
    """

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.head_width = sizes.head_width
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)
        self.core: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        batch, sequence, _ = qkv.shape
        heads = qkv.view(batch, sequence, -1, 3 * self.head_width).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=-1)
        mixed = self.core(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class MLP(nn.Module):
    """Two linear layers, the hidden one four times as wide, with GELU between them."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, or experts, each added to what came in."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(sizes.width), Attention(sizes)
        experts = [MLP(sizes) for _ in range(sizes.experts)]
        self.norm2 = nn.LayerNorm(sizes.width)
        self.mlp = Experts(sizes.width, experts, sizes.k) if experts else MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """Activations to logits (batch, sequence, vocabulary)."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.vocabulary = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.vocabulary(self.norm(x))


class GPT(nn.Module):
    """The whole model; the same `seed` gives the same weights on every rank."""

    def __init__(self, sizes: GPTSizes, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.sizes = sizes
        blocks = [Block(sizes) for _ in range(sizes.layers)]
        self.layers = nn.Sequential(Embedding(sizes), *blocks, Head(sizes))
        if not next(self.parameters()).is_meta:  # one made under torch.device("meta") has no memory yet
            for parameter, value in self.initial_values(seed):
                parameter.data.copy_(value)
        self.to(dtype)

    def initial_values(self, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter, with the whole value that it has at first: on the CPU, one after the other.

        A rank that holds shards alone can so draw what one process would, in memory for a single parameter. On the way
        it sets to zero what experts keep beside parameters.
        """
        for layer in self.modules():
            if isinstance(layer, Experts):
                layer.router.bias.zero_()
                layer.load.zero_()
        generator = torch.Generator().manual_seed(seed)
        # GPT-2's 0.02 is that of a width of 768; sums of fewer terms need larger ones.
        deviation = 0.02 * math.sqrt(768 / self.sizes.width)
        for name, parameter in self.named_parameters():
            value = torch.zeros(parameter.shape, device="cpu")
            if value.dim() == 2:
                value.normal_(std=deviation, generator=generator)
            elif name.endswith("weight"):  # of a norm
                value.fill_(1)
            yield parameter, value

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, sequence, vocabulary) of the byte that follows each of `tokens`."""
        logits: Tensor = self.layers(tokens)
        return logits

    def gradients(self) -> GPT:
        """A model whose parameters are this one's gradients, so that they can be cut as the model is.

        Raises:
            ValueError: if there was no backward pass yet.
        """
        model = copy.deepcopy(self)
        for gradient, (name, parameter) in zip(model.parameters(), self.named_parameters(), strict=True):
            if parameter.grad is None:
                raise ValueError(f"{name} has no gradient; gradients come from a backward pass")
            gradient.data = parameter.grad.clone()
        return model

    def stages(self, count: int) -> list[nn.Sequential]:
        """The model cut into `count` stages of blocks; embedding with the first, head with the last.

        Raises:
            ValueError: if there are fewer blocks than stages.
        """
        self.sizes.check_cut(stages=count)
        blocks = self.sizes.layers
        ends = [1 + index * blocks // count for index in range(count + 1)]
        ends[0], ends[-1] = 0, blocks + 2
        layers = list(self.layers)
        return [nn.Sequential(*layers[first:last]) for first, last in pairwise(ends)]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats a byte, over batch and sequence."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def gradient_error(part: nn.Module, expected: nn.Module) -> float:
    """The largest difference between the gradients of `part` and the parameters of `expected`, which hold gradients.

    NaN if one of them has a NaN.

    Raises:
        ValueError: if a parameter has no gradient, or the two are not cut alike.
    """
    pairs = zip(part.named_parameters(), expected.parameters(), strict=True)
    largest = torch.zeros((), dtype=torch.float64)
    for (name, parameter), gradient in pairs:
        if parameter.grad is None or parameter.shape != gradient.shape:
            raise ValueError(f"{name} has no gradient of shape {tuple(gradient.shape)}")
        largest = largest.maximum((parameter.grad - gradient).abs().max())
    return largest.item()


class OneProcess:
    """The whole model, trained in one process: the reference for a parallel model.

    Args:
        sizes, seed: as in GPT.
        learning_rate: of Adam.
    """

    def __init__(self, sizes: GPTSizes, seed: int, learning_rate: float) -> None:
        self.model = GPT(sizes, seed)
        self._optimizer = torch.optim.Adam(self.model.parameters(), learning_rate)

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[float, GPT]:
        """Take one step; returns the loss before it, and its gradients as a model."""
        self._optimizer.zero_grad()
        loss = cross_entropy(self.model(tokens), targets)
        loss.backward()
        self._optimizer.step()
        return loss.item(), self.model.gradients()


class Kept:
    """The bytes of activations that are kept for a backward pass; parameters are not among them.

    kept = Kept(module)
    with kept:                      # what a forward pass saves here is counted until it is let go of
        loss = module(x)
    kept.now, kept.most             # bytes: at present, and at most
    """

    def __init__(self, module: nn.Module) -> None:
        self.now = self.most = 0
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._uses: Counter[int] = Counter()  # of each piece of memory, which is counted once
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda held: held[0])

    def keep(self, tensor: Tensor) -> Any:
        """A list of `tensor` alone; its memory is counted as long as that list, or another one, is held."""
        held, storage = _Held([tensor]), tensor.untyped_storage()
        place, nbytes = storage.data_ptr(), storage.nbytes()
        if place not in self._parameters:
            self._count(place, nbytes, 1)
            weakref.finalize(held, self._count, place, nbytes, -1)
        return held

    def _count(self, place: int, nbytes: int, uses: int) -> None:
        before = self._uses[place] > 0
        self._uses[place] += uses
        self.now += nbytes * ((self._uses[place] > 0) - before)
        self.most = max(self.most, self.now)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)


class _Held(list[Tensor]):
    """A list that can be watched."""


def kept_for_backward(module: nn.Module, x: Tensor) -> int:
    """Bytes of activations that `module(x)` keeps until its backward pass."""
    with Kept(module) as kept:
        given = module(x)  # held, so that no memory is used twice
    nbytes = kept.now
    del given
    return nbytes


def manual() -> bytes:
    """About 460,000 bytes of English that every Python brings along: its own manual."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def batch_of(text: bytes, step: int, batch: int, sequence: int) -> tuple[Tensor, Tensor]:
    """The tokens and targets of a step, (batch, sequence): the same on every rank, drawn from all of `text`.

    Raises:
        ValueError: if the text is shorter than a sequence and its last target.
    """
    if len(text) < sequence + 1:
        raise ValueError(f"the text has {len(text)} bytes; a sequence of {sequence} needs {sequence + 1}")
    generator = torch.Generator().manual_seed(1_000_003 * step + 1)
    starts = torch.randint(len(text) - sequence, (batch,), generator=generator).tolist()
    rows = torch.tensor([list(text[start : start + sequence + 1]) for start in starts])
    return rows[:, :-1], rows[:, 1:]
