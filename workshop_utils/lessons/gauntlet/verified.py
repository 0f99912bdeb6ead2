"""A row of the gauntlet under `parallel.verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workshop_utils.comm.communicator import Communicator
from workshop_utils.lessons.gauntlet.model import Options, loss_of, ragged, whole_model
from workshop_utils.lessons.gauntlet.planting import Row, planted
from workshop_utils.lessons.gauntlet.trainer import Training
from workshop_utils.parallel import experts, gpt, tensor
from workshop_utils.parallel.mesh import Mesh, mesh_of
from workshop_utils.parallel.verify import Report, verify

EXAMPLES = 32


class Drawing(Training):
    """A training that draws its first weights when it is asked to."""

    def __init__(self, model: gpt.GPT, mesh: Mesh, **options: Any) -> None:
        super().__init__(model, mesh, **options | {"initialise": False})
        self._drawn = lambda: Training(model, mesh, **options)

    def initialise(self) -> None:
        """Take the weights that the training draws."""
        self.put(self._drawn().copies())


def batch_of(sequence: int) -> tuple[Tensor, Tensor]:
    """Rows with unequally many targets, after rows in which every byte occurs, and all targets count."""
    generator = torch.Generator().manual_seed(0)
    often = [torch.randperm(gpt.BYTES, generator=generator) for _ in range(EXAMPLES)]
    tokens = torch.cat(often)[: EXAMPLES * sequence].view(EXAMPLES, sequence)
    targets = torch.randint(gpt.BYTES, tokens.shape, generator=generator)
    half = EXAMPLES // 2
    targets[half:] = ragged((tokens[half:], targets[half:]))[1]
    return tokens, targets


def report_on(communicator: Communicator, row: Row) -> Report:
    """What `verify` says of this row's training, on all ranks of its layout.

    A balance loss is not linear in the tokens: it is one process's if all replicas share the experts, and the one
    process takes the same microbatches.
    """
    options, layout = Options(**row.options), dict(row.layout)
    mesh: Callable[..., Mesh] = mesh_of
    kind = Drawing if options.initialise else Training

    def build() -> nn.Module:
        return whole_model(**row.options)

    def make(model: Any, groups: Mesh) -> Training:
        return kind(model, groups, **row.options)

    def mean_loss(model: nn.Module, batch: Any) -> Tensor:
        if not options.balance:
            return loss_of(model, batch)
        layers = [each for each in model.modules() if isinstance(each, experts.Experts)]
        parts = [*zip(*(each.chunk(options.microbatches) for each in batch), strict=True)]
        counts = [(targets != tensor.IGNORED).sum() for _, targets in parts]
        for layer in layers:
            layer.balance = options.balance / options.microbatches
        losses = [count * loss_of(model, part) for count, part in zip(counts, parts, strict=True)]
        for layer in layers:
            layer.balance = options.balance
        return torch.stack(losses).sum() / torch.stack(counts).sum()

    def sharing(ranks: Communicator, **cut: int) -> Mesh:
        return mesh_of(ranks, **cut, experts=cut.get("data", 1) * cut.get("context", 1))

    if options.balance:
        layout.pop("experts", None)
        mesh = sharing
    batch = batch_of(options.sequence)
    with planted(row):
        return verify(build, mean_loss, make, batch, layout, communicator, mesh)


def verified(communicator: Communicator, row: Row) -> list[str]:
    """The findings of `report_on`."""
    return [*map(str, report_on(communicator, row).findings)]
