"""Synchronous SGD the Spark way: each step broadcasts the weights, maps partitions to gradients, adds them in a tree.

The model is softmax regression in float64, and a batch is cut between the partitions, so that any number of them takes
the very same steps, up to rounding; jobs/spark_ring takes them with a ring. The driver reports for every step `loss`,
`step_seconds`, `bytes_received` (of the sums that reached it) and `partials` (how many); at the end `accuracy`.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from workshop_utils import place

CLASSES = 10
Floats = NDArray[np.float64]
Block = tuple[Floats, NDArray[np.uint8]]  # images, shape (count, pixels), and their labels


def load(split: str) -> Block:
    """Images in [0, 1], shape (count, pixels), and labels, shape (count,)."""
    examples = place.load(split)
    images = np.frombuffer(examples.images, np.uint8).reshape(examples.count, -1)
    return images / 255, np.frombuffer(examples.labels, np.uint8)


def loss_and_gradient(weights: Floats, images: Floats, labels: NDArray[np.uint8]) -> Floats:
    """The gradient of the summed cross-entropy, flat, and the sum itself as its last element."""
    z = images @ weights
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(p[rows, labels] + 1e-300).sum()
    p[rows, labels] -= 1
    return np.append(images.T @ p, loss)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all partitions together")
    parser.add_argument(
        "--partitions", type=int, default=0, help="by default one for each core of the cluster"
    )
    parser.add_argument(
        "--depth", type=int, default=2, help="of the tree in which sums are added; 1: all to the driver"
    )
    parser.add_argument("--learning-rate", type=float, default=0.5)
    given = parser.parse_args()
    for name, least in (("steps", 1), ("batch_size", 1), ("partitions", 0), ("depth", 1)):
        if getattr(given, name) < least:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least {least}")
    return given


def train(context: Any, given: argparse.Namespace) -> Floats:
    """Take the steps and report them; the weights, shape (pixels, classes)."""
    images, labels = load("train")
    count, partitions = len(images), given.partitions or context.defaultParallelism
    if partitions > count:
        sys.exit(f"partitions is {partitions}; there are only {count} images to share")
    # Partition p holds every partitions-th image from p on, so that it finds its rows of a batch by arithmetic.
    blocks = [(p, images[p::partitions], labels[p::partitions]) for p in range(partitions)]
    data = context.parallelize(blocks, partitions).cache()
    weights, arrived = np.zeros((images.shape[1], CLASSES)), [0]

    def add(left: Floats, right: Floats) -> Floats:
        arrived[0] += 1  # in the driver's own process this counts the sums that reach it
        return left + right

    for step in range(given.steps):
        started = time.perf_counter()
        batch = np.arange(step * given.batch_size, (step + 1) * given.batch_size) % count
        shared = context.broadcast(weights)

        def gradients(part: Iterator[tuple[int, Floats, NDArray[np.uint8]]]) -> Iterator[Floats]:
            for p, own_images, own_labels in part:
                rows = batch[batch % partitions == p] // partitions  # noqa: B023  (each step sends its own)
                yield loss_and_gradient(shared.value, own_images[rows], own_labels[rows])  # noqa: B023

        arrived[0] = 0
        zero = np.zeros(weights.size + 1)
        total = data.mapPartitions(gradients).treeAggregate(zero, add, add, depth=given.depth)
        shared.destroy()
        weights = weights - given.learning_rate * total[:-1].reshape(weights.shape) / given.batch_size
        partials = arrived[0] + 1  # n sums are added in n - 1 additions
        seconds = time.perf_counter() - started
        place.report(
            step=step + 1,
            loss=total[-1] / given.batch_size,
            step_seconds=seconds,
            partials=partials,
            bytes_received=partials * total.nbytes,
        )
    return weights


def main() -> None:
    given = options()
    here = place.here()
    session = SparkSession.builder.getOrCreate()
    weights = train(session.sparkContext, given)
    session.stop()
    images, labels = load("test")
    place.report(step=given.steps, accuracy=float((np.argmax(images @ weights, axis=1) == labels).mean()))
    here.model_folder.mkdir(parents=True, exist_ok=True)
    np.save(here.model_folder / "model.npy", weights)


if __name__ == "__main__":
    main()
