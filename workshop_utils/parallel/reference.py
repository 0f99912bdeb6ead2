"""The right numbers of a training: those of one process, in float64, and by how much rounding moves them.

reference = Reference(build, loss, batch, seed=0)
reference.loss, reference.gradient               # of the first step; the gradient end to end
reference.tolerance                              # of each of its numbers
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

LONG = 3.0  # a gradient is longer than most limits of clipping
MARGIN = 100  # between what rounding does in one process and what is called wrong

Batch = tuple[Tensor, ...]


class Reference:
    """One process. Vectors have the model's numbers end to end, in the order of `named_parameters`.

    Weights are moved at random first, until the gradient is so long that clipping acts: biases of zero and norms of one
    would hide mistakes.

    Args:
        build, loss, batch, seed: as in `verify.verify`.

    Attributes:
        model, still: the whole model, and without dropout.
        first: the weights as they were built.
        loss, gradient: of the first step, without dropout; `second`: the gradient of a step after it.
        epsilon: of the loss's dtype.
        loss_tolerance, tolerance: by how much right ones may differ.
        names, sizes: of the parameters.
        numbers, weights, weights_tolerance: what three updates make, once one rank has taken them.

    Raises:
        ValueError: as `verify.verify`.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        loss: Callable[[nn.Module, Batch], Tensor],
        batch: Batch,
        seed: int,
    ) -> None:
        self.seed, self._loss = seed, loss
        if not isinstance(batch, tuple | list) or not all(isinstance(each, Tensor) for each in batch):
            raise ValueError(
                f"batch is a {type(batch).__name__}; it must be a tuple of tensors, examples in dimension 0"
            )
        self.batch = tuple(each.double() if each.is_floating_point() else each for each in batch)
        self.model, other = self._seeded(build), self._seeded(build)
        pairs = zip(self.model.state_dict().items(), other.state_dict().values(), strict=True)
        if random := [name for (name, one), two in pairs if not torch.equal(one, two)]:
            right = "draw it from PyTorch's generator, or seed yours in build"
            raise ValueError(f"build gives other numbers for {random[0]} each time, with one seed; {right}")
        self.first = flat(self.model.parameters())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.sizes = [each.numel() for each in self.model.parameters()]
        for deviation in (0.05, 0.2, 0.5):
            for each in self.model.parameters():
                each.data += deviation * torch.randn(each.shape, dtype=torch.float64)
            self.still = _without_dropout(self.model)
            self.loss, self.gradient = self.differentiated(self.still, self.batch)
            if self.gradient.norm() > LONG:
                break
        self._refuse()
        moved = [self.differentiated(self.moved(draw), self.batch) for draw in range(3)]
        moved.append(self.differentiated(self.still, self.flipped))
        off = max(abs(value - self.loss) for value, _ in moved)
        self.loss_tolerance = MARGIN * max(off, self.epsilon * abs(self.loss))
        self.tolerance = self.tolerance_of(self.gradient, [each for _, each in moved])
        used = copy.deepcopy(self.still)
        self._loss(used, self.batch)  # buffers may move with it
        _, self.second = self.differentiated(used, self.flipped)
        self.numbers: dict[str, tuple[float | None, float]] = {}
        self.weights: Tensor | None = None
        self.weights_tolerance = self.tolerance

    def _seeded(self, build: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(self.seed)
        return build().double().train()

    def _refuse(self) -> None:
        """What cannot be compared."""
        if not math.isfinite(self.loss):
            raise ValueError(f"loss is {self.loss} for this batch; it must be a finite number")
        again, _ = self.differentiated(self.still, self.batch)
        if again != self.loss:
            right = "dropout layers are off already: switch off what else is random"
            raise ValueError(f"loss is {self.loss:.9g}, then {again:.9g} for the same batch; {right}")
        twice, _ = self.differentiated(self.still, tuple(torch.cat([each, each]) for each in self.batch))
        if not math.isclose(twice, self.loss, rel_tol=max(1e-9, 10 * self.epsilon)):
            right = "it must be a mean, of which ranks can have parts"
            raise ValueError(f"loss is {self.loss:.6g}, and {twice:.6g} with every example twice; {right}")
        if not self.gradient.any():
            raise ValueError("batch gives no parameter a gradient; two dead models are always equal")

    @property
    def idle(self) -> list[str]:
        """Parameters with numbers that have no gradient."""
        return self.owners((self.gradient == 0).nonzero())

    @property
    def flipped(self) -> Batch:
        """The examples in the opposite order."""
        return tuple(each.flip(0) for each in self.batch)

    def mean_loss(self, *batches: Batch) -> float:
        """Over all these batches together, in evaluation."""
        model = copy.deepcopy(self.still).eval()
        with torch.no_grad():
            return self._loss(model, tuple(map(torch.cat, zip(*batches, strict=True)))).item()

    def differentiated(self, model: nn.Module, *parts: Batch) -> tuple[float, Tensor]:
        """The mean of the losses of these parts, and its gradient."""
        model = copy.deepcopy(model)  # what a forward pass leaves behind is gone with it
        try:
            losses = [self._loss(model, part) for part in parts]
        except RuntimeError as error:
            raise ValueError(f"loss cannot be computed with build's model in float64: {error}") from error
        if not all(isinstance(each, Tensor) and each.numel() == 1 for each in losses):
            raise ValueError(
                f"loss returns a {type(losses[0]).__name__}; it must return a tensor with one number"
            )
        loss = torch.stack(losses).mean()
        loss.backward()
        self.epsilon = torch.finfo(loss.dtype).eps
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
        return loss.item(), flat(gradients)

    def moved(self, draw: int) -> nn.Module:
        """Each weight one bit larger or smaller."""
        model, generator = copy.deepcopy(self.still), torch.Generator().manual_seed(draw)
        for each in model.parameters():
            sign = torch.randint(2, each.shape, generator=generator).double() * 2 - 1
            each.data *= 1 + self.epsilon * sign
        return model

    def tolerance_of(self, right: Tensor, others: Sequence[Tensor]) -> Tensor:
        """For each number, by its parameter."""
        off = [torch.stack([(each - right).abs() for each in others]).amax(0), self.epsilon * right.abs()]
        return MARGIN * self.largest(torch.stack(off).amax(0))

    def largest(self, numbers: Tensor) -> Tensor:
        """For each number, the largest of its parameter; of the model, if these are all zero."""
        parts = [each.abs().max().expand(len(each)) for each in numbers.split(self.sizes) if len(each)]
        return torch.where((found := torch.cat(parts)) > 0, found, numbers.abs().max())

    def take(
        self,
        numbers: Mapping[str, float | None],
        weights: Tensor,
        others: Mapping[str, float | None],
        moved: Tensor,
    ) -> None:
        """What three updates of one rank made, of the model and of one that was moved."""
        self.weights, self.weights_tolerance = weights, self.tolerance_of(weights, [moved])
        for name, value in numbers.items():
            one, other = value or 0.0, others[name] or 0.0
            self.numbers[name] = value, MARGIN * max(abs(one - other), self.epsilon * abs(one))

    def numbered(self) -> nn.Module:
        """The model with the weights 1, 2, 3, …"""
        model = copy.deepcopy(self.still)
        numbers = torch.arange(1, sum(self.sizes) + 1, dtype=torch.float64).split(self.sizes)
        for parameter, values in zip(model.parameters(), numbers, strict=True):
            parameter.data.copy_(values.view(parameter.shape))
        return model

    def owners(self, places: Tensor) -> list[str]:
        """Names of the parameters that have these numbers, which count from 0."""
        ends = torch.tensor(self.sizes).cumsum(0)
        found = torch.searchsorted(ends, places.flatten(), right=True).unique()
        return [self.names[each] for each in found.tolist()]

    def is_even(self, count: int) -> bool:
        """Whether so many equal parts of the batch count alike, so that it cannot show wrong weights."""
        if not 1 < count <= len(self.batch[0]) or len(self.batch[0]) % count:
            return False
        parts = zip(*(each.chunk(count) for each in self.batch), strict=True)
        _, gradient = self.differentiated(self.still, *parts)
        return bool(((gradient - self.gradient).abs() <= self.tolerance).all())

    @cached_property
    def divided(self) -> list[tuple[list[float], Tensor]]:
        """For each way of cutting the batch into equal parts, neighbours or every n-th: losses, mean gradient."""
        examples, found = len(self.batch[0]), []
        for count in (count for count in range(2, examples + 1) if examples % count == 0):
            chunks = [[*each.chunk(count)] for each in self.batch]
            strides = [[each[start::count] for start in range(count)] for each in self.batch]
            for way in (chunks, strides):
                try:
                    parts = [self.differentiated(self.still, part) for part in zip(*way, strict=True)]
                except ValueError:  # such as batch normalisation's of a single example
                    continue
                gradients = torch.stack([gradient for _, gradient in parts])
                found.append(([loss for loss, _ in parts], gradients.mean(0)))
        return found

    @cached_property
    def unequal(self) -> list[tuple[int, float, Tensor]]:
        """Where parts count alike although they hold unequally much: how many, loss, gradient."""
        apart = [each for each in self.divided if ((each[1] - self.gradient).abs() > self.tolerance).any()]
        return [(len(losses), sum(losses) / len(losses), gradient) for losses, gradient in apart]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers end to end, as a copy."""
    return torch.cat([each.detach().flatten() for each in tensors])


def has_dropout(model: nn.Module) -> bool:
    """Whether one of its layers drops something."""
    layers: Iterable[Any] = model.modules()
    return any(_is_dropout(each) and each.p > 0 for each in layers)


def _is_dropout(layer: Any) -> bool:
    kinds = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
    return isinstance(layer, kinds)


def _without_dropout(model: nn.Module) -> nn.Module:
    """A copy that drops nothing."""
    model = copy.deepcopy(model)
    layer: Any
    for layer in model.modules():
        if _is_dropout(layer):
            layer.p = 0.0
        elif isinstance(getattr(layer, "dropout", None), float):  # of nn.MultiheadAttention, nn.LSTM
            layer.dropout = 0.0
    return model
