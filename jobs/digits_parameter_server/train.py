"""Train a small network on handwritten digits with the workshop's own parameter servers, as consistent as you ask.

Servers keep the weights; each worker pulls them, computes a gradient and pushes it. `--consistency` says how far
workers may drift apart; `--slow-worker` makes one of them a straggler.
"""

import argparse
import sys
import time

import numpy as np
from numpy.typing import NDArray

from workshop_utils import place
from workshop_utils.comm import parameter_server, tcp
from workshop_utils.comm.activity import Activity
from workshop_utils.comm.parameter_server import Arrangement

Floats = NDArray[np.float32]


def layers(flat: Floats, pixels: int, hidden: int) -> tuple[Floats, Floats, Floats, Floats]:
    """w1, b1, w2, b2 as views of one flat array, which servers cut into parts as they like."""
    w1, b1, w2, b2 = np.split(flat, np.cumsum([pixels * hidden, hidden, hidden * 10]))
    return w1.reshape(pixels, hidden), b1, w2.reshape(hidden, 10), b2


def loss_and_gradient(weights: Floats, x: Floats, y: NDArray[np.uint8], hidden: int) -> tuple[float, Floats]:
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


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    consistencies = ["synchronous", "stale_synchronous", "asynchronous"]
    parser.add_argument("--consistency", choices=consistencies, default="synchronous")
    parser.add_argument(
        "--bound", type=int, default=0, help="steps that a worker may be ahead (stale_synchronous)"
    )
    parser.add_argument(
        "--backup-workers", type=int, default=0, help="gradients not waited for (synchronous)"
    )
    parser.add_argument("--compute-seconds", type=float, default=0.0, help="added to each gradient")
    parser.add_argument("--slow-worker", type=int, default=-1, help="this worker takes longer")
    parser.add_argument("--slow-seconds", type=float, default=0.02, help="by so much a step")
    parser.add_argument("--log-pushes", type=int, default=0, help="1: the first server reports each push")
    options = parser.parse_args()

    images, labels = place.load("train").arrays()
    test_images, test_labels = place.load("test").arrays()
    workers, worker = here.world_size - here.servers, here.index
    share = len(images) // workers
    steps = share // options.batch_size
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {workers} workers has only {share} images")
    arrangement = Arrangement(
        here.servers,
        workers,
        steps * options.epochs,
        options.consistency,
        options.bound,
        options.backup_workers,
    )
    communicator = tcp.connect(*place.rendezvous())

    pixels, hidden = images.shape[1], options.hidden
    weights = np.zeros(pixels * hidden + hidden + hidden * 10 + 10, np.float32)
    w1, b1, w2, b2 = layers(weights, pixels, hidden)
    random = np.random.default_rng(options.seed)  # the same seed gives every rank the same weights
    for w in (w1, w2):
        w[:] = random.uniform(-1, 1, w.shape) * np.sqrt(6 / sum(w.shape))
    # One mean of N gradients takes N times the step (Goyal et al. 2017); N gradients by themselves take N steps.
    factor = workers if options.consistency == "synchronous" else 1
    learning_rate = np.float32(options.learning_rate * factor)
    started = time.perf_counter()

    activity = Activity(communicator)

    def gradient_of(current: Floats, step: int) -> Floats:
        activity.computes()
        epoch, batch = divmod(step, steps)
        # The same order as in digits_ring, so that synchronous servers give the same weights as the ring.
        order = np.random.default_rng((options.seed, epoch + 1)).permutation(len(images))[worker::workers]
        chosen = order[batch * options.batch_size : (batch + 1) * options.batch_size]
        loss, gradient = loss_and_gradient(current, images[chosen], labels[chosen], hidden)
        time.sleep(options.compute_seconds + (options.slow_seconds if worker == options.slow_worker else 0))
        if step and step % max(1, arrangement.steps // 20) == 0:
            speed = step * options.batch_size / (time.perf_counter() - started)
            rest = {"bytes_sent": int(communicator.traffic.bytes_sent.sum()), "epoch": epoch + 1}
            place.report(step=step, loss=loss, samples_per_second=speed, **rest, **activity.seconds())
        activity.communicates()
        return gradient

    def update(part: Floats, gradient: Floats) -> None:
        activity.computes()
        part -= learning_rate * gradient
        activity.communicates()

    activity.communicates()
    log = parameter_server.train(communicator, arrangement, weights, gradient_of, update)
    if log is not None:
        if options.log_pushes and here.rank == 0:
            entries = zip(log.worker, log.seconds, log.staleness, log.dropped, strict=True)
            for push, (rank, seconds, staleness, dropped) in enumerate(entries):
                pusher, came = rank - here.servers, seconds - log.seconds[0]
                place.report(push, pusher=pusher, push_seconds=came, staleness=staleness, late=dropped)
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
        predicted = np.argmax(np.maximum(test_images @ w1 + b1, 0) @ w2 + b2, axis=1)
        place.report(step=arrangement.steps, accuracy=float(np.mean(predicted == test_labels)))
        here.model_folder.mkdir(parents=True, exist_ok=True)
        np.savez(here.model_folder / "model.npz", w1=w1, b1=b1, w2=w2, b2=b2)
    communicator.barrier()
    communicator.close()


if __name__ == "__main__":
    main()
