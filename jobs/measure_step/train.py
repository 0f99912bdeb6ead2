"""Measure the steps of one training by four strategies: what a worker computes, waits for, and sends.

The job's strategy decides how gradients are averaged, and nothing else: `ring` (one ring all-reduce after the backward
pass), `workshop_parameter_server` (push and pull, synchronous), `torch_ddp` (DistributedDataParallel, in buckets,
during the backward pass) or `horovod` (in fusion buffers, during it too). All take the very same steps, up to rounding.

With `--elements` the model has layers of so many parameters instead, and with `--costs` their shares of an emulated
device's time: a scale model of any other model.

Each worker reports for every step `loss`, `gradient_nbytes`, `step_seconds` and its two parts: `compute_seconds`, until
the last gradient is there, and `communication_seconds`, from then until the parameters may be changed, waiting for
slower workers included. The workshop's own strategies also report `bytes_sent` and `bytes_received` in that step, and a
server at its end those of all steps. All workers begin a step together; waiting for that is not part of it.
"""

import argparse
import importlib
import itertools
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import place

Backward = Callable[[int], float]  # step to loss; leaves the gradients of this worker's batch


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--width", type=int, default=256, help="units of each hidden layer")
    parser.add_argument("--layers", type=int, default=3, help="hidden layers")
    parser.add_argument(
        "--elements", type=numbers, help="parameters of each layer, multiples of 64, with commas"
    )
    parser.add_argument(
        "--costs", type=numbers, help="multiplications of each in a pass; by default those that it does"
    )
    parser.add_argument("--horovod", type=int, default=0, help="1: launched with the strategy horovod")
    parser.add_argument("--bucket-bytes", type=numbers, help="of DDP's buckets; or FIRST,OTHERS")
    parser.add_argument("--batch-size", type=int, default=64, help="images a worker takes in one step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in ("width", "layers", "batch_size", "steps"):
        if getattr(given, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    if given.elements and (len(given.costs or given.elements) != len(given.elements)):
        parser.error(f"costs has {len(given.costs)} numbers; it must have one for each of elements")
    if given.elements and not all(count >= 64 and count % 64 == 0 for count in given.elements):
        parser.error("elements must be multiples of 64, such as 640,6400")
    return given


def numbers(text: str) -> list[float]:
    return [float(word) for word in str(text).split(",")]


def network(pixels: int, width: int, layers: int) -> nn.Sequential:
    """A perceptron with `layers` hidden layers, each followed by ReLU."""
    widths = itertools.pairwise([pixels, *[width] * layers])
    hidden = [module for sizes in widths for module in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


class Part(nn.Module):
    """y = x + Wᵀ relu(W x) / rows: a layer with any number of parameters that keeps the width of its input."""

    emulated_cost: float | None = None  # of the forward pass, in multiplications

    def __init__(self, elements: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(elements // width, width) / width**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + (inputs @ self.weight.T).relu() @ self.weight / len(self.weight)


class Head(nn.Linear):
    emulated_cost = 0.0


def scale_model(elements: list[float], costs: list[float] | None) -> nn.Sequential:
    """Layers of so many parameters, for images of 64 pixels; then one of 650, on which a device spends no time."""
    parts = [Part(int(count), 64) for count in elements]
    for part, cost in zip(parts, costs or [], strict=False):
        part.emulated_cost = cost
    return nn.Sequential(*parts, Head(64, 10))


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


def report(
    step: int, loss: float, nbytes: int, marks: tuple[float, float, float, float], traffic: Any = None
) -> None:
    """Report a step whose `marks` are when it began, had computed, had averaged, and ended."""
    started, computed, averaged, ended = marks
    counted = (
        {}
        if traffic is None
        else {
            "bytes_sent": int(traffic.bytes_sent.sum()),
            "bytes_received": int(traffic.bytes_received.sum()),
        }
    )
    place.report(
        step=step,
        loss=loss,
        gradient_nbytes=nbytes,
        step_seconds=ended - started,
        compute_seconds=computed - started,
        communication_seconds=averaged - computed,
        **counted,
    )


def by_ring(model: nn.Module, backward: Backward, arguments: argparse.Namespace) -> None:
    from workshop_utils.comm import tcp
    from workshop_utils.comm.ring import ring_all_reduce

    weights, gradients = flatten(model)
    with tcp.connect(*place.rendezvous()) as communicator:
        for step in range(1, arguments.steps + 1):
            communicator.barrier()
            communicator.traffic.reset()
            started = time.perf_counter()
            gradients[:] = 0
            loss = backward(step)
            computed = time.perf_counter()
            ring_all_reduce(communicator, gradients, "mean")
            averaged = time.perf_counter()
            weights -= np.float32(arguments.learning_rate) * gradients
            ended = time.perf_counter()
            traffic = communicator.traffic
            report(step, loss, gradients.nbytes, (started, computed, averaged, ended), traffic)
        communicator.barrier()  # so that nobody closes a link that another still reads from


def by_servers(model: nn.Module, backward: Backward, arguments: argparse.Namespace) -> None:
    from workshop_utils.comm import parameter_server, tcp
    from workshop_utils.comm.subset import Subset

    here = place.here()
    weights, gradients = flatten(model)
    arrangement = parameter_server.Arrangement(here.servers, here.world_size - here.servers, arguments.steps)
    with tcp.connect(*place.rendezvous()) as communicator:
        traffic = communicator.traffic
        together = Subset(communicator, arrangement.worker_ranks) if here.role == "worker" else None
        marks: list[tuple[int, float, float, float]] = []  # step, loss, started, computed

        def gradient_of(_: NDArray[np.float32], step: int) -> NDArray[np.float32]:
            report_last()
            assert together is not None  # a server computes no gradient
            together.barrier()
            traffic.reset()
            started = time.perf_counter()
            gradients[:] = 0
            loss = backward(step + 1)
            marks.append((step + 1, loss, started, time.perf_counter()))
            return gradients

        def report_last() -> None:
            """Of the step whose answer has just come."""
            if not marks:
                return
            step, loss, started, computed = marks[-1]
            ended = time.perf_counter()
            report(step, loss, gradients.nbytes, (started, computed, ended, ended), traffic)

        def update(part: NDArray[np.float32], gradient: NDArray[np.float32]) -> None:
            part -= np.float32(arguments.learning_rate) * gradient

        log = parameter_server.train(communicator, arrangement, weights, gradient_of, update)
        if log is None:
            report_last()
        else:
            sent, received = int(traffic.bytes_sent.sum()), int(traffic.bytes_received.sum())
            place.report(step=log.version, bytes_sent=sent, bytes_received=received)
        communicator.barrier()


def by_ddp(model: nn.Module, backward: Backward, arguments: argparse.Namespace) -> None:
    handed_over = 0.0  # when the last bucket of this step was

    def all_reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal handed_over
        handed_over = time.perf_counter()
        return allreduce_hook(group, bucket)

    assert isinstance(model, DistributedDataParallel)
    model.register_comm_hook(dist.group.WORLD, all_reduce)
    optimizer = torch.optim.SGD(model.parameters(), arguments.learning_rate)
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    for step in range(1, arguments.steps + 1):
        dist.barrier()
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = backward(step)
        averaged = time.perf_counter()
        optimizer.step()
        ended = time.perf_counter()
        report(step, loss, nbytes, (started, handed_over, averaged, ended))


def by_horovod(model: nn.Module, backward: Backward, arguments: argparse.Namespace) -> None:
    # By name, so that the other strategies do not ask for Horovod.
    hvd = importlib.import_module("horovod.torch")
    hvd.init()
    named = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), arguments.learning_rate)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=named)
    nbytes = sum(parameter.nbytes for _, parameter in named)
    for step in range(1, arguments.steps + 1):
        hvd.barrier()
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = backward(step)
        computed = time.perf_counter()
        # Horovod's own waiting keeps a core busy, which on an emulated cluster others need.
        for handle, _ in optimizer._handles.values():
            while not hvd.poll(handle):
                time.sleep(0.001)
        optimizer.synchronize()
        averaged = time.perf_counter()
        with optimizer.skip_synchronize():
            optimizer.step()
        report(step, loss, nbytes, (started, computed, averaged, time.perf_counter()))
    hvd.shutdown()


def main() -> None:
    arguments = options()
    here = place.here()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)  # the same weights on every rank
    examples = place.load("train")
    images = torch.frombuffer(bytearray(examples.images), dtype=torch.uint8).view(examples.count, -1) / 255
    labels = torch.frombuffer(bytearray(examples.labels), dtype=torch.uint8).long()
    workers = here.world_size - here.servers
    if arguments.elements:
        model: Any = scale_model(arguments.elements, arguments.costs)
    else:
        model = network(images.shape[1], arguments.width, arguments.layers)

    def backward(step: int) -> float:
        first = (step * workers + here.index) * arguments.batch_size
        mine = torch.arange(first, first + arguments.batch_size) % len(images)
        loss = cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        return loss.item()

    if here.servers:
        by_servers(model, backward, arguments)
    elif is_own():
        by_ring(model, backward, arguments)
    elif arguments.horovod:
        by_horovod(model, backward, arguments)
    else:
        dist.init_process_group("gloo")
        megabytes = [nbytes / (1 << 20) for nbytes in arguments.bucket_bytes or []] or None
        model = DistributedDataParallel(model, bucket_cap_mb_list=megabytes, gradient_as_bucket_view=True)
        by_ddp(model, backward, arguments)
        # Who holds the group must let go of it first, and all must have met: see mnist_torch_ddp.
        dist.barrier()
        del model
        dist.destroy_process_group()


def is_own() -> bool:
    """Whether this job was launched by a strategy of the workshop's own message passing."""
    try:
        place.rendezvous()
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
