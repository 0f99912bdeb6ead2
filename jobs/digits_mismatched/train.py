"""Train with a mistake: after some steps not all ranks call the same collectives any more.

| `--mistake` | what rank 0 does, and the others do not |
| --- | --- |
| none | nothing: the run ends well |
| barrier | it saves the model, and calls the barrier that was meant for all inside the same `if` |
| size | its gradient has one element less |

`--check 1` has PyTorch compare what the ranks call before each collective (its debug level DETAIL).
"""

import argparse

import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import Tensor
from torch.nn.functional import cross_entropy

from workshop_utils import place

SAVE_STEP = 5  # after which rank 0 makes its mistake


def save(weights: Tensor) -> None:
    place.here().model_folder.mkdir(parents=True, exist_ok=True)
    torch.save(weights, place.here().model_folder / "model.pt")


def average(gradient: Tensor) -> None:
    """Replace `gradient` by the mean of all ranks'."""
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def main() -> None:
    place.here()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--mistake", choices=["none", "barrier", "size"], default="barrier")
    parser.add_argument("--check", type=int, choices=[0, 1], default=0)
    options = parser.parse_args()

    if options.check:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = place.load("train").tensors()
    weights = torch.zeros(images.shape[1], 10, requires_grad=True)

    for step in range(1, options.steps + 1):
        chosen = torch.arange(options.batch_size) * size + rank + step * options.batch_size * size
        batch = chosen % len(images)
        loss = cross_entropy(images[batch] @ weights, labels[batch])
        (gradient,) = torch.autograd.grad(loss, weights)
        gradient = gradient.reshape(-1)
        wrong = rank == 0 and step == SAVE_STEP
        average(gradient[1:] if wrong and options.mistake == "size" else gradient)
        with torch.no_grad():
            weights -= options.learning_rate * gradient.view_as(weights)
        place.report(step=step, loss=loss.item())
        if wrong and options.mistake == "barrier":
            save(weights.detach())
            dist.barrier()  # one level too deep: the other ranks never come here

    if rank == 0:
        save(weights.detach())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
