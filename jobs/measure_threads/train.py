"""Measure how fast one worker trains with more and more threads, for a small network and a large one.

Reports for each repeat, width and number of threads: `width`, `threads` and `samples_per_second`. The numbers of
threads take turns within a repeat, so that whatever else the machine does falls on all of them alike.
"""

import argparse
import sys
import time

import torch
from torch import nn

from workshop_utils import place

PIECE_SECONDS = 0.2  # so long is each piece of training that is timed


def network(width: int) -> nn.Module:
    """Three dense layers; the forward and the backward pass of one step are products of width × width matrices."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


def samples_per_second(model: nn.Module, batch: torch.Tensor) -> float:
    """How many samples pass forward and backward in a second."""
    samples, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < PIECE_SECONDS:
        model(batch).square().mean().backward()
        samples += len(batch)
    return samples / elapsed


def numbers(name: str, text: str) -> list[int]:
    """The whole numbers in `text`, with commas between; ends the program where there are others."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        sys.exit(f"{name} is {text!r}; it must be whole numbers above zero with commas between, such as 1,2")
    return [int(word) for word in words]


def main() -> None:
    place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--widths", default="64,1024", help="units in a layer; several, separated by commas")
    parser.add_argument(
        "--threads", default="1,2", help="threads of the worker; several, separated by commas"
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    widths, counts = numbers("widths", options.widths), numbers("threads", options.threads)

    for width in widths:
        model, batch = network(width), torch.randn(options.batch_size, width)
        samples_per_second(model, batch)  # the first time, memory is laid out
        for repeat in range(1, options.repeats + 1):
            for threads in counts:
                torch.set_num_threads(threads)
                speed = samples_per_second(model, batch)
                place.report(step=repeat, width=width, threads=threads, samples_per_second=speed)


if __name__ == "__main__":
    main()
