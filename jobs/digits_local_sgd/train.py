"""Local SGD and DiLoCo in PyTorch: each worker takes some steps by itself, then all meet.

At a meeting, the mean way that the workers have gone is taken for a gradient, and an outer optimizer steps along it.
DiLoCo (Douillard et al. 2023, algorithm 1) is AdamW inside and Nesterov momentum outside, the default here;
`--outer-learning-rate 1 --outer-momentum 0` averages the weights, and with `--inner sgd` is local SGD (Stich 2019).
`--shards sorted` gives each worker other digits.
"""

import argparse

import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import nn
from torch.nn.functional import cross_entropy

from workshop_utils import place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--local-steps", type=int, default=16, help="between two meetings")
    parser.add_argument("--rounds", type=int, default=16, help="meetings in all")
    parser.add_argument("--batch-size", type=int, default=8, help="images a worker takes in one step")
    parser.add_argument("--inner", choices=["sgd", "adamw"], default="adamw")
    parser.add_argument("--learning-rate", type=float, default=0.003, help="of the inner optimizer")
    parser.add_argument("--outer-learning-rate", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--shards", choices=["mixed", "sorted"], default="mixed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in ("local_steps", "rounds", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    here = place.here()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)  # so that all begin with the same weights
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = place.load("train").tensors()
    order = labels.argsort(stable=True) if options.shards == "sorted" else torch.randperm(len(images))
    shard = order.tensor_split(size)[rank]
    draw = torch.Generator().manual_seed(1000 * options.seed + rank)

    model = nn.Sequential(nn.Linear(images.shape[1], 32), nn.ReLU(), nn.Linear(32, 10))  # this worker's own
    kind = torch.optim.SGD if options.inner == "sgd" else torch.optim.AdamW
    inner = kind(model.parameters(), lr=options.learning_rate)  # its moments stay here
    shared = nn.utils.parameters_to_vector(model.parameters()).detach().clone().requires_grad_()
    momentum = options.outer_momentum
    outer = torch.optim.SGD([shared], options.outer_learning_rate, momentum=momentum, nesterov=momentum > 0)

    for round_ in range(1, options.rounds + 1):
        for _ in range(options.local_steps):
            batch = shard[torch.randint(len(shard), (options.batch_size,), generator=draw)]
            inner.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            inner.step()
        way = shared.detach() - nn.utils.parameters_to_vector(model.parameters()).detach()
        dist.all_reduce(way)  # all that is ever sent
        shared.grad = way / size
        outer.step()
        nn.utils.vector_to_parameters(shared.detach().clone(), model.parameters())
        if rank == 0:
            with torch.no_grad():
                loss = cross_entropy(model(images), labels).item()
            place.report(round_, loss=loss, numbers_reduced=round_ * len(shared))

    if rank == 0:
        with torch.no_grad():
            pixels, digits = place.load("test").tensors()
            accuracy = (model(pixels).argmax(1) == digits).float().mean().item()
        place.report(options.rounds, accuracy=accuracy)
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), here.model_folder / "model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
