"""Train a small network on handwritten digits in NumPy, with gradients by hand: nothing is left to a framework.

Its workers meet in one of three ways:

- in a ring (`job.yaml`): one ring all-reduce a step carries all gradients in one array;
- by MPI (`mpi.yaml`): MPI's Allreduce does the same;
- at parameter servers (`parameter_server.yaml`), which keep the weights: each worker pulls them, computes a gradient
  and pushes it. `--consistency` says how far workers may drift apart; `--slow-worker` makes one of them a straggler.
"""

import argparse
import functools
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workshop_utils import place
from workshop_utils.comm import parameter_server, tcp
from workshop_utils.comm.activity import Activity
from workshop_utils.comm.ring import ring_all_reduce

Floats = NDArray[np.float32]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of one worker")
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all-reduce", choices=["ring", "mpi"], default="ring")
    servers = parser.add_argument_group("with parameter servers")
    consistencies = ["synchronous", "stale_synchronous", "asynchronous"]
    servers.add_argument("--consistency", choices=consistencies, default="synchronous")
    servers.add_argument(
        "--bound", type=int, default=0, help="steps a worker may be ahead (stale_synchronous)"
    )
    servers.add_argument(
        "--backup-workers", type=int, default=0, help="gradients not waited for (synchronous)"
    )
    servers.add_argument("--slow-worker", type=int, default=-1, help="this worker takes longer")
    servers.add_argument("--slow-seconds", type=float, default=0.02, help="by so much a step")
    options = parser.parse_args()
    for name in ("epochs", "batch_size", "hidden"):
        if getattr(options, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    return options


# The network: two dense layers, with all weights in one flat array, so that one message carries them.


def layers(flat: Floats, pixels: int, hidden: int) -> tuple[Floats, Floats, Floats, Floats]:
    """w1, b1, w2, b2 as views of one flat array."""
    w1, b1, w2, b2 = np.split(flat, np.cumsum([pixels * hidden, hidden, hidden * 10]))
    return w1.reshape(pixels, hidden), b1, w2.reshape(hidden, 10), b2


def initial_weights(pixels: int, hidden: int, seed: int) -> Floats:
    """The same on every rank, drawn as Glorot and Bengio (2010, equation 16) do."""
    flat = np.zeros(pixels * hidden + hidden + hidden * 10 + 10, np.float32)
    w1, _, w2, _ = layers(flat, pixels, hidden)
    random = np.random.default_rng(seed)
    for w in (w1, w2):
        w[:] = random.uniform(-1, 1, w.shape) * np.sqrt(6 / sum(w.shape))
    return flat


def loss_and_gradient(weights: Floats, x: Floats, y: NDArray[np.int64], hidden: int) -> tuple[float, Floats]:
    """Mean cross-entropy of a batch, and its gradient in the layout of `weights`."""
    gradient = np.empty_like(weights)
    w1, b1, w2, b2 = layers(weights, x.shape[1], hidden)
    g1, gb1, g2, gb2 = layers(gradient, x.shape[1], hidden)
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
    return float(loss), gradient


def correct(weights: Floats, images: Floats, labels: NDArray[np.int64], hidden: int) -> int:
    """How many images the network tells right."""
    w1, b1, w2, b2 = layers(weights, images.shape[1], hidden)
    predicted = np.argmax(np.maximum(images @ w1 + b1, 0) @ w2 + b2, axis=1)
    return int(np.sum(predicted == labels))


class Share:
    """What a worker trains on: each epoch all shuffle alike, and each takes every N-th example."""

    def __init__(self, worker: int, workers: int, options: argparse.Namespace) -> None:
        self.images, self.labels = place.load("train").arrays()
        self.mine, self.batch_size, self.seed = slice(worker, None, workers), options.batch_size, options.seed
        share = len(self.images) // workers  # equal shares, since every step needs every worker
        self.steps = share // self.batch_size  # of an epoch; the rest waits for the next shuffle
        if self.steps == 0:
            sys.exit(f"batch-size is {self.batch_size}; each of {workers} workers has only {share} images")
        self.order = functools.lru_cache(1)(self._order)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, epoch + 1)).permutation(len(self.images))[self.mine]

    def batch(self, step: int) -> tuple[Floats, NDArray[np.int64]]:
        """The images and labels of a step, counted from 0 and over all epochs."""
        epoch, position = divmod(step, self.steps)
        rows = self.order(epoch)[position * self.batch_size : (position + 1) * self.batch_size]
        return self.images[rows], self.labels[rows]


# How workers meet


class Ring:
    """The workshop's own ring all-reduce, whose time and bytes are counted."""

    def __init__(self) -> None:
        self.communicator = tcp.connect(*place.rendezvous())
        self.activity = Activity(self.communicator)

    def all_reduce(self, array: NDArray[Any]) -> None:
        """Replace `array` with the sum of all ranks' arrays."""
        self.activity.communicates()
        ring_all_reduce(self.communicator, array, "sum")
        self.activity.computes()

    def measured(self) -> dict[str, float]:
        sent = int(self.communicator.traffic.bytes_sent.sum())
        return {"bytes_sent": sent, **self.activity.seconds()}

    def close(self) -> None:
        self.communicator.barrier()  # so that nobody closes a link that another still reads from
        self.communicator.close()


class Mpi:
    """MPI's Allreduce: one line, and the library chooses the algorithm."""

    def __init__(self, workers: int) -> None:
        from mpi4py import MPI  # which starts MPI, so a ring must not import it

        self.mpi, self.communicator = MPI, MPI.COMM_WORLD
        if self.communicator.Get_size() != workers:  # MPI does not know torchrun: it would train many models
            sys.exit(
                f"the launcher started {workers} workers, but MPI connects {self.communicator.Get_size()}; start the "
                "job with mpirun (strategy: mpi)"
            )

    def all_reduce(self, array: NDArray[Any]) -> None:
        """Replace `array` with the sum of all ranks' arrays."""
        self.communicator.Allreduce(self.mpi.IN_PLACE, array, op=self.mpi.SUM)

    def measured(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.communicator.Barrier()


def train_by_all_reduce(here: place.Place, options: argparse.Namespace) -> None:
    rank, workers, hidden = here.rank or 0, here.world_size, options.hidden
    meeting = Mpi(workers) if options.all_reduce == "mpi" else Ring()
    share = Share(rank, workers, options)
    weights = initial_weights(share.images.shape[1], hidden, options.seed)
    last, since, samples = share.steps * options.epochs, time.perf_counter(), 0
    for step in range(last):
        loss, gradient = loss_and_gradient(weights, *share.batch(step), hidden)
        meeting.all_reduce(gradient)
        # The mean of N gradients takes N times the step of one (Goyal et al. 2017): so does their sum.
        weights -= np.float32(options.learning_rate) * gradient
        samples += options.batch_size
        if step == 0 or (step + 1) % max(1, last // 20) == 0:
            # The first step's time is that of starting up.
            speed = {"samples_per_second": samples / (time.perf_counter() - since)} if step else {}
            place.report(step + 1, loss=loss, epoch=step // share.steps + 1, **speed, **meeting.measured())
            samples, since = 0, time.perf_counter()

    images, labels = place.load("test").arrays()
    right = np.array([correct(weights, images[share.mine], labels[share.mine], hidden)], np.int64)
    meeting.all_reduce(right)
    if rank == 0:
        place.report(last, accuracy=int(right[0]) / len(labels), epoch=options.epochs)
        save(weights, here, images.shape[1], hidden)
    meeting.close()


def train_by_servers(here: place.Place, options: argparse.Namespace) -> None:
    workers, worker, hidden = here.world_size - here.servers, here.index, options.hidden
    share = Share(worker, workers, options)
    arrangement = parameter_server.Arrangement(
        here.servers,
        workers,
        share.steps * options.epochs,
        options.consistency,
        options.bound,
        options.backup_workers,
    )
    communicator = tcp.connect(*place.rendezvous())
    activity = Activity(communicator)
    weights = initial_weights(share.images.shape[1], hidden, options.seed)
    # One mean of N gradients takes N times the step (Goyal et al. 2017); N gradients by themselves take N steps.
    factor = workers if options.consistency == "synchronous" else 1
    learning_rate, started = np.float32(options.learning_rate * factor), time.perf_counter()

    def gradient_of(current: Floats, step: int) -> Floats:
        activity.computes()
        loss, gradient = loss_and_gradient(current, *share.batch(step), hidden)
        time.sleep(options.slow_seconds if worker == options.slow_worker else 0)
        if step and step % max(1, arrangement.steps // 20) == 0:
            speed = step * options.batch_size / (time.perf_counter() - started)
            rest = {
                "bytes_sent": int(communicator.traffic.bytes_sent.sum()),
                "epoch": step // share.steps + 1,
            }
            place.report(step=step, loss=loss, samples_per_second=speed, **rest, **activity.seconds())
        activity.communicates()
        return gradient

    def update(part: Floats, gradient: Floats) -> None:
        activity.computes()
        part -= learning_rate * gradient
        activity.communicates()

    activity.communicates()
    log = parameter_server.train(communicator, arrangement, weights, gradient_of, update)
    if log is not None:  # this is a server
        applied = [
            staleness for staleness, dropped in zip(log.staleness, log.dropped, strict=True) if not dropped
        ]
        place.report(
            step=log.version,
            staleness_mean=float(np.mean(applied)),
            staleness_max=max(applied),
            dropped=sum(log.dropped),
            bytes_received=int(communicator.traffic.bytes_received.sum()),
            bytes_sent=int(communicator.traffic.bytes_sent.sum()),
            **activity.seconds(),
        )
    elif worker == 0:
        images, labels = place.load("test").arrays()
        accuracy = correct(weights, images, labels, hidden) / len(labels)
        place.report(step=arrangement.steps, accuracy=accuracy)
        save(weights, here, images.shape[1], hidden)
    communicator.barrier()
    communicator.close()


def save(weights: Floats, here: place.Place, pixels: int, hidden: int) -> None:
    here.model_folder.mkdir(parents=True, exist_ok=True)
    arrays = dict(zip(("w1", "b1", "w2", "b2"), layers(weights, pixels, hidden), strict=True))
    np.savez(here.model_folder / "model.npz", allow_pickle=False, **arrays)


def main() -> None:
    here, options = place.here(), read_options()
    if here.servers:
        train_by_servers(here, options)
    else:
        train_by_all_reduce(here, options)


if __name__ == "__main__":
    main()
