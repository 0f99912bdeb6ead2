"""Train a small network on handwritten digits with MPI: NumPy, gradients by hand, one Allreduce a step."""

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from workshop_utils import place

Floats = NDArray[np.float32]


def load(split: str) -> tuple[Floats, NDArray[np.uint8]]:
    """Images in [0, 1], shape (count, pixels), and labels, shape (count,)."""
    examples = place.load(split)
    images = np.frombuffer(examples.images, np.uint8).reshape(examples.count, -1)
    return images.astype(np.float32) / np.float32(255), np.frombuffer(examples.labels, np.uint8)


def layers(flat: Floats, pixels: int, hidden: int) -> tuple[Floats, Floats, Floats, Floats]:
    """w1, b1, w2, b2 as views of one flat array, so that a single message carries them all."""
    w1, b1, w2, b2 = np.split(flat, np.cumsum([pixels * hidden, hidden, hidden * 10]))
    return w1.reshape(pixels, hidden), b1, w2.reshape(hidden, 10), b2


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

    comm = MPI.COMM_WORLD
    rank, world_size = comm.Get_rank(), comm.Get_size()

    images, labels = load("train")
    test_images, test_labels = load("test")
    mine = slice(rank, None, world_size)  # every world_size-th example, to train as to test
    share = len(images) // world_size  # equal shares, since every step needs every rank
    steps = share // options.batch_size  # an epoch; the shuffled remainder waits for the next one
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {world_size} workers has only {share} images")

    pixels, hidden = images.shape[1], options.hidden
    weights = np.zeros(pixels * hidden + hidden + hidden * 10 + 10, np.float32)
    gradients, momentum = np.zeros_like(weights), np.zeros_like(weights)
    w1, b1, w2, b2 = layers(weights, pixels, hidden)
    g1, gb1, g2, gb2 = layers(gradients, pixels, hidden)
    # The same seed gives every rank the same weights, drawn as Glorot and Bengio (2010, equation 16) do.
    random = np.random.default_rng(options.seed)
    for w in (w1, w2):
        w[:] = random.uniform(-1, 1, w.shape) * np.sqrt(6 / sum(w.shape))
    # N workers make the batch N times as large and the steps N times fewer, so each step may be N times as
    # long: the linear scaling rule (Goyal et al. 2017, section 2.1).
    learning_rate = np.float32(options.learning_rate * world_size)

    def loss_and_gradients(x: Floats, y: NDArray[np.uint8]) -> float:
        """Mean cross-entropy of a batch; its gradients go into g1, gb1, g2, gb2."""
        h = np.maximum(x @ w1 + b1, 0)
        z = h @ w2 + b2
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        rows = np.arange(len(y))
        loss = -np.log(p[rows, y] + 1e-30).mean()
        p[rows, y] -= 1  # p is now the gradient with respect to z
        p /= len(y)
        dh = p @ w2.T * (h > 0)
        g2[:], gb2[:] = h.T @ p, p.sum(axis=0)
        g1[:], gb1[:] = x.T @ dh, dh.sum(axis=0)
        return float(loss)

    step, samples, since = 0, 0, time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        order = np.random.default_rng((options.seed, epoch)).permutation(len(images))
        for batch in np.split(order[mine][: steps * options.batch_size], steps):
            loss = loss_and_gradients(images[batch], labels[batch])
            comm.Allreduce(MPI.IN_PLACE, gradients, op=MPI.SUM)
            momentum *= options.momentum
            momentum += gradients / world_size  # the average of all ranks' gradients
            weights -= learning_rate * momentum
            step, samples = step + 1, samples + options.batch_size
            if step == 1:  # its time is that of starting up, so the clock starts after it
                place.report(step=step, loss=loss, epoch=epoch)
                samples, since = 0, time.perf_counter()
            elif step % max(1, steps * options.epochs // 20) == 0:
                speed = samples / (time.perf_counter() - since)
                place.report(step=step, loss=loss, samples_per_second=speed, epoch=epoch)
                samples, since = 0, time.perf_counter()

        paused = time.perf_counter()
        predicted = np.argmax(np.maximum(test_images[mine] @ w1 + b1, 0) @ w2 + b2, axis=1)
        correct = comm.allreduce(np.sum(predicted == test_labels[mine]))
        if rank == 0:
            place.report(step=step, accuracy=correct / len(test_labels), epoch=epoch)
        since += time.perf_counter() - paused  # testing is not training

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        np.savez(here.model_folder / "model.npz", w1=w1, b1=b1, w2=w2, b2=b2)


if __name__ == "__main__":
    main()
