"""Train on while workers die and others come: Horovod's elastic state, in PyTorch.

Kill a worker (its process id is in its first line): the others go back to the last commit and train on without it.
After some seconds another takes its place and gets the state of rank 0.
"""

import argparse
import os
import random
import sys
import time

import horovod.torch as hvd
import torch
from horovod.torch.elastic import TorchState, run
from torch import nn
from torch.nn.functional import cross_entropy

from workshop_utils import place

COMMIT_STEPS = 5  # what is done since the last commit is done again after a failure


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="of one worker; N take N times it")
    parser.add_argument("--hidden", type=int, default=64, help="units in the hidden layer")
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="a pause in each step, to have time to look"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.batch_size < 1:
        sys.exit(f"batch-size is {options.batch_size}; it must be at least 1")

    hvd.init()
    images, labels = place.load("train").tensors()
    test_images, test_labels = place.load("test").tensors()
    torch.manual_seed(options.seed)
    model = nn.Sequential(
        nn.Linear(images.shape[1], options.hidden), nn.ReLU(), nn.Linear(options.hidden, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def take_place() -> None:
        """With the number of workers their ranks change too, and the learning rate."""
        os.environ["HOROVOD_RANK"] = str(hvd.rank())  # for the reports
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * hvd.size()

    @run
    def train(state: TorchState) -> None:
        take_place()  # those who come get the optimizer of rank 0, as it was before they came
        while state.step < options.steps:
            # Every worker draws the same examples, as many as all need, and takes its own.
            drawn = random.Random(f"{options.seed} {state.step}").choices(
                range(len(images)), k=options.batch_size * hvd.size()
            )
            batch = torch.tensor(drawn[hvd.rank() :: hvd.size()])
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(options.step_seconds)
            state.step += 1
            place.report(state.step, loss=loss.item(), world_size=hvd.size(), images=len(drawn))
            if state.step % COMMIT_STEPS == 0:
                state.commit()  # keeps a copy, and looks whether somebody has come

    train(TorchState(model=model, optimizer=optimizer, step=0))

    if hvd.rank() == 0:
        with torch.no_grad():
            accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
        place.report(options.steps, accuracy=accuracy, world_size=hvd.size())
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), here.model_folder / "model.pt")


if __name__ == "__main__":
    main()
