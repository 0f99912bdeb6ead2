"""One rank of the benchmark `data_parallel`: takes steps, in turn with every way to average the gradients.

mpirun starts it, which tells it its rank; the ways have their own connections.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Later, this import would keep the group's threads alive: see jobs/mnist_torch_ddp.
import torch.distributed.nn
from mpi4py import MPI
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils.comm import shared_memory, tcp
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel.data import (
    MEBIBYTE,
    BucketedDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
)

WIDTHS = {"0.4 MB": 128, "13 MB": 1024}  # bytes of gradients, and units of the four hidden layers
STEPS = {"0.4 MB": 60, "13 MB": 20}
SETTLING_STEPS = 3
BATCH = 32

Step = Callable[[], None]


def main() -> None:
    """Measure, and let rank 0 write `{module: {way: [seconds of a step, ...]}}`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, nargs=3, required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    gloo, *own = (f"127.0.0.1:{port}" for port in options.ports)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{gloo}", rank=rank, world_size=size)
    sockets = tcp.connect(rank, size, own[0], options.secret.encode())
    memory = shared_memory.connect(rank, size, own[1], options.secret.encode())
    seconds: dict[str, dict[str, list[float]]] = {}
    for name, width in WIDTHS.items():
        models = models_of(width, sockets, memory)
        ways = {way: step_of(model) for way, model in models.items()}
        seconds[name] = {way: [] for way in ways}
        for turn in range(STEPS[name] + SETTLING_STEPS):
            for way in ways if turn % 2 else reversed(ways):
                taken = seconds_of(ways[way], memory)
                if turn >= SETTLING_STEPS:
                    seconds[name][way].append(taken)
        dist.barrier()
        for model in models.values():
            if isinstance(model, NaiveDataParallel):
                model.close()
        del models, ways, model  # DDP's hold the process group, which they must let go of first
    if rank == 0:
        options.results.write_text(json.dumps(seconds))
    for communicator in (sockets, memory):
        communicator.barrier()
        communicator.close()
    dist.barrier()
    dist.destroy_process_group()


def models_of(width: int, sockets: Communicator, memory: Communicator) -> dict[str, nn.Module]:
    """Every way by name, each with a module of its own that has the same values."""

    def module() -> nn.Module:
        torch.manual_seed(0)
        sizes = itertools.pairwise([64, width, width, width, width])
        hidden = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(width, 10))

    return {
        "PyTorch": DistributedDataParallel(module(), bucket_cap_mb=1, gradient_as_bucket_view=True),
        "overlapped": OverlappedDataParallel(module(), sockets, MEBIBYTE),
        "bucketed": BucketedDataParallel(module(), sockets, MEBIBYTE),
        "naive": NaiveDataParallel(module(), sockets),
        "overlapped, shared memory": OverlappedDataParallel(module(), memory, MEBIBYTE),
    }


def step_of(model: Any) -> Step:
    """A training step of `model`."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    images, labels = torch.rand(BATCH, 64), torch.randint(10, (BATCH,))
    synchronise = getattr(model, "synchronise", lambda: None)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        synchronise()
        optimizer.step()

    return step


def seconds_of(step: Step, communicator: Communicator) -> float:
    """Seconds of one step, the mean of the ranks, which begin together."""
    communicator.barrier()
    started = time.perf_counter()
    step()
    mean = np.array([time.perf_counter() - started])
    ring_all_reduce(communicator, mean, "mean")
    return float(mean[0])


if __name__ == "__main__":
    main()
