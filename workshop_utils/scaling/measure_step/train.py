"""Measure the steps of one training by four strategies: the script that `scaling.scale_model` launches.

The job's strategy decides how gradients are averaged, and nothing else: `ring` (one ring all-reduce after the backward
pass), `workshop_parameter_server` (push and pull, synchronous), `torch_ddp` (DistributedDataParallel, in buckets,
during the backward pass) or `horovod` (in fusion buffers, during it too). All take the very same steps, up to rounding.

The model has layers of `--elements` parameters; `--costs` are their shares of an emulated device's time.

Each worker reports for every step `loss`, `gradient_nbytes`, `step_seconds`, and `compute_seconds`, until the backward
pass has ended; DDP and Horovod communicate during it. All workers begin a step together; waiting for that is not part
of it.
"""

import argparse
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import place

WIDTH = 64  # pixels of an image, and units of each layer
Backward = Callable[[int], float]  # step to loss; leaves the gradients of this worker's batch


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--elements", type=numbers, required=True, help="parameters of each layer, multiples of 64"
    )
    parser.add_argument(
        "--costs", type=numbers, help="multiplications of each in a pass; by default those that it does"
    )
    parser.add_argument("--bucket-bytes", type=numbers, help="of DDP's buckets; or FIRST,OTHERS")
    parser.add_argument("--batch-size", type=int, default=64, help="images a worker takes in one step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    return parser.parse_args()


def numbers(text: str) -> list[float]:
    return [float(word) for word in str(text).split(",")]


class Part(nn.Module):
    """y = x + Wᵀ relu(W x) / rows: a layer with any number of parameters that keeps the width of its input."""

    def __init__(self, elements: int, cost: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(elements // WIDTH, WIDTH) / WIDTH**0.5)
        self.emulated_cost = cost  # of the forward pass, in multiplications

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + (inputs @ self.weight.T).relu() @ self.weight / len(self.weight)


class Head(nn.Linear):
    emulated_cost = 0.0


def flatten(model: nn.Module) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Parameters and gradients as two flat arrays, of which the model's own become views."""
    count = sum(parameter.numel() for parameter in model.parameters())
    weights, gradients = np.empty(count, np.float32), np.zeros(count, np.float32)
    start = 0
    for parameter in model.parameters():
        part = slice(start, start + parameter.numel())
        weights[part] = parameter.detach().numpy().ravel()
        parameter.data = torch.from_numpy(weights[part]).view_as(parameter)
        parameter.grad = torch.from_numpy(gradients[part]).view_as(parameter)
        start = part.stop
    return weights, gradients


def train(
    arguments: argparse.Namespace,
    model: nn.Module,
    backward: Backward,
    barrier: Callable[[], Any],
    exchange: Callable[[], Any] = lambda: None,
    optimizer: Any = None,
) -> None:
    """Take and report the steps; `exchange` averages what the backward pass has not averaged yet."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), arguments.learning_rate)
    for step in range(1, arguments.steps + 1):
        barrier()
        started = time.perf_counter()
        model.zero_grad(set_to_none=False)  # a ring's gradients are parts of one array
        loss = backward(step)
        computed = time.perf_counter()
        exchange()
        optimizer.step()
        report(model, step, loss, started, computed)


def report(model: nn.Module, step: int, loss: float, started: float, computed: float) -> None:
    place.report(
        step=step,
        loss=loss,
        gradient_nbytes=sum(parameter.nbytes for parameter in model.parameters()),
        step_seconds=time.perf_counter() - started,
        compute_seconds=computed - started,
    )


def by_ring(arguments: argparse.Namespace, model: nn.Module, backward: Backward) -> None:
    from workshop_utils.comm import tcp
    from workshop_utils.comm.ring import ring_all_reduce

    _, gradients = flatten(model)
    with tcp.connect(*place.rendezvous()) as communicator:

        def exchange() -> None:
            ring_all_reduce(communicator, gradients, "mean")

        train(arguments, model, backward, communicator.barrier, exchange)
        communicator.barrier()  # so that nobody closes a link that another still reads from


def by_servers(arguments: argparse.Namespace, model: nn.Module, backward: Backward) -> None:
    from workshop_utils.comm import parameter_server, tcp
    from workshop_utils.comm.subset import Subset

    here = place.here()
    weights, gradients = flatten(model)
    arrangement = parameter_server.Arrangement(here.servers, here.world_size - here.servers, arguments.steps)
    with tcp.connect(*place.rendezvous()) as communicator:
        together = Subset(communicator, arrangement.worker_ranks) if here.role == "worker" else None
        steps: list[tuple[int, float, float, float]] = []  # step, loss, started, computed

        def gradient_of(_: NDArray[np.float32], before: int) -> NDArray[np.float32]:
            if steps:  # whose answer has just come
                report(model, *steps[-1])
            assert together is not None  # a server computes no gradient
            together.barrier()
            started = time.perf_counter()
            gradients[:] = 0
            loss = backward(before + 1)
            steps.append((before + 1, loss, started, time.perf_counter()))
            return gradients

        def update(part: NDArray[np.float32], gradient: NDArray[np.float32]) -> None:
            part -= np.float32(arguments.learning_rate) * gradient

        parameter_server.train(communicator, arrangement, weights, gradient_of, update)
        if steps:
            report(model, *steps[-1])
        communicator.barrier()


def by_horovod(arguments: argparse.Namespace, model: nn.Module, backward: Backward) -> None:
    # By name, so that the other strategies do not ask for Horovod.
    hvd = importlib.import_module("horovod.torch")
    hvd.init()
    sgd = torch.optim.SGD(model.parameters(), arguments.learning_rate)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=[*model.named_parameters()])

    def poll() -> None:
        """Horovod's own waiting, in `step`, keeps a core busy, which on an emulated cluster others need."""
        for handle, _ in optimizer._handles.values():
            while not hvd.poll(handle):
                time.sleep(0.001)

    train(arguments, model, backward, hvd.barrier, poll, optimizer)
    hvd.shutdown()


def main() -> None:
    arguments = options()
    here = place.here()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights on every rank
    images, labels = place.load("train").tensors()
    workers = here.world_size - here.servers
    costs = arguments.costs or [None] * len(arguments.elements)
    parts = [Part(int(count), cost) for count, cost in zip(arguments.elements, costs, strict=True)]
    model: Any = nn.Sequential(*parts, Head(WIDTH, 10))  # on whose head a device spends no time

    def backward(step: int) -> float:
        first = (step * workers + here.index) * arguments.batch_size
        mine = torch.arange(first, first + arguments.batch_size) % len(images)
        loss = cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        return loss.item()

    if here.servers:
        by_servers(arguments, model, backward)
    elif os.environ.get("WORKSHOP_SECRET"):  # of the workshop's own message passing
        by_ring(arguments, model, backward)
    elif "HOROVOD_RANK" in os.environ:
        by_horovod(arguments, model, backward)
    else:
        dist.init_process_group("gloo")
        megabytes = [nbytes / (1 << 20) for nbytes in arguments.bucket_bytes or []] or None
        model = DistributedDataParallel(model, bucket_cap_mb_list=megabytes, gradient_as_bucket_view=True)
        train(arguments, model, backward, dist.barrier)
        # Who holds the group must let go of it first, and all must have met: see mnist_torch_ddp.
        dist.barrier()
        del model
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
