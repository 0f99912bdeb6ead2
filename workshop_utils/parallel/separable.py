"""Whether an optimizer may be cut into several, each with a part of the numbers: found by trying it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def treats_alone(
    whole: Sequence[tuple[int, ...]],
    cut: Sequence[Sequence[tuple[int, ...]]],
    optimizer: Callable[..., Optimizer],
    options: dict[str, Any],
) -> bool:
    """Whether one optimizer of tensors of the shapes `whole` does what one for each entry of `cut` does.

    It is tried out, on the same numbers for both. An optimizer that refuses the shapes of `cut`, or plain gradients,
    does not. Raises what the optimizer raises for its `options`.
    """
    together = _Trial(optimizer, options, whole, 0)
    try:
        together.train()
        parts, start = [], 0
        for shapes in cut:
            parts.append(_Trial(optimizer, options, shapes, start))
            parts[-1].train()
            start += parts[-1].numbers.numel()
    except (TypeError, ValueError, RuntimeError):
        return False
    apart = torch.cat([part.numbers for part in parts])
    return bool(torch.allclose(together.numbers, apart, rtol=1e-6, atol=0))


class _Trial:
    """An optimizer of a few made-up numbers, of which this has those from `start` on."""

    def __init__(
        self,
        optimizer: Callable[..., Optimizer],
        options: dict[str, Any],
        shapes: Sequence[tuple[int, ...]],
        start: int,
    ) -> None:
        self._start = start
        self._tensors, position = [], start
        for shape in shapes:
            length = int(np.prod(shape))
            numbers = torch.arange(position, position + length, dtype=torch.float64) / 7 + 1
            self._tensors.append(nn.Parameter(numbers.reshape(shape)))
            position += length
        self._optimizer = optimizer(self._tensors, **options)

    @property
    def numbers(self) -> Tensor:
        """As they are now, end to end."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self._tensors])

    def train(self) -> None:
        """Take three steps with made-up gradients."""
        for step in range(3):
            position = self._start
            for tensor in self._tensors:
                places = torch.arange(position, position + tensor.numel(), dtype=torch.float64)
                tensor.grad = torch.sin(places + 3 * step).reshape(tensor.shape)
                position += tensor.numel()
            self._optimizer.step()
