"""Train a small network on handwritten digits with MPI: NumPy, gradients by hand, one Allreduce per step.

The job trains on scikit-learn's digits unless its `data` is `mnist`. NumPy computes on CPUs, so it uses no GPU.

Where the launch names a place for checkpoints, which worker 0 alone has to reach, a job that was killed resumes at its
last one, with the same number of workers. It then reaches the weights of an uninterrupted run, bit by bit, as long as
MPI adds the workers' gradients in the same order as before. The MPI standard recommends that it does; Open MPI chooses
the order by the message's size and by where the workers run.
"""

import argparse
import math
import sys
import time
import zlib
from pathlib import Path

import numpy as np
from mpi4py import MPI
from mpi4py.run import set_abort_status
from numpy.typing import NDArray

from workshop_utils import place
from workshop_utils.training import checkpoints

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of one worker; N take N times it")
    parser.add_argument("--warmup", type=float, default=0.05, help="fraction of all steps in which it rises")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--checkpoint-steps", type=int, default=100, help="between two checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 0 < options.learning_rate < math.inf:
        sys.exit(f"learning-rate is {options.learning_rate}; it must be a finite number above 0")
    for name in ("epochs", "batch_size", "hidden", "checkpoint_steps"):
        if getattr(options, name) < 1:
            sys.exit(f"{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    for name in ("warmup", "momentum"):
        if not 0 <= getattr(options, name) < 1:
            sys.exit(f"{name} is {getattr(options, name)}; it must be at least 0 and less than 1")
    return options


def learning_rate_factor(step: int, total: int, warmup: float, world_size: int) -> float:
    """The factor on one worker's learning rate in a step.

    N workers make the batch N times as large and the steps N times fewer, so each step may be N times as long, once the
    rate has risen to that step by step (Goyal et al. 2017, sections 2.1 and 2.2). It then falls to 0 along half a
    cosine (Loshchilov and Hutter 2017, equation 5).
    """
    rise = min(1.0, step / (warmup * total)) if warmup else 1.0
    return (1 + (world_size - 1) * rise) * 0.5 * (1 + math.cos(math.pi * step / total))


def layers(flat: Floats, pixels: int, hidden: int) -> tuple[Floats, Floats, Floats, Floats]:
    """w1, b1, w2, b2 as views of one flat array, so that a single message carries them all."""
    w1, b1, w2, b2 = np.split(flat, np.cumsum([pixels * hidden, hidden, hidden * 10]))
    return w1.reshape(pixels, hidden), b1, w2.reshape(hidden, 10), b2


def initial_weights(pixels: int, hidden: int, seed: int) -> Floats:
    """All weights in one array, the same on every rank, drawn as Glorot and Bengio (2010, equation 16) do."""
    flat = np.zeros(pixels * hidden + hidden + hidden * 10 + 10, np.float32)
    w1, _, w2, _ = layers(flat, pixels, hidden)
    generator = np.random.default_rng(seed)
    for w in (w1, w2):
        w[:] = generator.uniform(-1, 1, w.shape) * np.sqrt(6 / sum(w.shape))
    return flat


def loss_and_gradients(weights: Floats, gradients: Floats, hidden: int, x: Floats, y: Labels) -> float:
    """Mean cross-entropy of a batch; its gradients are written into `gradients`."""
    w1, b1, w2, b2 = layers(weights, x.shape[1], hidden)
    g1, gb1, g2, gb2 = layers(gradients, x.shape[1], hidden)
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


def restore(folder: Path, weights: Floats, velocity: Floats, settings: checkpoints.Settings) -> int:
    """Fill both arrays from the newest whole checkpoint and return its step; 0 if there is none.

    Rank 0 reads and sends. Bcast sends a buffer as it is; mpi4py's `bcast` would pickle it.
    """
    step = np.zeros(1, np.int64)
    if MPI.COMM_WORLD.Get_rank() == 0:
        try:
            checkpoints.make_folder(folder)  # fails now, not at the first checkpoint
            checkpoint = checkpoints.newest(folder, settings)
        except (OSError, checkpoints.OtherRun) as error:
            sys.exit(f"cannot resume: {error}")
        if checkpoint:
            arrays = checkpoint.arrays
            step[0], weights[:], velocity[:] = checkpoint.step, arrays["weights"], arrays["velocity"]
            print(f"resumed after step {checkpoint.step}")
    for array in (step, weights, velocity):
        MPI.COMM_WORLD.Bcast(array, root=0)
    return int(step[0])


def main() -> None:
    here = place.here()
    options = read_options()
    comm = MPI.COMM_WORLD
    rank, workers = comm.Get_rank(), comm.Get_size()
    if workers != here.world_size:  # MPI does not know torchrun, and would train a model in each process
        sys.exit(
            f"the launcher started {here.world_size} workers, but MPI connects {workers}; start the job with mpirun "
            "(strategy: mpi)"
        )
    images, labels = place.load("train").arrays()
    test_images, test_labels = place.load("test").arrays()
    mine = slice(rank, None, workers)  # every N-th example, to train as to test
    share = len(images) // workers  # equal shares, since every step needs every rank
    steps_per_epoch = share // options.batch_size  # the remainder is dropped; the next epoch shuffles again
    if steps_per_epoch == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {workers} workers has only {share} images")
    if labels.max() > 9:
        sys.exit(f"the data has the label {labels.max()}; the network tells only 0 to 9 apart")
    total = steps_per_epoch * options.epochs

    pixels, hidden = images.shape[1], options.hidden
    weights = initial_weights(pixels, hidden, options.seed)
    w1, b1, w2, b2 = layers(weights, pixels, hidden)
    velocity, gradients = np.zeros_like(weights), np.zeros_like(weights)
    # Resuming with other settings than these would lead to other weights, so it is refused.
    settings = {name.replace("_", "-"): value for name, value in vars(options).items()}
    settings |= {"workers": workers, "images": len(images), "pixels": pixels, "labels": zlib.crc32(labels)}
    del settings["checkpoint-steps"]
    folder = place.checkpoint_folder()
    step = restore(folder, weights, velocity, settings) if folder else 0

    first, samples, since = step + 1, 0, 0.0
    for epoch in range(step // steps_per_epoch, options.epochs):
        order = np.random.default_rng((options.seed, epoch)).permutation(len(images))[mine]
        batches = np.split(order[: steps_per_epoch * options.batch_size], steps_per_epoch)
        for batch in batches[step % steps_per_epoch :]:  # after a restart, only what is left of the epoch
            loss = loss_and_gradients(weights, gradients, hidden, images[batch], labels[batch])
            comm.Allreduce(MPI.IN_PLACE, gradients, op=MPI.SUM)
            velocity *= options.momentum
            velocity += gradients / workers  # the average of all ranks' gradients
            rate = options.learning_rate * learning_rate_factor(step, total, options.warmup, workers)
            weights -= np.float32(rate) * velocity
            step += 1

            samples += options.batch_size
            if step == first:  # its time is that of starting up, so the clock starts after it
                place.report(step, loss=loss, epoch=epoch + 1, device="cpu")
                samples, since = 0, time.perf_counter()
            elif step % max(1, total // 20) == 0:
                speed = samples / (time.perf_counter() - since)
                place.report(step, loss=loss, epoch=epoch + 1, samples_per_second=speed)
            if folder and (step % options.checkpoint_steps == 0 or step == total):
                paused = time.perf_counter()
                if rank == 0:
                    checkpoints.save(folder, step, {"weights": weights, "velocity": velocity}, settings)
                comm.Barrier()  # or the others would count the wait as part of their next step
                since += time.perf_counter() - paused  # saving is not training, nor is testing

        paused = time.perf_counter()
        predicted = np.argmax(np.maximum(test_images[mine] @ w1 + b1, 0) @ w2 + b2, axis=1)
        correct = np.array([np.sum(predicted == test_labels[mine])])
        comm.Allreduce(MPI.IN_PLACE, correct, op=MPI.SUM)
        if rank == 0:
            place.report(step, accuracy=correct[0] / len(test_labels), epoch=epoch + 1)
        since += time.perf_counter() - paused

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        np.savez(here.model_folder / "model.npz", w1=w1, b1=b1, w2=w2, b2=b2)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        set_abort_status(error)  # or this rank would wait in MPI_Finalize for the others, and they for it
        raise
