"""Train with what PyTorch has for each stage of ZeRO: DDP (0), ZeroRedundancyOptimizer (1), fully_shard (3, or 2).

The batch is cut between the workers, so that any number of them takes the very same steps, up to rounding. Each rank
reports for every step `loss` (the mean over ranks is that of the batch) and `step_seconds`; after the last one
`parameters`, and `memory_nbytes`: what this process holds more than before it made the model, which is right with
`--measure-memory 1`.
"""

import argparse
import ctypes
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import place

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--by", choices=["ddp", "zero", "fsdp", "fsdp-keep"], default="fsdp",
                        help="fsdp-keep keeps parameters from the forward to the backward pass")  # fmt: skip
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adam")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--layers", type=int, default=4, help="hidden layers")
    parser.add_argument("--width", type=int, default=128, help="units of each hidden layer")
    parser.add_argument("--learning-rate", type=float, default=0.002)
    parser.add_argument(
        "--measure-memory", type=int, choices=[0, 1], default=0, help="give freed memory back at once; slower"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in ("steps", "batch_size", "layers", "width"):
        if getattr(given, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    return given


def load() -> tuple[Tensor, Tensor]:
    """Images in [0, 1], shape (count, pixels), and labels, shape (count,)."""
    examples = place.load("train")
    images = torch.frombuffer(bytearray(examples.images), dtype=torch.uint8).view(examples.count, -1) / 255
    return images, torch.frombuffer(bytearray(examples.labels), dtype=torch.uint8).long()


def layers(pixels: int, width: int, count: int) -> Iterator[nn.Module]:
    """The layers of a perceptron with `count` hidden ones, each followed by ReLU."""
    for sizes in itertools.pairwise([pixels, *[width] * count]):
        yield nn.Linear(*sizes)
        yield nn.ReLU()
    yield nn.Linear(width, 10)


def return_freed_memory() -> None:
    """Have the C library give blocks back to the system as soon as they are freed: so it shows what is still held.

    Source: mallopt(3), M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX. Other libraries than glibc are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in ((-3, 65536), (-1, 65536), (-8, 1)):
            mallopt(option, value)


def warm_up(optimizer: str) -> None:
    """Take a step with a small model, so that what PyTorch sets up at its first use is not counted as the model's."""
    model = nn.Linear(64, 64)
    kind, more = OPTIMIZERS[optimizer]
    optimize = kind(model.parameters(), **more)
    cross_entropy(model(torch.ones(64, 64)), torch.zeros(64, dtype=torch.long)).backward()
    optimize.step()


def sharded(arguments: argparse.Namespace, pixels: int) -> tuple[nn.Module, Any]:
    """The model and its optimizer. With FSDP no rank ever has the whole model: a layer is sharded when made."""
    kind, more = OPTIMIZERS[arguments.optimizer]
    chosen = {"lr": arguments.learning_rate, **more}
    made = layers(pixels, arguments.width, arguments.layers)
    if arguments.by.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        let_go = {"mesh": mesh, "reshard_after_forward": arguments.by == "fsdp"}
        sequence: list[Any] = [fully_shard(m, **let_go) if isinstance(m, nn.Linear) else m for m in made]
        whole: Any = fully_shard(nn.Sequential(*sequence), **let_go)
        return whole, kind(whole.parameters(), **chosen)
    # Otherwise DDP holds every gradient twice: in `.grad`, and in a bucket.
    model = DistributedDataParallel(nn.Sequential(*made), gradient_as_bucket_view=True)
    if arguments.by == "zero":
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **chosen)
    return model, kind(model.parameters(), **chosen)


def train(model: nn.Module, optimizer: Any, arguments: argparse.Namespace) -> None:
    """Take the steps and report them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = load()
    for step in range(1, arguments.steps + 1):
        batch = torch.arange((step - 1) * arguments.batch_size, step * arguments.batch_size) % len(images)
        part = batch.tensor_split(size)[rank]
        dist.barrier()  # so that all begin together
        start = time.perf_counter()
        optimizer.zero_grad()
        # A sum over the part by the size of the whole batch: so the ranks' mean, times their number, is the batch's.
        loss = cross_entropy(model(images[part]), labels[part], reduction="sum") / len(batch) * size
        loss.backward()
        optimizer.step()
        place.report(step=step, loss=loss.item(), step_seconds=time.perf_counter() - start)


def main() -> None:
    arguments = options()
    here = place.here()
    torch.set_num_threads(1)
    if arguments.measure_memory:
        return_freed_memory()
    dist.init_process_group("gloo")
    pixels = load()[0].shape[1]
    warm_up(arguments.optimizer)
    torch.manual_seed(arguments.seed)
    process = psutil.Process()
    before = process.memory_info().rss
    model, optimizer = sharded(arguments, pixels)
    train(model, optimizer, arguments)
    held = process.memory_info().rss - before
    numbers = sum(parameter.numel() for parameter in model.parameters())  # a DTensor counts as a whole
    place.report(step=arguments.steps, memory_nbytes=held, parameters=numbers)
    weights = {
        name.removeprefix("module."): tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(weights, here.model_folder / "model.pt")
    # Who holds the group must let go of it first, and all must have met: see mnist_torch_ddp.
    dist.barrier()
    del model, optimizer, weights
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
