"""Train a small network on handwritten digits in one process: what every other job is compared with."""

import argparse
import sys
import time

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
    parser.add_argument("--batch-size", type=int, default=32, help="images in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    images, labels = load("train")
    test_images, test_labels = load("test")
    steps = len(images) // options.batch_size  # an epoch; the shuffled remainder waits for the next one
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; there are only {len(images)} images to train on")

    torch.manual_seed(options.seed)
    model = nn.Sequential(
        nn.Linear(images.shape[1], options.hidden), nn.ReLU(), nn.Linear(options.hidden, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, options.momentum)

    step, samples, since = 0, 0, time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed + epoch))
        for batch in order[: steps * options.batch_size].split(options.batch_size):
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
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
            correct = (model(test_images).argmax(dim=1) == test_labels).sum().item()
        place.report(step=step, accuracy=correct / len(test_labels), epoch=epoch)
        since += time.perf_counter() - paused  # testing is not training

    here.model_folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), here.model_folder / "model.pt")


if __name__ == "__main__":
    main()
