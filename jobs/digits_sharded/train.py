"""Train with the workshop's own sharded data parallelism: ZeRO stage 1, 2 or 3; stage 0 shards nothing.

The batch is cut between the workers, so that any number of them takes the very same steps, up to rounding. Each rank
reports for every step `loss` (the mean over ranks is that of the batch), `step_seconds` and `bytes_sent`; after the
last one `parameters`, and `memory_nbytes`: what this process holds more than before it made the model, which is right
with `--measure-memory 1`.
"""

import argparse
import ctypes
import itertools
import sys
import time
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.comm.communicator import Communicator
from workshop_utils.parallel.data import OverlappedDataParallel
from workshop_utils.parallel.sharded import FullySharded, ShardedGradients, ShardedOptimizer

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=3)
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


def network(pixels: int, width: int, layers: int) -> nn.Sequential:
    """A perceptron with `layers` hidden layers, each followed by ReLU."""
    widths = itertools.pairwise([pixels, *[width] * layers])
    hidden = [module for sizes in widths for module in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


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


def sharded(arguments: argparse.Namespace, pixels: int, communicator: Communicator) -> tuple[Any, Any]:
    """The model and its optimizer. In stage 3 no rank ever has the whole model: its layers are made one by one."""
    kind, more = OPTIMIZERS[arguments.optimizer]
    chosen = {"lr": arguments.learning_rate, **more}
    with torch.device("meta" if arguments.stage == 3 else "cpu"):
        module = network(pixels, arguments.width, arguments.layers)
    if arguments.stage >= 2:
        shard = ShardedGradients if arguments.stage == 2 else FullySharded
        model = shard(module, communicator)
        return model, model.optimizer(kind, **chosen)
    replica = OverlappedDataParallel(module, communicator)
    if arguments.stage == 1:
        return replica, ShardedOptimizer(replica.parameters(), communicator, kind, **chosen)
    return replica, kind(replica.parameters(), **chosen)


def train(model: Any, optimizer: Any, images: Tensor, labels: Tensor, arguments: argparse.Namespace) -> None:
    """Take the steps and report them."""
    communicator = model.communicator
    for step in range(1, arguments.steps + 1):
        batch = torch.arange((step - 1) * arguments.batch_size, step * arguments.batch_size) % len(images)
        part = batch.tensor_split(communicator.size)[communicator.rank]
        communicator.barrier()  # so that all begin together
        communicator.traffic.reset()
        start = time.perf_counter()
        optimizer.zero_grad()
        # A sum over the part by the size of the whole batch: so the ranks' mean, times their number, is the batch's.
        loss = (
            cross_entropy(model(images[part]), labels[part], reduction="sum") / len(batch) * communicator.size
        )
        loss.backward()
        if arguments.stage < 2:
            model.synchronise()
        optimizer.step()
        seconds, sent = time.perf_counter() - start, int(communicator.traffic.bytes_sent.sum())
        place.report(step=step, loss=loss.item(), step_seconds=seconds, bytes_sent=sent)


def main() -> None:
    arguments = options()
    here = place.here()
    torch.set_num_threads(1)
    if arguments.measure_memory:
        return_freed_memory()
    images, labels = place.load("train").tensors()
    with tcp.connect(*place.rendezvous()) as communicator:
        warm_up(arguments.optimizer)
        torch.manual_seed(arguments.seed)
        process = psutil.Process()
        before = process.memory_info().rss
        model, optimizer = sharded(arguments, images.shape[1], communicator)
        train(model, optimizer, images, labels, arguments)
        held = process.memory_info().rss - before
        numbers = sum(parameter.numel() for parameter in model.parameters())
        place.report(step=arguments.steps, memory_nbytes=held, parameters=numbers)
        if arguments.stage == 3:
            with model.gathered() as module:
                weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        else:
            weights = model.module.state_dict()
        if communicator.rank == 0:
            here.model_folder.mkdir(parents=True, exist_ok=True)
            torch.save(weights, here.model_folder / "model.pt")
        communicator.barrier()  # so that nobody closes a link that another still reads from
        if arguments.stage < 2:
            model.close()


if __name__ == "__main__":
    main()
