"""Model parallelism: every worker has the whole batch and a partition of the network's units.

`--by hand` is the cut of DistBelief (Dean et al. 2012): each worker owns some units of each layer and the
weights that lead into them, and activations cross from one to another. `--by framework` is torch's
`parallelize_module`, whose cut is that of Megatron (Shoeybi et al. 2019): the output layer is cut by its
inputs, so that only the logits cross. Any number of workers takes the same steps, up to rounding in float64.
"""

import argparse
import math
import random

import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workshop_utils import place

CLASSES = 10


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--by", choices=["hand", "framework"], default="hand")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--width", type=int, default=50, help="of all workers together")
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def drawn(inputs: int, outputs: int, generator: random.Random) -> Tensor:
    """Uniform weights in ±√(6 / (inputs + outputs)), drawn as workshop_utils.training.models draws them."""
    limit = math.sqrt(6 / (inputs + outputs))
    values = [generator.uniform(-limit, limit) for _ in range(inputs * outputs)]
    return torch.tensor(values, dtype=torch.float64).view(inputs, outputs)


def gather(own: Tensor, units: tuple[Tensor, ...], rank: int) -> Tensor:
    """All workers' columns side by side: each sends its own to all the others."""
    parts = [own.new_empty(len(own), len(columns)) for columns in units]
    parts[rank] = own
    for owner, part in enumerate(parts):
        if part.numel():
            dist.broadcast(part, src=owner)
    return torch.cat(parts, dim=1)


def scatter_sum(partial: Tensor, units: tuple[Tensor, ...], rank: int) -> Tensor:
    """Of the sum of all workers' `partial` the columns that this worker owns."""
    parts = [partial[:, columns] for columns in units]
    for owner, part in enumerate(parts):
        if part.numel():
            dist.reduce(part, dst=owner)
    return parts[rank]


class ByHand:
    """One worker's partition: its hidden units, its output units, and the weights that lead into them."""

    def __init__(
        self, hidden: Tensor, output: Tensor, learning_rate: float, rank: int, world_size: int
    ) -> None:
        self.rank, self.learning_rate = rank, learning_rate
        self.hidden_units = torch.arange(hidden.shape[1]).tensor_split(world_size)
        self.output_units = torch.arange(output.shape[1]).tensor_split(world_size)
        self.w1, self.w2 = hidden[:, self.hidden_units[rank]], output[:, self.output_units[rank]]
        self.b1, self.b2 = self.w1.new_zeros(self.w1.shape[1]), self.w2.new_zeros(self.w2.shape[1])

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step of gradient descent; returns the mean loss over the batch before it."""
        own = torch.relu(images @ self.w1 + self.b1)
        activations = gather(own, self.hidden_units, self.rank)  # crosses, forward
        own_logits = activations @ self.w2 + self.b2
        logits = gather(own_logits, self.output_units, self.rank)  # crosses, forward

        gradient = torch.softmax(logits, dim=1)
        gradient[torch.arange(len(labels)), labels] -= 1
        own_gradient = gradient[:, self.output_units[self.rank]] / len(labels)
        partial = own_gradient @ self.w2.T
        upstream = scatter_sum(partial, self.hidden_units, self.rank) * (own > 0)  # crosses, backward

        self.w2 -= self.learning_rate * activations.T @ own_gradient
        self.b2 -= self.learning_rate * own_gradient.sum(dim=0)
        self.w1 -= self.learning_rate * images.T @ upstream
        self.b1 -= self.learning_rate * upstream.sum(dim=0)
        return cross_entropy(logits, labels)

    def whole(self) -> list[Tensor]:
        """The whole network's weights and biases, gathered from all workers."""
        layers = [(self.w1, self.b1, self.hidden_units), (self.w2, self.b2, self.output_units)]
        return [
            gather(columns, units, self.rank).reshape(shape)
            for weights, bias, units in layers
            for columns, shape in [(weights, (len(weights), -1)), (bias[None], (-1,))]
        ]


class ByFramework:
    """The same network, written for one process, and cut by torch."""

    def __init__(self, hidden: Tensor, output: Tensor, learning_rate: float, world_size: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        first = nn.Linear(hidden.shape[0], hidden.shape[1], dtype=torch.float64)
        second = nn.Linear(output.shape[0], output.shape[1], dtype=torch.float64)
        with torch.no_grad():
            for layer, weights in ((first, hidden), (second, output)):
                layer.weight.copy_(weights.T)
                layer.bias.zero_()
        mesh = init_device_mesh("cpu", (world_size,))
        # Without use_local_output=False the second layer would take every worker's share to be as wide as its own.
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        self.network = parallelize_module(nn.Sequential(first, nn.ReLU(), second), mesh, plan)
        self.optimizer = torch.optim.SGD(self.network.parameters(), learning_rate)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step of gradient descent; returns the mean loss over the batch before it."""
        loss = cross_entropy(self.network(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def whole(self) -> list[Tensor]:
        """The whole network's weights and biases, gathered from all workers."""
        from torch.distributed.tensor import DTensor

        return [
            (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
            .detach()
            .t()
            .contiguous()
            for parameter in self.network.parameters()
        ]


def main() -> None:
    arguments = options()
    here = place.here()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    images, labels = place.load("train").tensors()
    images = images.double()  # divided in float32, as the lessons' arrays are, then exact

    generator = random.Random(arguments.seed)
    hidden = drawn(images.shape[1], arguments.width, generator)
    output = drawn(arguments.width, CLASSES, generator)
    if arguments.by == "hand":
        network: ByHand | ByFramework = ByHand(hidden, output, arguments.learning_rate, rank, world_size)
    else:
        network = ByFramework(hidden, output, arguments.learning_rate, world_size)

    for step in range(arguments.steps):
        batch = torch.arange(step * arguments.batch_size, (step + 1) * arguments.batch_size) % len(images)
        loss = network.step(images[batch], labels[batch])
        place.report(step=step + 1, loss=loss.item())

    weights = network.whole()
    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(weights, here.model_folder / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
