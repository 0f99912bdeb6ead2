"""The steps of jobs/spark_sgd with the workshop's own ring: the ranks stay, and only gradients travel.

The model is softmax regression in float64, and a batch is cut between the ranks as it is between Spark's partitions.
Each rank reports for every step `loss`, `step_seconds` and `bytes_sent` in that step; rank 0 at the end `accuracy`.
"""

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.comm.ring import ring_all_reduce

CLASSES = 10
Floats = NDArray[np.float64]


def load(split: str) -> tuple[Floats, NDArray[np.uint8]]:
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
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--learning-rate", type=float, default=0.5)
    given = parser.parse_args()
    for name in ("steps", "batch_size"):
        if getattr(given, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    return given


def main() -> None:
    given = options()
    here = place.here()
    communicator = tcp.connect(*place.rendezvous())
    rank, size = communicator.rank, communicator.size
    images, labels = load("train")
    weights = np.zeros((images.shape[1], CLASSES))
    total = np.zeros(weights.size + 1)
    sent = 0
    for step in range(given.steps):
        started = time.perf_counter()
        batch = np.arange(step * given.batch_size, (step + 1) * given.batch_size) % len(images)
        mine = batch[batch % size == rank]
        total[:] = loss_and_gradient(weights, images[mine], labels[mine])
        ring_all_reduce(communicator, total, "sum")
        weights -= given.learning_rate * total[:-1].reshape(weights.shape) / given.batch_size
        seconds, before = time.perf_counter() - started, sent
        sent = int(communicator.traffic.bytes_sent.sum())
        loss = total[-1] / given.batch_size
        place.report(step=step + 1, loss=loss, step_seconds=seconds, bytes_sent=sent - before)
    if rank == 0:
        test_images, test_labels = load("test")
        accuracy = float((np.argmax(test_images @ weights, axis=1) == test_labels).mean())
        place.report(step=given.steps, accuracy=accuracy)
        here.model_folder.mkdir(parents=True, exist_ok=True)
        np.save(here.model_folder / "model.npy", weights)
    communicator.barrier()  # so that nobody closes a link that another still reads from
    communicator.close()


if __name__ == "__main__":
    main()
