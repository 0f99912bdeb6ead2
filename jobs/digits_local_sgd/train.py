"""Talk seldom: each worker takes some steps by itself, then all meet in the mean of where they have come to.

`--outer average` is local SGD (Stich 2019). `--outer nesterov` takes the way that the workers have gone, on average, as
if it were a gradient, and an outer optimizer with momentum steps along it; with `--inner adamw` that is DiLoCo
(Douillard et al. 2023, algorithm 1). `--shards sorted` gives each worker other digits than its fellows.
"""

import argparse
import sys

import numpy as np

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel.ensemble import Ensemble, Floats

BETAS, WEIGHT_DECAY = (0.9, 0.99), 1e-4  # of AdamW
REPORTS = 16


class Inner:
    """A worker's own optimizer: plain SGD, or AdamW (Loshchilov and Hutter 2019), whose moments stay at home."""

    def __init__(self, kind: str, learning_rate: float, weights: Floats) -> None:
        self._kind, self._learning_rate = kind, np.float32(learning_rate)
        self._mean, self._square, self._steps = np.zeros_like(weights), np.zeros_like(weights), 0

    def step(self, weights: Floats, gradients: Floats) -> None:
        """Change `weights` in place."""
        if self._kind == "sgd":
            weights -= self._learning_rate * gradients
            return
        self._steps += 1
        for moment, value, beta in (
            (self._mean, gradients, BETAS[0]),
            (self._square, gradients**2, BETAS[1]),
        ):
            moment += np.float32(1 - beta) * (value - moment)
        mean = self._mean / (1 - BETAS[0] ** self._steps)
        root = np.sqrt(self._square / (1 - BETAS[1] ** self._steps)) + 1e-8
        weights -= self._learning_rate * (mean / root + WEIGHT_DECAY * weights)


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--local-steps", type=int, default=16, help="steps between two meetings; 1: always meet"
    )
    parser.add_argument("--steps", type=int, default=256, help="of each worker, in all")
    parser.add_argument("--batch-size", type=int, default=8, help="images a worker takes in one step")
    parser.add_argument("--inner", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="of the inner optimizer")
    parser.add_argument("--outer", choices=["average", "nesterov"], default="average")
    parser.add_argument("--outer-learning-rate", type=float, default=0.7, help="of nesterov")
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="of nesterov")
    parser.add_argument("--shards", choices=["shuffled", "sorted"], default="shuffled")
    parser.add_argument("--hidden", type=int, default=32, help="units in the hidden layer")
    parser.add_argument("--seeds", type=int, default=3, help="networks that are trained side by side")
    options = parser.parse_args()
    if options.local_steps < 1 or options.steps % options.local_steps:
        sys.exit(f"local-steps is {options.local_steps}; it must divide the {options.steps} steps")
    images, labels = place.load("train").arrays()
    fewest = len(images) // here.world_size
    if not 1 <= options.batch_size <= fewest:
        sys.exit(
            f"batch-size is {options.batch_size}; it must be 1 to {fewest}, the images that a worker has"
        )
    communicator = tcp.connect(*place.rendezvous())
    np.seterr(over="ignore", invalid="ignore")  # a network that diverges is a result here, not a mistake
    rank, size = communicator.rank, communicator.size
    if options.shards == "sorted":
        shard = np.array_split(np.argsort(labels, kind="stable"), size)[rank]
    else:
        shard = np.arange(len(images))[rank::size]

    ensemble = Ensemble(range(options.seeds), images.shape[1], options.hidden)
    shared = ensemble.initialise()  # where all met last
    weights, gradients = shared.copy(), np.empty_like(shared)
    momentum = np.zeros_like(shared)  # of the outer optimizer, which all ranks have and which stays equal
    rate, decay = np.float32(options.outer_learning_rate), np.float32(options.outer_momentum)
    inner = Inner(options.inner, options.learning_rate, weights)

    meetings, reported = 0, 0
    for step, batch in enumerate(ensemble.batches(shard, options.batch_size, options.steps), 1):
        ensemble.loss_and_gradients(weights, images[batch], labels[batch], gradients)
        inner.step(weights, gradients)
        if step % options.local_steps:
            continue
        way = shared - weights
        ring_all_reduce(communicator, way.reshape(-1), "mean")
        if options.outer == "nesterov":
            momentum = decay * momentum + way
            way = rate * (way + decay * momentum)
        shared = shared - way
        weights = shared.copy()
        meetings += 1
        due = step >= reported + options.steps // REPORTS or step == options.steps
        if rank == 0 and due:
            reported = step
            # Rank 0 looks alone, so that nothing is sent that training does not need.
            losses, _ = ensemble.loss_and_accuracy(shared, images, labels)
            sent = int(communicator.traffic.bytes_sent.sum()) // options.seeds  # of one network's training
            for seed, loss in enumerate(losses):
                place.report(step, seed=seed, loss=loss, bytes_sent=sent, meetings=meetings)

    if rank == 0:
        _, accuracies = ensemble.loss_and_accuracy(shared, *place.load("test").arrays())
        for seed, accuracy in enumerate(accuracies):
            place.report(options.steps, seed=seed, accuracy=accuracy, meetings=meetings)
        here.model_folder.mkdir(parents=True, exist_ok=True)
        np.savez(here.model_folder / "model.npz", weights=shared)
    communicator.barrier()
    communicator.close()


if __name__ == "__main__":
    main()
