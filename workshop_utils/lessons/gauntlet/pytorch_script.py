"""A training script of PyTorch alone: a small transformer under FSDP2 and tensor parallelism, data × tensor ranks.

    torchrun --standalone --nproc-per-node 4 -m workshop_utils.lessons.gauntlet.pytorch_script --tensor 2

It reads the paragraphs of Python's manual, byte by byte. The embedding, the norms and the sums around them each see
one part of the sequence on each tensor rank (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models"). With `--checkpoint FOLDER` it saves at the end, and goes on from what it finds there.

    training = make(build(), mesh)      # the same model on all ranks; `mesh` has dimensions "data" and "tensor"
    training.step(batch)                # tokens and targets, (batch, sequence): gradients are ready
    training.update()                   # clips them, and takes the optimizer's step
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

LAYERS, WIDTH, HEADS, SEQUENCE, VOCABULARY = 2, 64, 4, 64, 128
NOT_COUNTED = -100  # a target that cross_entropy leaves out
Batch = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019).

    `F.rms_norm` stands for a fused kernel of one's own, which takes plain tensors and knows nothing of DTensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return F.rms_norm(x, (WIDTH,), self.weight)
        # A token is normalised by itself, so each rank needs its part of the sequence and the whole weight.
        weight = self.weight.to_local()
        return DTensor.from_local(F.rms_norm(x.to_local(), (WIDTH,), weight), x.device_mesh, x.placements)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.query, self.key, self.value, self.output = layers

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm = RMSNorm(), Attention(), RMSNorm()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed: int = 0) -> nn.Module:
    """The whole model, in one process."""
    torch.manual_seed(seed)
    return Transformer()


def plan() -> dict[str, Any]:
    """How tensor ranks share each layer; between layers, each has its part of the sequence, dimension 1."""
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    return {
        "token": embedding,
        "position": embedding,
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        **{f"blocks.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "blocks.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp_norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


class Training:
    """A model in parts and its optimizer. All ranks call its methods, with the same whole batches."""

    def __init__(self, model: Any, mesh: DeviceMesh, accumulate: int = 2) -> None:
        self.data, self.accumulate = mesh["data"], accumulate
        self.module: Any = parallelize_module(model, mesh["tensor"], plan())
        for block in model.blocks:
            fully_shard(block, mesh=self.data)
        fully_shard(model, mesh=self.data)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), 3e-3, weight_decay=0.1)

    def share(self, batch: Batch) -> list[Tensor]:
        """This data rank's examples."""
        return [part.tensor_split(self.data.size())[self.data.get_local_rank()] for part in batch]

    def total(self, number: Tensor) -> Tensor:
        """The sum over data ranks."""
        dist.all_reduce(number, group=self.data.get_group())
        return number

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The sum over counted targets."""
        logits = self.module(tokens).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=NOT_COUNTED, reduction="sum")

    def step(self, batch: Batch) -> float:
        """Leave the gradient of the batch's mean loss in `.grad`; returns that loss."""
        self.optimizer.zero_grad()
        tokens, targets = self.share(batch)
        counted = self.total((targets != NOT_COUNTED).sum())
        total = torch.zeros((), dtype=torch.float64)
        parts = zip(tokens.tensor_split(self.accumulate), targets.tensor_split(self.accumulate), strict=True)
        for number, part in enumerate(parts, 1):
            self.module.set_requires_gradient_sync(number == self.accumulate)
            loss = self.loss(*part) / counted
            # FSDP takes the mean over data ranks, and the gradient of the batch is their sum.
            (loss * self.data.size()).backward()
            total += loss.detach()
        return self.total(total).item()

    def update(self) -> float:
        """Take the optimizer's step; returns the norm of the gradient before it was clipped."""
        norm: Any = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm=1.0)
        self.optimizer.step()
        return norm.full_tensor().item()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the counted targets of all batches."""
        total = torch.zeros(2, dtype=torch.float64)
        for tokens, targets in map(self.share, batches):
            total += torch.stack([self.loss(tokens, targets).double(), (targets != NOT_COUNTED).sum()])
        # The root stays gathered after a forward pass that no backward pass follows.
        self.module.reshard()
        loss, counted = self.total(total)
        return (loss / counted).item()

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(self.module, self.optimizer), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.module, self.optimizer, **names)


make = Training


def paragraphs() -> Batch:
    """Python's manual: tokens and targets, each (paragraphs, SEQUENCE). Nothing after a short paragraph is counted."""
    texts = [text.encode() for topic in topics.values() for text in topic.split("\n\n") if text.isascii()]
    tokens = torch.zeros(len(texts), SEQUENCE, dtype=torch.long)
    targets = torch.full_like(tokens, NOT_COUNTED)
    for number, text in enumerate(texts):
        row = torch.tensor(list(text[: SEQUENCE + 1]), dtype=torch.long)
        tokens[number, : len(row) - 1], targets[number, : len(row) - 1] = row[:-1], row[1:]
    return tokens, targets


def batch_of(examples: Batch, size: int, step: int) -> Batch:
    """The examples of a step, the same on every rank."""
    chosen = torch.randint(len(examples[0]), (size,), generator=torch.Generator().manual_seed(step))
    return examples[0][chosen], examples[1][chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"tensor": 1, "steps": 200, "batch-size": 32, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    shape = dist.get_world_size() // given.tensor, given.tensor
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    training, first = make(build(given.seed), mesh), 0
    if given.checkpoint and given.checkpoint.exists():
        state = {"step": first, **training.state_dict()}
        dcp.load(state, checkpoint_id=given.checkpoint)
        training.load_state_dict(state)
        first = state["step"]
    tokens, targets = paragraphs()
    held_out = list(zip(tokens[-512:].split(64), targets[-512:].split(64), strict=True))
    for step in range(first, given.steps):
        loss = training.step(batch_of((tokens[:-512], targets[:-512]), given.batch_size, step))
        norm = training.update()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:4d}: loss {loss:.4f}, norm of the gradient {norm:.4f}", flush=True)
    loss = training.evaluate(held_out)
    if dist.get_rank() == 0:
        print(f"after {given.steps} steps: loss of held-out paragraphs {loss:.4f}")
    if given.checkpoint:
        dcp.save({"step": given.steps, **training.state_dict()}, checkpoint_id=given.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
