"""A backward pass in two parts: what others wait for, and the gradients of weights, for which nobody waits.

For Y = X Wᵀ a backward pass has two products of equal size, of G, the gradient of Y:

    gradient of X = G W              the stage before waits for it
    gradient of W = Gᵀ X             the optimizer alone does, at the end of the step

    deferred = DeferredWeights()
    with deferred:
        y = module(x)
    y.backward(gradient)             # x.grad is there, and so are gradients of norms and embeddings
    deferred.add_to_gradients()      # those of linear layers' weights and biases too

Qi et al. (2023), "Zero Bubble Pipeline Parallelism", whose code has such a store of what is left to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Product(NamedTuple):
    """What is left to do for one call of a linear layer: the product of `gradient` and `x`, and a sum for the bias.

    Both have a row for each token; `versions` are theirs, so that a change in place is seen.
    """

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    gradient: Tensor
    versions: tuple[int, int]


class DeferredWeights(TorchFunctionMode):
    """As a context: linear layers that run in it leave their weights' gradients to `add_to_gradients`.

    These gradients go straight into `.grad`. Layers whose weights are no leaves of the graph, are frozen, or have
    hooks, as those of a FullySharded, are left as they are, and so is what runs under autocast, or outside the context,
    as a recomputation. `checkpoint` with `use_reentrant=False`, which must recompute what there was, needs
    `context_fn=lambda: (nullcontext(), deferred)`.

    The hooks of PyTorch's DDP cannot be seen: it must not wrap such a module, whose gradients it would not average. Any
    backward pass through a layer leaves its product, also one that `torch.autograd.grad` runs for the input alone. A
    second derivative is refused by PyTorch with a RuntimeError.

    Attributes:
        products: what is left to do, from the backward pass on. Nothing is computed twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is functional.linear and not kwargs:
            return self._linear(*args)
        return function(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        parameters, device = [weight] if bias is None else [weight, bias], x.device.type
        # Hooks, PyTorch has no public name for them, would see no gradient.
        have_hooks = any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters)
        is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if not (have_hooks or is_cast) and all(each.is_leaf and each.requires_grad for each in parameters):
            rows = _Linear.apply(torch.atleast_2d(x).flatten(0, -2), weight, bias, self.products)
            return rows.view(*x.shape[:-1], len(weight))  # the caller may change it in place
        return functional.linear(x, weight, bias)

    @torch.no_grad()
    def add_to_gradients(self) -> None:
        """Compute what is left to do, and add it to the gradients.

        Raises:
            RuntimeError: if an input, or the gradient of an output, was changed in place since the backward pass; then
                nothing is added.
        """
        if any((each.x._version, each.gradient._version) != each.versions for each in self.products):
            changed = "the input of a linear layer, or its output's gradient, was changed in place"
            raise RuntimeError(f"{changed} since the backward pass; change a copy")
        while self.products:
            weight, bias, x, gradient, _ = self.products[0]
            total = gradient.sum(dim=0)
            if weight.grad is None:
                weight.grad = gradient.t() @ x
            else:
                weight.grad.addmm_(gradient.t(), x)
            if bias is not None:
                bias.grad = total if bias.grad is None else bias.grad.add_(total)
            del self.products[0]  # one that fails is left, and none is added twice


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: list[Product]) -> Tensor:
        ctx.save_for_backward(x, weight)  # so that autograd sees whether one was changed in place
        # Where hooks unpack what is saved, a parameter may come back as another tensor.
        ctx.weight, ctx.bias, ctx.products = weight, bias, products
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable  # a penalty on a gradient would miss what is deferred
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        versions = x._version, gradients[0]._version
        ctx.products.append(Product(ctx.weight, ctx.bias, x.detach(), gradients[0], versions))
        return gradients[0] @ weight if ctx.needs_input_grad[0] else None, None, None, None
