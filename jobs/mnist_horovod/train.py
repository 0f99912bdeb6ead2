"""Train a small network on handwritten digits with Horovod: its optimizer averages gradients by ring all-reduce."""

import argparse
import sys
import time

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workshop_utils import place


def load(split: str) -> tuple[Tensor, Tensor]:
    """Images in [0, 1], shape (count, pixels), and labels, shape (count,)."""
    examples = place.load(split)
    images = torch.frombuffer(bytearray(examples.images), dtype=torch.uint8).view(examples.count, -1) / 255
    return images, torch.frombuffer(bytearray(examples.labels), dtype=torch.uint8).long()


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of one worker; N take N times it")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    hvd.init()
    rank, world_size = hvd.rank(), hvd.size()

    images, labels = load("train")
    test_images, test_labels = load("test")
    mine = slice(rank, None, world_size)  # every world_size-th example, to train as to test
    share = len(images) // world_size  # equal shares, since every step needs every rank
    steps = share // options.batch_size  # an epoch; the shuffled remainder waits for the next one
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {world_size} workers has only {share} images")

    torch.manual_seed(options.seed)
    model = nn.Sequential(
        nn.Linear(images.shape[1], options.hidden), nn.ReLU(), nn.Linear(options.hidden, 10)
    )
    # N workers make the batch N times as large and the steps N times fewer, so each step may be N times as
    # long: the linear scaling rule (Goyal et al. 2017, section 2.1).
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate * world_size, options.momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    step, samples, since = 0, 0, time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed + epoch))
        for batch in order[mine][: steps * options.batch_size].split(options.batch_size):
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # each gradient sets off on its ring as soon as it is there
            optimizer.step()  # waits until all are back as averages
            step, samples = step + 1, samples + len(batch)
            if step == 1:  # its time is that of starting up, so the clock starts after it
                place.report(step=step, loss=loss.item(), epoch=epoch)
                samples, since = 0, time.perf_counter()
            elif step % max(1, steps * options.epochs // 20) == 0:
                speed = samples / (time.perf_counter() - since)
                place.report(step=step, loss=loss.item(), samples_per_second=speed, epoch=epoch)
                samples, since = 0, time.perf_counter()

        paused = time.perf_counter()
        with torch.no_grad():
            correct = (model(test_images[mine]).argmax(dim=1) == test_labels[mine]).sum()
        correct = hvd.allreduce(correct, op=hvd.Sum)
        if rank == 0:
            place.report(step=step, accuracy=correct.item() / len(test_labels), epoch=epoch)
        since += time.perf_counter() - paused  # testing is not training

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), here.model_folder / "model.pt")
    hvd.shutdown()


if __name__ == "__main__":
    main()
