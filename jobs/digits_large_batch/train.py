"""Synchronous data parallelism with any batch: the sum or the mean of gradients, any learning rate, a warm-up.

Trains one network for each learning rate and seed, side by side. The batch is cut between the workers, so the same
batch gives the same training with any number of them, up to rounding. Rank 0 reports `loss`, the mean over all
training images, of each network now and then, and its `accuracy` at the end.
"""

import argparse
import sys

import numpy as np

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel.ensemble import Ensemble, Floats, Labels

BETWEEN_EVALUATIONS = 1.1  # the next evaluation comes after so many times the steps


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--batch-size", type=int, default=32, help="images of all workers together in a step")
    parser.add_argument("--learning-rates", default="0.1", help="one or several, with commas between")
    parser.add_argument(
        "--reduction", choices=["mean", "sum"], default="mean", help="of the workers' gradients"
    )
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps until the learning rate is full")
    parser.add_argument("--first-learning-rate", type=float, default=0.1, help="where the warm-up begins")
    parser.add_argument("--initial-scale", type=float, default=1.0, help="times the usual initial weights")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--target-loss", type=float, default=0.0, help="end once all seeds of one rate are there"
    )
    parser.add_argument("--hidden", type=int, default=32, help="units in the hidden layer")
    parser.add_argument("--seeds", type=int, default=3, help="networks for each learning rate")
    return parser.parse_args()


def evaluate(
    communicator: Communicator, ensemble: Ensemble, weights: Floats, x: Floats, y: Labels
) -> tuple[Floats, Floats]:
    """Each network's mean loss and accuracy on all of `x` and `y`; every rank looks at its share."""
    mine = slice(communicator.rank, None, communicator.size)
    sums = np.stack(ensemble.loss_and_accuracy(weights, x[mine], y[mine])) * len(y[mine])
    ring_all_reduce(communicator, sums.reshape(-1), "sum")
    losses, accuracies = sums / len(y)
    return losses, accuracies


def main() -> None:
    arguments, here = options(), place.here()
    try:
        rates = [float(rate) for rate in arguments.learning_rates.split(",")]
    except ValueError:
        sys.exit(f"learning-rates is {arguments.learning_rates!r}; it must be numbers such as 0.1,0.2")
    if arguments.batch_size < 1 or arguments.batch_size % here.world_size:
        sys.exit(
            f"batch-size is {arguments.batch_size}; it must be a multiple of the {here.world_size} workers, "
            "for a mean of means is the batch's mean only if all parts are equal"
        )
    images, labels = place.load("train").arrays()
    if arguments.batch_size > len(images):
        sys.exit(f"batch-size is {arguments.batch_size}; there are only {len(images)} images")
    communicator = tcp.connect(*place.rendezvous())
    np.seterr(over="ignore", invalid="ignore")  # a network that diverges is a result here, not a mistake
    rank, size = communicator.rank, communicator.size

    seeds = list(range(arguments.seeds))
    ensemble = Ensemble(seeds * len(rates), images.shape[1], arguments.hidden)
    weights = ensemble.initialise() * np.float32(arguments.initial_scale)
    gradients = np.empty_like(weights)
    full = np.repeat(np.array(rates, np.float32), len(seeds))[:, None]  # each network's learning rate
    first = np.minimum(full, np.float32(arguments.first_learning_rate))

    def report(step: int, losses: Floats, **more: Floats) -> None:
        for network, seed in enumerate(ensemble.seeds if rank == 0 else ()):
            values = {name: float(value[network]) for name, value in more.items()}
            place.report(
                step,
                seed=seed,
                learning_rate=rates[network // len(seeds)],
                loss=float(losses[network]),
                **values,
            )

    steps = max(1, arguments.epochs * len(images) // arguments.batch_size)
    step, evaluated = 0, 0
    for batch in ensemble.batches(np.arange(len(images)), arguments.batch_size, steps):
        mine = batch[:, rank::size]
        ensemble.loss_and_gradients(weights, images[mine], labels[mine], gradients)
        ring_all_reduce(communicator, gradients.reshape(-1), arguments.reduction)
        warm = min(1.0, step / arguments.warmup_steps) if arguments.warmup_steps else 1.0
        weights -= (first + np.float32(warm) * (full - first)) * gradients
        step += 1
        if step < BETWEEN_EVALUATIONS * evaluated:
            continue
        losses, _ = evaluate(communicator, ensemble, weights, images, labels)
        report(step, losses)
        evaluated = step
        if (losses.reshape(len(rates), -1) <= arguments.target_loss).all(axis=1).any():
            break

    losses, _ = evaluate(communicator, ensemble, weights, images, labels)
    _, accuracies = evaluate(communicator, ensemble, weights, *place.load("test").arrays())
    report(step, losses, accuracy=accuracies)
    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        np.savez(here.model_folder / "model.npz", weights=weights)
    communicator.barrier()  # so that nobody closes a link that another still reads from
    communicator.close()


if __name__ == "__main__":
    main()
