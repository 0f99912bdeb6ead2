"""What old gradients do to training: one parameter server, and workers that do not wait for each other.

Trains one network for each learning rate and seed, side by side, so that all of them see the very same staleness. All
workers together make `--updates` pushes. The server reports each network's `loss` at the end, over all training
images, with the mean and the largest staleness.
"""

import argparse
import sys
import time

import numpy as np

from workshop_utils import place
from workshop_utils.comm import parameter_server, tcp
from workshop_utils.comm.parameter_server import Arrangement
from workshop_utils.parallel.ensemble import Ensemble, Floats


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    consistencies = ["synchronous", "stale_synchronous", "asynchronous"]
    parser.add_argument("--consistency", choices=consistencies, default="asynchronous")
    parser.add_argument(
        "--bound", type=int, default=0, help="steps that a worker may be ahead (stale_synchronous)"
    )
    parser.add_argument("--updates", type=int, default=320, help="gradients of all workers together")
    parser.add_argument("--batch-size", type=int, default=16, help="images for a gradient")
    parser.add_argument("--learning-rates", default="0.1", help="one or several, with commas between")
    parser.add_argument("--hidden", type=int, default=32, help="units in the hidden layer")
    parser.add_argument("--seeds", type=int, default=3, help="networks for each learning rate")
    parser.add_argument("--compute-seconds", type=float, default=0.004, help="added to each gradient")
    parser.add_argument("--jitter", type=float, default=0.3, help="by how much these vary")
    parser.add_argument("--slow-worker", type=int, default=-1, help="this worker takes longer")
    parser.add_argument("--slow-seconds", type=float, default=0.02, help="by so much a gradient")
    return parser.parse_args()


def main() -> None:
    arguments, here = options(), place.here()
    workers, worker = here.world_size - here.servers, here.index
    try:
        rates = [float(rate) for rate in arguments.learning_rates.split(",")]
    except ValueError:
        sys.exit(f"learning-rates is {arguments.learning_rates!r}; it must be numbers such as 0.1,0.2")
    if here.servers != 1:
        sys.exit(f"there are {here.servers} parameter servers; this job has one, which tests what it holds")
    steps = arguments.updates // workers
    if steps < 1:
        sys.exit(f"updates is {arguments.updates}; each of {workers} workers must make at least one")
    arrangement = Arrangement(1, workers, steps, arguments.consistency, arguments.bound)
    images, labels = place.load("train").arrays()
    if not 1 <= arguments.batch_size <= len(images) // workers:
        sys.exit(f"batch-size is {arguments.batch_size}; a worker has {len(images) // workers} images")
    communicator = tcp.connect(*place.rendezvous())
    np.seterr(over="ignore", invalid="ignore")  # a network that diverges is a result here, not a mistake

    seeds = list(range(arguments.seeds))
    ensemble = Ensemble(seeds * len(rates), images.shape[1], arguments.hidden)
    weights = ensemble.initialise()
    gradients = np.empty_like(weights)
    rate_of_each = np.repeat(np.array(rates, np.float32), len(seeds) * ensemble.parameters)
    serves = communicator.rank == 0
    shard = np.arange(len(images))[0 if serves else worker :: workers]
    batches = ensemble.batches(shard, arguments.batch_size, steps)
    spread = np.random.default_rng(0).standard_normal((workers, steps))
    waits = arguments.compute_seconds * np.exp(arguments.jitter * spread)
    extra = arguments.slow_seconds if worker == arguments.slow_worker else 0.0

    def gradient_of(flat: Floats, step: int) -> Floats:
        batch = next(batches)
        ensemble.loss_and_gradients(flat.reshape(weights.shape), images[batch], labels[batch], gradients)
        time.sleep(float(waits[worker, step]) + extra)
        return gradients.reshape(-1)

    def update(flat: Floats, gradient: Floats) -> None:
        flat -= rate_of_each * gradient

    log = parameter_server.train(communicator, arrangement, weights.reshape(-1), gradient_of, update)
    if log is not None:
        losses, _ = ensemble.loss_and_accuracy(weights, images, labels)
        _, accuracies = ensemble.loss_and_accuracy(weights, *place.load("test").arrays())
        staleness = {"staleness_mean": float(np.mean(log.staleness)), "staleness_max": max(log.staleness)}
        for network, seed in enumerate(ensemble.seeds):
            of_network = {"loss": float(losses[network]), "accuracy": float(accuracies[network])}
            rate = rates[network // len(seeds)]
            place.report(log.version, seed=seed, learning_rate=rate, **of_network, **staleness)
        here.model_folder.mkdir(parents=True, exist_ok=True)
        np.savez(here.model_folder / "model.npz", weights=weights)
    communicator.barrier()
    communicator.close()


if __name__ == "__main__":
    main()
