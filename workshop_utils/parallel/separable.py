"""Whether an optimizer may be cut into several, each with a part of the numbers: found by trying it out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Shapes = Sequence[tuple[int, ...]]
STEPS = 3


def treats_alone(
    whole: Shapes, cut: Sequence[Shapes], optimizer: Callable[..., Optimizer], options: dict[str, Any]
) -> bool:
    """Whether one optimizer of tensors of the shapes `whole` does what one for each entry of `cut` does.

    It is tried out, on the same numbers for both. An optimizer that refuses the shapes of `cut`, or plain gradients,
    does not. Raises what the optimizer raises for its `options`.
    """
    optimizer([nn.Parameter(torch.zeros(shape)) for shape in whole], **options)
    numbers = torch.arange(_count(whole), dtype=torch.float64)
    try:
        together = _trained(optimizer, options, whole, numbers)
        parts = numbers.split([_count(shapes) for shapes in cut])
        apart = [_trained(optimizer, options, shapes, part) for shapes, part in zip(cut, parts, strict=True)]
    except (TypeError, ValueError, RuntimeError):
        return False
    return bool(torch.allclose(together, torch.cat(apart), rtol=1e-6, atol=0))


def _trained(
    optimizer: Callable[..., Optimizer], options: dict[str, Any], shapes: Shapes, numbers: Tensor
) -> Tensor:
    """Tensors of these shapes, made of `numbers`, end to end after a few steps with made-up gradients."""
    pieces = numbers.split([math.prod(shape) for shape in shapes])
    tensors = [
        nn.Parameter((piece / 7 + 1).reshape(shape)) for piece, shape in zip(pieces, shapes, strict=True)
    ]
    optimize = optimizer(tensors, **options)
    for step in range(STEPS):
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.grad = torch.sin(piece + 3 * step).reshape(tensor.shape)
        optimize.step()
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)
