"""Train with PyTorch's DistributedDataParallel, and watch its buckets.

The batch is cut between the workers, so that any number of them takes the very same steps, up to rounding. Each rank
reports for every step `loss` (the mean over ranks is that of the batch), `step_seconds` and `all_reduces`, how many
buckets have travelled; of the last step also when it did what, in seconds since the first rank began it:
`forward_start`, `forward_end`, `backward_end`, and for each all-reduce its `nbytes`, `start` and `end`.

`--accumulate 4` cuts a worker's share into four parts, of which three travel nowhere (`no_sync`). With
`--fewer-steps 3` the last worker has three batches less than the others, and `--join 1` lets the others go on.
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import place

Batch = tuple[Tensor, Tensor]  # images and labels
MEBIBYTE = 1024 * 1024


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--accumulate", type=int, default=1, help="parts into which a worker cuts its share")
    parser.add_argument("--fewer-steps", type=int, default=0, help="that the last worker has batches for")
    parser.add_argument("--join", type=int, choices=[0, 1], default=0)
    parser.add_argument("--layers", type=int, default=4, help="hidden layers")
    parser.add_argument("--width", type=int, default=128, help="units of each hidden layer")
    parser.add_argument("--bucket-bytes", type=int, default=100_000, help="also of the first bucket")
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in ("steps", "batch_size", "accumulate", "layers", "width", "bucket_bytes"):
        if getattr(given, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    return given


def network(pixels: int, width: int, layers: int) -> nn.Sequential:
    """A perceptron with `layers` hidden layers, each followed by ReLU."""
    widths = itertools.pairwise([pixels, *[width] * layers])
    hidden = [module for sizes in widths for module in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


class Witness:
    """Sees DDP's buckets travel, and sends them as DDP itself would. `spans` are bytes, start and end of each."""

    def __init__(self) -> None:
        self.spans: list[list[float]] = []

    def all_reduce(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """A communication hook, as `register_comm_hook` takes it."""
        span = [float(bucket.buffer().nbytes), time.perf_counter(), 0.0]
        self.spans.append(span)

        def note(future: Any) -> Tensor:
            span[2] = time.perf_counter()
            reduced: Tensor = future.value()
            return reduced

        return allreduce_hook(group, bucket).then(note)


def gradients(
    model: DistributedDataParallel, parts: Sequence[Batch], scale: float
) -> tuple[float, dict[str, float]]:
    """Leave the mean gradient of all ranks in the model. Returns the loss, and when what was done.

    `scale` is 1 / (size of the whole batch) · number of ranks, by which the sum over a part's images is multiplied:
    so the ranks' mean is the batch's gradient, however uneven the parts are.
    """
    marks, total = {"forward_start": time.perf_counter()}, 0.0
    for index, (images, labels) in enumerate(parts):
        without = model.no_sync() if index < len(parts) - 1 else nullcontext()
        with without:  # both passes, since it is the forward pass that prepares what the backward pass sends
            loss = cross_entropy(model(images), labels, reduction="sum") * scale
            marks["forward_end"] = time.perf_counter()
            loss.backward()
        total += loss.item()
    return total, {**marks, "backward_end": time.perf_counter()}


def train(
    model: DistributedDataParallel, batches: Iterator[tuple[Batch, ...]], arguments: argparse.Namespace
) -> None:
    """Take the steps and report them; of the last one also the timeline."""
    witness = Witness()
    model.register_comm_hook(dist.group.WORLD, witness.all_reduce)
    optimizer = torch.optim.SGD(model.parameters(), arguments.learning_rate, momentum=0.9)
    joined: AbstractContextManager[Any] = model.join() if arguments.join else nullcontext()
    with joined:
        for step, parts in enumerate(batches, start=1):
            witness.spans.clear()
            optimizer.zero_grad()
            loss, marks = gradients(model, parts, dist.get_world_size() / arguments.batch_size)
            optimizer.step()
            seconds = time.perf_counter() - marks["forward_start"]
            place.report(step=step, loss=loss, step_seconds=seconds, all_reduces=len(witness.spans))
    origin = torch.tensor(marks["forward_start"], dtype=torch.float64)
    dist.all_reduce(origin, dist.ReduceOp.MIN)
    place.report(step=step, **{name: moment - origin.item() for name, moment in marks.items()})
    for index, (nbytes, start, end) in enumerate(witness.spans):
        times = {"start": start - origin.item(), "end": end - origin.item()}
        place.report(step=step, all_reduce=index, nbytes=nbytes, **times)


def main() -> None:
    arguments = options()
    here = place.here()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = place.load("train").tensors()

    def parts_of(step: int) -> tuple[Batch, ...]:
        batch = torch.arange(step * arguments.batch_size, (step + 1) * arguments.batch_size) % len(images)
        parts = batch.tensor_split(size)[rank].tensor_split(arguments.accumulate)
        return tuple((images[part], labels[part]) for part in parts)

    module = network(images.shape[1], arguments.width, arguments.layers)
    megabytes = arguments.bucket_bytes / MEBIBYTE
    model = DistributedDataParallel(module, bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    steps = arguments.steps - (arguments.fewer_steps if rank == size - 1 else 0)
    train(model, (parts_of(step) for step in range(steps)), arguments)
    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(module.state_dict(), here.model_folder / "model.pt")
    # Who holds the group must let go of it first, and all must have met: see mnist_torch_ddp.
    dist.barrier()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
