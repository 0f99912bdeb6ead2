"""Train with DistributedDataParallel on data that do not divide evenly: rank 0 has one batch more than the others.

| `--remedy` | what becomes of the batch that only rank 0 has |
| --- | --- |
| none | rank 0 waits in it for the others, who are done |
| drop | it is left out |
| pad | the other ranks get images a second time, as PyTorch's DistributedSampler does |
| join | the others answer its all-reduces with zeros (DDP's `join`) |

Each rank reports for every epoch how many batches it has made, and `images`.
"""

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import place

BATCHES = 5  # that every rank has; rank 0 has a sixth


def rows_of(rank: int, size: int, count: int, remedy: str) -> Tensor:
    """Which of `count` images are this rank's: every size-th one."""
    rows = torch.arange(count)
    if remedy == "drop":
        rows = rows[: count - count % size]
    elif remedy == "pad":
        rows = torch.cat([rows, rows[: -count % size]])
    return rows[rank::size]


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--remedy", choices=["none", "drop", "pad", "join"], default="none")
    options = parser.parse_args()

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    count = BATCHES * options.batch_size * size + 1
    images, labels = (each[:count] for each in place.load("train").tensors())
    model = nn.Sequential(nn.Linear(images.shape[1], 32), nn.ReLU(), nn.Linear(32, 10))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate)

    rows = rows_of(rank, size, len(images), options.remedy)
    for epoch in range(1, options.epochs + 1):
        joined: AbstractContextManager[Any] = parallel.join() if options.remedy == "join" else nullcontext()
        with joined:
            for batch in (batches := rows.split(options.batch_size)):
                loss = cross_entropy(parallel(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()  # one all-reduce, for which every rank must come
                optimizer.step()
        place.report(step=len(batches), loss=loss.item(), images=len(rows), epoch=epoch)
        dist.barrier()  # so that all are done before the next epoch, or the test, begins

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), here.model_folder / "model.pt")
    dist.barrier()
    del parallel
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
