"""Experts on several ranks: a router sends each token to k of them, wherever they are, and brings the results back.

    model = GPT(GPTSizes(experts=8, k=2))       # every MLP is a layer of 8 experts, of which a token uses 2
    cut_experts(model, mesh.experts)            # of 4 ranks: this one keeps 2 experts of each layer
    cross_entropy(model(own_tokens), own_targets).backward()
    synchronise(model, mesh)                    # of parallel.mesh

Shazeer et al. (2017), "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer"; across devices
GShard (Lepikhin et al. 2020) and Switch Transformer (Fedus, Zoph, Shazeer 2021).

Each rank's loss is the mean over its own tokens, and the gradient of their mean over ranks is wanted. An expert is on
one rank of its group, so after the backward pass its gradient is the sum of those of the group's losses already:
`mesh.synchronise` divides it by their number, sums it over other groups that hold the same experts, and averages all
other parameters' over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workshop_utils.comm.all_to_all import direct_all_to_all
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel.exchange import exchange_rows


class Routes(NamedTuple):
    """Where each of T tokens goes.

    Attributes:
        chosen: (T, k) numbers of experts, the best first.
        weights: (T, k) of their results.
        probabilities: (T, experts): the softmax of all scores.
    """

    chosen: Tensor
    weights: Tensor
    probabilities: Tensor


def check_choices(k: int, experts: int) -> None:
    """Raise ValueError unless a token can use `k` of so many experts."""
    if not 1 <= k <= experts:
        raise ValueError(f"k is {k}; a token uses at least 1 and at most all of the {experts} experts")


class Router(nn.Module):
    """Chooses k experts for each token: those of the largest probability plus `bias`.

    Weights are the probabilities of the chosen, without the bias, divided by their sum: the softmax of their scores
    alone, as in Mixtral (Jiang et al. 2024, section 2.1). With k = 1 they are not divided (Switch): a weight that is
    always 1 would leave the router without a gradient. Models that do not divide by the sum for k above 1 (OLMoE), or
    take sigmoids and scale them (DeepSeek-V3), weigh otherwise.

    Attributes:
        bias: (experts,) moves choices, not weights; only `update_bias` changes it.

    Raises:
        ValueError: if k is not between 1 and the number of experts.
    """

    bias: Tensor

    def __init__(self, width: int, experts: int, k: int) -> None:
        super().__init__()
        check_choices(k, experts)
        self.k, self.scores = k, nn.Linear(width, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, tokens: Tensor) -> Routes:
        """The routes of `tokens` (T, width)."""
        scores = self.scores(tokens)
        probabilities = scores.softmax(dim=-1)
        chosen = (probabilities.detach() + self.bias).topk(self.k, dim=-1).indices
        # Probabilities of the chosen may be too small to be divided by their sum.
        weights = (probabilities if self.k == 1 else scores).gather(-1, chosen)
        return Routes(chosen, weights if self.k == 1 else weights.softmax(dim=-1), probabilities)


class Experts(nn.Module):
    """A layer of experts: (…, width) to (…, width), each token's result the weighted sum of its k experts'.

    Args:
        width: of a token.
        experts: modules (rows, width) to (rows, width); they keep their numbers, also in a `state_dict`, when some are
            taken away.
        k: how many of them a token uses.
        capacity_factor: None: no token is dropped. Otherwise an expert takes at most `capacity` rows from each rank;
            first choices before second ones, earlier tokens before later ones. What is dropped counts as zero: behind
            the residual connection the token passes unchanged.

    Attributes:
        balance: what the balance loss is multiplied by before its gradient is added in training; 0: it is left out. As
            with other losses, gradients are to be averaged over ranks; with n microbatches a step, it is to be an n-th.
        load: (experts,) how many rows this rank's tokens asked for in training, with the dropped ones, since
            `update_bias`. A forward pass that is computed again with gradients (`checkpoint(use_reentrant=False)`)
            counts twice.
        communicator: the ranks that share the experts; None: this one has all of them.

    Raises:
        ValueError: for no experts, a k as in Router, or a capacity factor that is not positive and finite; in a forward
            pass, if experts change the shape of their rows.
    """

    load: Tensor

    def __init__(
        self, width: int, experts: Iterable[nn.Module], k: int, capacity_factor: float | None = None
    ) -> None:
        super().__init__()
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            right = "it must be above 0 and finite, or None to drop nothing"
            raise ValueError(f"capacity_factor is {capacity_factor}; {right}")
        self.experts = nn.ModuleDict({str(number): expert for number, expert in enumerate(experts)})
        if not self.experts:
            raise ValueError("experts is empty; a layer needs at least one")
        self.router = Router(width, len(self.experts), k)
        self.capacity_factor, self.balance = capacity_factor, 0.0
        self.register_buffer("load", torch.zeros(len(self.experts), dtype=torch.long), persistent=False)
        self.communicator: Communicator | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        routes = self.router(tokens)
        choices = routes.chosen.t().flatten()  # first choices of all tokens, then second ones
        asked = torch.bincount(choices, minlength=len(self.load))
        if self.training and torch.is_grad_enabled():
            self.load += asked
        loads = self._all_loads(asked)
        kept = loads if self.capacity_factor is None else loads.minimum(capacity(loads, self.capacity_factor))
        own = self.communicator.rank if self.communicator else 0

        by_expert = choices.argsort(stable=True)
        queue = torch.arange(len(choices)) - (asked.cumsum(0) - asked)[choices[by_expert]]  # place in it
        by_expert = by_expert[queue < kept[own][choices[by_expert]]]
        token = by_expert % max(1, len(tokens))

        results = self._results(tokens[token], kept, own)
        weighted = routes.weights.t().flatten()[by_expert].unsqueeze(1) * results
        combined = torch.zeros_like(tokens).index_add(0, token, weighted)
        if self.balance and self.training:
            loss = balance_loss(routes.probabilities, loads.sum(dim=0), self.router.k)
            # This rank's part, of which the mean over ranks, not the sum, is to be the whole.
            combined = _WithLoss.apply(combined, len(loads) * self.balance * loss)
        return combined.view_as(x)

    def _all_loads(self, asked: Tensor) -> Tensor:
        """(ranks, experts): what each rank's tokens ask of each expert."""
        if self.communicator is None:
            return asked.unsqueeze(0)
        ranks = self.communicator.size
        loads = asked.new_empty(ranks, len(asked))
        direct_all_to_all(self.communicator, [asked] * ranks, list(loads))
        return loads

    def _results(self, rows: Tensor, kept: Tensor, rank: int) -> Tensor:
        """What their experts make of this rank's `rows`, which are sorted by expert; all in the same order."""
        ranks = len(kept)
        share = kept.shape[1] // ranks
        sent = kept[rank].view(ranks, share).sum(dim=1).tolist()
        here = kept[:, rank * share : (rank + 1) * share]  # (ranks, own experts)
        received = here.sum(dim=1).tolist()

        group = self.communicator
        arrived = rows if group is None else exchange_rows(rows, sent, received, group)
        # They came by rank, and from each by expert. All that one expert is to compute must stand together.
        order = torch.arange(share).repeat(ranks).repeat_interleave(here.flatten()).argsort(stable=True)
        parts = arrived[order].split(here.sum(dim=0).tolist())
        results = torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])
        if results.shape != arrived.shape:
            made = f"experts made {tuple(results.shape)} of rows {tuple(arrived.shape)}"
            raise ValueError(f"{made}; each must return as many, as wide ones")
        results = results[order.argsort()].to(rows.dtype)  # under autocast experts may return bfloat16
        return results if group is None else exchange_rows(results, received, sent, group)


class _WithLoss(torch.autograd.Function):
    """`x` as it is; backward, `loss` has the gradient 1, as if it were added to the model's (Megatron-Core)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.of_loss = torch.ones_like(loss)
        ctx.mark_dirty(x)  # else autograd returns a view, which must not be changed in place
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], ctx.of_loss


def capacity(loads: Tensor, factor: float) -> Tensor:
    """(ranks, 1): the most rows that an expert takes from each rank, `factor` times its fair share, rounded up.

    A rank's tokens are a group in GShard's sense (Lepikhin et al. 2020, section 2.2): ranks need not ask each other
    who comes first.

    Args:
        loads: (ranks, experts) rows that each rank's tokens ask for.
        factor: 1: as many as there would be if all experts were chosen equally often.
    """
    rows = factor * loads.sum(dim=1, keepdim=True).double() / loads.shape[1]
    return (rows * (1 - 1e-12)).ceil().long()  # 1.1 · 10 is more than 11 in floating point


def dropped_share(loads: Tensor, factor: float) -> float:
    """Share of all rows that are above the capacity, 0 of none; `loads` and `factor` are those of `capacity`."""
    above = (loads - capacity(loads, factor)).clamp(min=0)
    return above.sum().item() / max(1, loads.sum().item())


def balance_loss(probabilities: Tensor, load: Tensor, k: int) -> Tensor:
    """This rank's part of E · Σ f_i · P_i, the loss that is 1 where experts are used equally, and E at most.

    f_i is the share of all rows that go to expert i, P_i its mean probability; both over the tokens of all ranks, of
    which this one sums its own probabilities only. Only P_i has a gradient. Switch Transformer (Fedus et al. 2021,
    equations 4 to 6), for k above 1 as in Megatron-Core.

    Args:
        probabilities: (own tokens, experts).
        load: (experts,) rows that the tokens of all ranks ask for.
        k: experts of a token.
    """
    rows = load.sum().clamp(min=1)
    share, mean = load / rows, probabilities.sum(dim=0) / (rows / k)
    return len(load) * (share * mean).sum()


def update_bias(module: nn.Module, communicator: Communicator | None = None, rate: float = 0.001) -> None:
    """Balance without a loss: once a step, raise the bias of each expert below the mean load, lower those above.

    Wang et al. (2024), "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", algorithm 1.

    Args:
        module: all of its layers of experts are updated, and their loads cleared.
        communicator: all ranks whose tokens count; None: only this one's.
        rate: what a bias changes by. Biases become float32 if they are not: one of 0.5 would not change in bfloat16.

    Raises:
        ValueError: if there are no layers of experts, or more ranks share them than `communicator` has.
    """
    layers = _layers(module, at_least=1)
    shared = max(layer.communicator.size if layer.communicator else 1 for layer in layers)
    if (size := communicator.size if communicator else 1) < shared:
        right = "pass the communicator of all ranks whose tokens count, or their biases part"
        raise ValueError(f"communicator has {size} ranks, and {shared} share the experts; {right}")
    loads = torch.cat([layer.load for layer in layers]).double()
    if communicator is not None:
        ring_all_reduce(communicator, loads.numpy())
    for layer, load in zip(layers, loads.split([len(layer.load) for layer in layers]), strict=True):
        layer.router.bias = layer.router.bias.float() + rate * (load.mean() - load).sign().float()
        layer.load.zero_()


def _layers(module: nn.Module, at_least: int = 0) -> list[Experts]:
    layers = [layer for layer in module.modules() if isinstance(layer, Experts)]
    if len(layers) < at_least:
        raise ValueError(f"the {type(module).__name__} has no layer of parallel.experts.Experts")
    return layers


def cut_experts(module: nn.Module, communicator: Communicator) -> nn.Module:
    """`module` with this rank's share of each layer's experts, in place; tokens go to the others' ranks.

    Every rank must hand over the same whole weights. The ranks of `communicator` have different tokens.

    Raises:
        ValueError: if there are no layers of experts, one was cut before, the ranks do not divide its experts, or these
            share a parameter that is not frozen; then none is cut.
    """
    rank, ranks, layers = communicator.rank, communicator.size, _layers(module, at_least=1)
    for layer in layers:
        if layer.communicator is not None:
            raise ValueError("experts were cut before; cut a layer that is whole")
        if len(layer.experts) % ranks:
            right = f"{ranks} ranks need equal shares: a multiple of {ranks}"
            raise ValueError(f"experts is {len(layer.experts)}; {right}")
        trained = [p for expert in layer.experts.values() for p in expert.parameters() if p.requires_grad]
        if len({*trained}) < len(trained):
            raise ValueError(
                "experts share a trained parameter; freeze it, or give each its own before you cut them"
            )
    for layer in layers:
        share = len(layer.experts) // ranks
        own = list(layer.experts.items())[rank * share : (rank + 1) * share]
        layer.experts, layer.communicator = nn.ModuleDict(dict(own)), communicator
    return module


def expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters whose gradients hold all tokens of the group: of experts, but not of routers."""
    return [*dict.fromkeys(each for layer in _layers(module) for each in layer.experts.parameters())]


def rows_between(kept: Tensor) -> Tensor:
    """(ranks, ranks): how many rows each rank sends to each other one; `kept` is as in `expert_bytes_sent`."""
    ranks = len(kept)
    return kept.view(ranks, ranks, -1).sum(dim=2).fill_diagonal_(0)


def expert_bytes_sent(kept: Tensor, row_nbytes: int) -> Tensor:
    """Bytes that each rank sends for a layer of experts, forward and backward.

    Rows go out and their results come back, backward their gradients: each rank sends twice what it has for others, and
    twice what others have for it. Before, the numbers of rows go to everybody, 8 bytes an expert.

    Args:
        kept: (ranks, experts) rows of each rank's tokens that each expert takes.
        row_nbytes: width · itemsize.
    """
    between = rows_between(kept)
    ranks, experts = kept.shape
    return 2 * row_nbytes * (between.sum(dim=1) + between.sum(dim=0)) + 8 * experts * (ranks - 1)
