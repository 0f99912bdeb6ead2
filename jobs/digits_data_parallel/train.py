"""Data parallelism: every worker has the whole network and a shard of each batch.

`--by hand` sums the gradients itself, `--by framework` leaves it to DistributedDataParallel. The batch is cut
between the workers, so that any number of them (one too) takes the very same steps, up to rounding in float64.
"""

import argparse
import math
import random

import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import place


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--by", choices=["hand", "framework"], default="hand")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=50, help="of all workers together")
    parser.add_argument("--width", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def dense(inputs: int, outputs: int, generator: random.Random) -> nn.Linear:
    """A layer with uniform weights in ±√(6 / (inputs + outputs)), drawn as the package's models draw them."""
    limit = math.sqrt(6 / (inputs + outputs))
    drawn = [generator.uniform(-limit, limit) for _ in range(inputs * outputs)]
    layer = nn.Linear(inputs, outputs, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(drawn, dtype=torch.float64).view(inputs, outputs).T)
        layer.bias.zero_()
    return layer


def main() -> None:
    arguments = options()
    here = place.here()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    images, labels = place.load("train").tensors()
    images = images.double()  # divided in float32, as the lessons' arrays are, then exact

    generator = random.Random(arguments.seed)
    hidden = dense(images.shape[1], arguments.width, generator)
    network: nn.Module = nn.Sequential(hidden, nn.ReLU(), dense(arguments.width, 10, generator))
    optimizer = torch.optim.SGD(network.parameters(), arguments.learning_rate)
    replica = DistributedDataParallel(network) if arguments.by == "framework" else network

    for step in range(arguments.steps):
        batch = torch.arange(step * arguments.batch_size, (step + 1) * arguments.batch_size) % len(images)
        shard = batch.tensor_split(world_size)[rank]
        # A sum over the shard by the size of the whole batch: so the shards' losses and gradients add up to
        # the batch's, however uneven the shards are.
        loss = cross_entropy(replica(images[shard]), labels[shard], reduction="sum") / len(batch)
        optimizer.zero_grad()
        if arguments.by == "framework":
            (loss * world_size).backward()  # DDP divides the sum by the number of workers
        else:
            loss.backward()
            for parameter in network.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        place.report(step=step + 1, loss=loss.item())

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        weights = [parameter.detach().t().contiguous() for parameter in network.parameters()]
        torch.save(weights, here.model_folder / "model.pt")
    # DDP must let go of the process group first. If its destructor is the last to do so, it holds Python's lock
    # while it waits for a thread that wants it, and the rank hangs now and then (seen with PyTorch 2.13).
    del replica
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
