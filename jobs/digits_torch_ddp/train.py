"""Train with PyTorch's DistributedDataParallel, whose buckets are as small as one likes.

The batch is cut between the workers, so that any number of them takes the very same steps, up to rounding. Each rank
reports for every step `loss` (the mean over ranks is that of the batch) and `step_seconds`.
"""

import argparse
import itertools
import time

import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import place

MEBIBYTE = 1024 * 1024


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--layers", type=int, default=4, help="hidden layers")
    parser.add_argument("--width", type=int, default=128, help="units of each hidden layer")
    parser.add_argument("--bucket-bytes", type=int, default=100_000, help="also of the first bucket")
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in ("steps", "batch_size", "layers", "width", "bucket_bytes"):
        if getattr(given, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    return given


def network(pixels: int, width: int, layers: int) -> nn.Sequential:
    """A perceptron with `layers` hidden layers, each followed by ReLU."""
    widths = itertools.pairwise([pixels, *[width] * layers])
    hidden = [module for sizes in widths for module in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def main() -> None:
    arguments = options()
    here = place.here()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = place.load("train").tensors()
    module = network(images.shape[1], arguments.width, arguments.layers)
    megabytes = arguments.bucket_bytes / MEBIBYTE
    model = DistributedDataParallel(module, bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), arguments.learning_rate, momentum=0.9)
    for step in range(arguments.steps):
        start = time.perf_counter()
        batch = torch.arange(step * arguments.batch_size, (step + 1) * arguments.batch_size) % len(images)
        part = batch.tensor_split(size)[rank]
        optimizer.zero_grad()
        # A sum over the part by the size of the whole batch: so the ranks' mean, times their number, is the batch's.
        loss = cross_entropy(model(images[part]), labels[part], reduction="sum") / len(batch) * size
        loss.backward()
        optimizer.step()
        place.report(step=step + 1, loss=loss.item(), step_seconds=time.perf_counter() - start)
    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(module.state_dict(), here.model_folder / "model.pt")
    # Who holds the group must let go of it first, and all must have met: see mnist_torch_ddp.
    dist.barrier()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
