"""Train so that a failure costs a few steps: save all there is every so often, and go on from the last that is whole.

Interrupted or not, the weights at the end are the same, bit by bit. Three things make them so. The checkpoint holds all
that the next step depends on: weights, momentum, how many steps were made. Examples are drawn by the step's number, not
by a generator that nobody saved. Gradients travel in one array, so that they are always added in the same order.

A failure on request: `--kill-rank` dies after `--kill-step`, in the job's first life.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workshop_utils import place
from workshop_utils.training import checkpoints

MOMENTUM = 0.9
FORGETTABLE = ("nothing", "velocity", "step")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=96, help="of all workers together")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-steps", type=int, default=10, help="0: no checkpoints")
    parser.add_argument("--forget", choices=FORGETTABLE, default="nothing", help="what a restart leaves out")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="added to each step's computing")
    parser.add_argument("--kill-rank", type=int, default=-1)
    parser.add_argument("--kill-step", type=int, default=0)
    given = parser.parse_args()
    for name, least in (("steps", 1), ("batch_size", 1), ("checkpoint_steps", 0)):
        if getattr(given, name) < least:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least {least}")
    return given


def load(split: str) -> tuple[Tensor, Tensor]:
    """Images in [0, 1], shape (count, pixels), and labels, shape (count,)."""
    examples = place.load(split)
    images = torch.frombuffer(bytearray(examples.images), dtype=torch.uint8).view(examples.count, -1) / 255
    return images, torch.frombuffer(bytearray(examples.labels), dtype=torch.uint8).long()


class Training:
    """The model and all that a step changes: `weights` and `velocity`, flat, and `step`, how many were made."""

    def __init__(self, pixels: int, given: argparse.Namespace) -> None:
        torch.manual_seed(given.seed)
        # What makes another run of it: a checkpoint with other ones is not this run's.
        names = ("seed", "batch_size", "hidden", "learning_rate")
        self.settings = {name.replace("_", "-"): getattr(given, name) for name in names}
        self.model = nn.Sequential(nn.Linear(pixels, given.hidden), nn.ReLU(), nn.Linear(given.hidden, 10))
        self.weights = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        nn.utils.vector_to_parameters(self.weights, self.model.parameters())  # views from now on
        self.velocity = torch.zeros_like(self.weights)
        self.step = 0

    def update(self, gradient: Tensor, learning_rate: float) -> None:
        """One step of stochastic gradient descent with momentum."""
        self.velocity.mul_(MOMENTUM).add_(gradient)
        self.weights.sub_(learning_rate * self.velocity)
        self.step += 1

    def save(self, folder: Path) -> None:
        arrays = {"weights": self.weights.numpy(), "velocity": self.velocity.numpy()}
        checkpoints.save(folder, self.step, arrays, self.settings)

    def resume(self, folder: Path, forget: str) -> None:
        """Go on from the newest whole checkpoint, if there is one. Rank 0 decides which, and tells the others:

        each rank for itself could find another one, if a file came or went in between.
        """
        found = checkpoints.newest(folder, self.settings) if dist.get_rank() == 0 else None
        if found is not None:
            self.step = found.step
            self.weights.copy_(torch.from_numpy(found.arrays["weights"]))
            self.velocity.copy_(torch.from_numpy(found.arrays["velocity"]))
        step = torch.tensor([self.step])
        for tensor in (step, self.weights, self.velocity):
            dist.broadcast(tensor, src=0)
        self.step = int(step)
        if self.step and dist.get_rank() == 0:
            print(f"resumed after step {self.step}")
        if forget == "velocity":
            self.velocity.zero_()
        elif forget == "step":
            self.step = 0


def batch_of(step: int, count: int, given: argparse.Namespace) -> np.ndarray:
    """The rows of the examples that this rank takes in a step: of the same batch, whatever the number of ranks."""
    rows = np.random.default_rng((given.seed, step)).choice(count, given.batch_size)
    return np.array_split(rows, dist.get_world_size())[dist.get_rank()]


def train(training: Training, folder: Path | None, given: argparse.Namespace) -> None:
    rank, first_life = dist.get_rank(), place.restart_count() == 0
    images, labels = load("train")
    gradient = torch.empty_like(training.weights)
    while training.step < given.steps:
        rows = torch.from_numpy(batch_of(training.step, len(images), given))
        loss = cross_entropy(training.model(images[rows]), labels[rows], reduction="sum") / given.batch_size
        parts = torch.autograd.grad(loss, list(training.model.parameters()))
        torch.cat([part.reshape(-1) for part in parts], out=gradient)
        time.sleep(given.step_seconds)
        dist.all_reduce(gradient)  # the sum, since each rank has divided by the whole batch
        training.update(gradient, given.learning_rate)
        place.report(step=training.step, loss=loss.item() * dist.get_world_size())
        if folder and rank == 0 and given.checkpoint_steps and training.step % given.checkpoint_steps == 0:
            training.save(folder)
        if first_life and rank == given.kill_rank and training.step == given.kill_step:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    given = options()
    here = place.here()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    images, labels = load("test")
    training = Training(images.shape[1], given)
    folder = place.checkpoint_folder()
    if folder:
        training.resume(folder, given.forget)
    train(training, folder, given)
    if dist.get_rank() == 0:
        with torch.no_grad():
            correct = training.model(images).argmax(dim=1) == labels
        place.report(step=training.step, accuracy=correct.float().mean().item())
        here.model_folder.mkdir(parents=True, exist_ok=True)
        np.savez(here.model_folder / "model.npz", weights=training.weights.numpy())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
