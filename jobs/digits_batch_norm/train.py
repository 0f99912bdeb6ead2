"""Batch normalisation in data parallelism: whose examples make the mean and the variance?

`--statistics local` has each worker look at its own part of the batch, as frameworks do by default;
`synchronised` at the whole batch; `none` leaves the layer out. The batch is that of all workers together, and the same
in every case. `--cut sorted` gives its low digits to the first worker and its high ones to the last. In float64, so
that synchronised training equals that of one process to rounding. Every rank reports `accuracy` with the statistics
that it has itself collected.
"""

import argparse
import sys

import numpy as np

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel.batch_norm import BatchNorm
from workshop_utils.parallel.ensemble import Ensemble, Floats, Labels, cross_entropy


def loss_and_gradients(
    ensemble: Ensemble, norm: BatchNorm | None, weights: Floats, x: Floats, y: Labels, gradients: Floats
) -> Floats:
    """As `Ensemble.loss_and_gradients`, with `norm` between the hidden layer's weights and its bias."""
    w1, b1, w2, b2 = ensemble.layers(weights)
    g1, gb1, g2, gb2 = ensemble.layers(gradients)
    values = x @ w1
    hidden = np.maximum((norm.forward(values) if norm else values) + b1, 0)
    losses, by_logits = cross_entropy(hidden @ w2 + b2, y)
    g2[:], gb2[:] = hidden.transpose(0, 2, 1) @ by_logits, by_logits.sum(axis=1, keepdims=True)
    by_hidden = by_logits @ w2.transpose(0, 2, 1) * (hidden > 0)
    gb1[:] = by_hidden.sum(axis=1, keepdims=True)
    g1[:] = x.transpose(0, 2, 1) @ (norm.backward(by_hidden) if norm else by_hidden)
    return losses


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--statistics", choices=["local", "synchronised", "none"], default="local")
    parser.add_argument("--batch-size", type=int, default=8, help="images of all workers together in a step")
    parser.add_argument("--cut", choices=["shuffled", "sorted"], default="shuffled")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--hidden", type=int, default=32, help="units in the hidden layer")
    parser.add_argument("--seeds", type=int, default=3, help="networks that are trained side by side")
    options = parser.parse_args()
    if options.batch_size < 1 or options.batch_size % here.world_size:
        sys.exit(
            f"batch-size is {options.batch_size}; it must be a multiple of the {here.world_size} workers, "
            "for all parts must be equal"
        )
    images, labels = place.load("train").arrays()
    if options.batch_size > len(images):
        sys.exit(f"batch-size is {options.batch_size}; there are only {len(images)} images")
    communicator = tcp.connect(*place.rendezvous())
    rank, size = communicator.rank, communicator.size

    ensemble = Ensemble(range(options.seeds), images.shape[1], options.hidden)
    weights = ensemble.initialise(np.float64)
    gradients = np.empty_like(weights)
    together = communicator if options.statistics == "synchronised" else None
    norm = BatchNorm(options.seeds, options.hidden, together) if options.statistics != "none" else None

    for step, batch in enumerate(
        ensemble.batches(np.arange(len(images)), options.batch_size, options.steps), 1
    ):
        if options.cut == "sorted":
            batch = np.take_along_axis(batch, np.argsort(labels[batch], axis=1, kind="stable"), axis=1)
            mine = np.split(batch, size, axis=1)[rank]
        else:
            mine = batch[:, rank::size]
        x = images[mine].astype(np.float64)
        losses = loss_and_gradients(ensemble, norm, weights, x, labels[mine], gradients)
        ring_all_reduce(communicator, gradients.reshape(-1), "mean")
        weights -= options.learning_rate * gradients
        if step % max(1, options.steps // 8) == 0:
            place.report(step, loss=float(losses.mean()))

    test_images, test_labels = place.load("test").arrays()
    w1, b1, w2, b2 = ensemble.layers(weights)
    values = test_images.astype(np.float64) @ w1
    logits = np.maximum((norm.test(values) if norm else values) + b1, 0) @ w2 + b2
    sent = int(communicator.traffic.bytes_sent.sum())
    for seed, accuracy in enumerate((logits.argmax(axis=2) == test_labels).mean(axis=1)):
        place.report(options.steps, seed=seed, accuracy=accuracy, bytes_sent=sent)
    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        running = np.stack([norm.running_mean, norm.running_variance]) if norm else np.empty(0)
        np.savez(here.model_folder / "model.npz", weights=weights, running=running)
    communicator.barrier()
    communicator.close()


if __name__ == "__main__":
    main()
