"""The small GPT that the gauntlet trains, its batches, and what can be chosen about it and its training.

model = whole_model(layers=4, tied=True)
loss = loss_of(model, ragged(batch_of(manual(), 0, 8, 16)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from workshop_utils.parallel import experts, gpt
from workshop_utils.parallel.tensor import IGNORED

Batch = tuple[Tensor, Tensor]  # tokens and targets, both (batch, sequence); a target of -100 does not count


@dataclass(frozen=True)
class Options:
    """What a model and its training are like; both functions that take options take all of these.

    Attributes:
        layers, width, heads, sequence, experts, k: as in GPTSizes; `experts` is how many a layer has.
        seed: of the first weights and of dropout.
        dropout: the probability with which a result of attention or MLP is left out.
        tied: whether input and output embedding are one weight.
        balance: what the routers' balance loss is multiplied by. It is one process's if all replicas share the experts.
        sequence_parallel: whether tensor ranks cut the sequence outside their layers.
        how: of context parallelism, "ring" or "ulysses".
        schedule: of the pipeline, one of `schedule.SCHEDULES`.
        microbatches: how many a step; without a pipeline their gradients are accumulated.
        data_parallel: what replicas do: "plain" all-reduces gradients after the backward pass, "overlapped" during it
            (one microbatch a step), "zero1" shards the optimizer's state, "fully_sharded" everything. Replicas that
            share experts can be "plain" only.
        optimizer: "adam", or "sgd" with momentum 0.9.
        max_norm: to which gradients are clipped.
        bias_rate: by which `update_bias` balances the experts; 0: not at all.
        average: decay of the average of weights that `evaluate` uses; 0: it uses the weights.
        initialise: whether a training draws the first weights, from `seed`, instead of taking the model's.
    """

    layers: int = 2
    width: int = 8
    heads: int = 4
    sequence: int = 16
    experts: int = 0
    k: int = 1
    seed: int = 0
    dropout: float = 0.0
    tied: bool = False
    balance: float = 0.0
    sequence_parallel: bool = False
    how: Literal["ring", "ulysses"] = "ring"
    schedule: str = "one_f_one_b"
    microbatches: int = 1
    data_parallel: Literal["plain", "overlapped", "zero1", "fully_sharded"] = "plain"
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 0.01
    max_norm: float = 1.0
    bias_rate: float = 0.0
    average: float = 0.0
    initialise: bool = False


class DroppingBlock(gpt.Block):
    """The layers of `block`, with dropout of what attention and MLP add."""

    def __init__(self, block: gpt.Block, probability: float) -> None:
        nn.Module.__init__(self)
        self.norm1, self.attention, self.norm2, self.mlp = (
            block.norm1,
            block.attention,
            block.norm2,
            block.mlp,
        )
        self.dropout = nn.Dropout(probability)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


def whole_model(**options: Any) -> gpt.GPT:
    """The whole model, in float64; `options` are those of Options."""
    chosen = Options(**options)
    names = "layers", "width", "heads", "sequence", "experts", "k"
    sizes = gpt.GPTSizes(**{name: getattr(chosen, name) for name in names})
    model = gpt.GPT(sizes, chosen.seed, torch.float64)
    layers: Any = model.layers
    for number in range(1, sizes.layers + 1) if chosen.dropout else ():
        layers[number] = DroppingBlock(layers[number], chosen.dropout)
    for layer in model.modules():
        if isinstance(layer, experts.Experts):
            layer.balance = chosen.balance
    if chosen.tied:
        layers[-1].vocabulary.weight = layers[0].token.weight
    return model


def ragged(batch: Batch) -> Batch:
    """`batch` with fewer targets: of row r the last 3 r + 1, at most all but one, are -100."""
    tokens, targets = batch[0], batch[1].clone()
    for row, each in enumerate(targets):
        each[-min(3 * row + 1, len(each) - 1) :] = IGNORED
    return tokens, targets


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss over all targets that count, in one process."""
    return gpt.cross_entropy(model(batch[0]), batch[1])


def is_tied(model: gpt.GPT) -> bool:
    """Whether input and output embedding are one weight."""
    layers: Any = model.layers
    return layers[-1].vocabulary.weight is layers[0].token.weight
