"""Several small networks trained side by side in NumPy: claims about convergence need a mean and a spread.

    ensemble = Ensemble(seeds=[0, 1, 2], inputs=64, hidden=32)
    weights = ensemble.initialise()                                # shape (3, parameters)
    losses = ensemble.loss_and_gradients(weights, images, labels, gradients)
    ring_all_reduce(communicator, gradients, "mean")               # one for all of them
    weights -= learning_rates * gradients

Each network has its own seed, hence its own weights to begin with and its own order of the data. They never meet; only
their gradients travel together, in one array, so that ten trainings cost the messages of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]


class Ensemble:
    """One network for each of `seeds`: a hidden layer of rectified units, and class logits.

    Arrays have the networks as their first axis. All weights of a network are one row, so that they travel at once.

    Args:
        seeds: of the networks; the same one may come several times, to be trained in different ways.
        inputs: numbers in an example.
        hidden: units in the hidden layer.
        classes: how many there are.

    Raises:
        ValueError: if there is no seed, or a size is below 1.
    """

    def __init__(self, seeds: Sequence[int], inputs: int, hidden: int, classes: int = 10) -> None:
        if not len(seeds):
            raise ValueError("there are no seeds; each network needs one")
        for name, value in (("inputs", inputs), ("hidden", hidden), ("classes", classes)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.seeds = tuple(seeds)
        self._shapes = ((inputs, hidden), (1, hidden), (hidden, classes), (1, classes))

    @property
    def parameters(self) -> int:
        """How many numbers each network has to train."""
        return sum(rows * columns for rows, columns in self._shapes)

    def layers(self, flat: Floats) -> list[Floats]:
        """Hidden weights and bias, output weights and bias: views of `flat`, each (networks, rows, columns)."""
        ends = np.cumsum([rows * columns for rows, columns in self._shapes])
        parts = np.split(flat, ends[:-1], axis=1)
        return [part.reshape(-1, *shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def initialise(self, dtype: type[np.floating] = np.float32) -> Floats:
        """Weights of shape (networks, parameters), the same on every rank.

        Uniform in ±√(6 / (rows + columns)) (Glorot and Bengio 2010, eq. 16), and no bias.
        """
        weights = np.zeros((len(self.seeds), self.parameters), dtype)
        for row, seed in zip(weights, self.seeds, strict=True):
            random = np.random.default_rng(seed)
            w1, _, w2, _ = self.layers(row[None])
            for layer in (w1, w2):
                layer[:] = random.uniform(-1, 1, layer.shape) * np.sqrt(6 / sum(layer.shape[1:]))
        return weights

    def loss_and_gradients(self, weights: Floats, x: Floats, y: Labels, gradients: Floats) -> Floats:
        """Each network's mean cross-entropy (nats) over its batch; the gradients go into `gradients`.

        Args:
            weights: of shape (networks, parameters); so has `gradients`.
            x: examples, shape (networks, batch, inputs).
            y: their labels, shape (networks, batch).
        """
        w1, b1, w2, b2 = self.layers(weights)
        g1, gb1, g2, gb2 = self.layers(gradients)
        hidden = np.maximum(x @ w1 + b1, 0)
        losses, by_logits = cross_entropy(hidden @ w2 + b2, y)
        by_hidden = by_logits @ w2.transpose(0, 2, 1) * (hidden > 0)
        g2[:], gb2[:] = hidden.transpose(0, 2, 1) @ by_logits, by_logits.sum(axis=1, keepdims=True)
        g1[:], gb1[:] = x.transpose(0, 2, 1) @ by_hidden, by_hidden.sum(axis=1, keepdims=True)
        return losses

    def loss_and_accuracy(self, weights: Floats, x: Floats, y: Labels) -> tuple[Floats, Floats]:
        """Each network's mean loss (nats) and its share of right answers on `x` (examples, inputs) and `y`."""
        w1, b1, w2, b2 = self.layers(weights)
        logits = np.maximum(x @ w1 + b1, 0) @ w2 + b2
        losses, _ = cross_entropy(logits, np.broadcast_to(y, logits.shape[:2]))
        return losses, (logits.argmax(axis=2) == y).mean(axis=1)

    def batches(self, shard: NDArray[np.integer], size: int, steps: int) -> Iterator[NDArray[np.integer]]:
        """`steps` batches of indices, shape (networks, `size`), drawn from `shard` epoch by epoch, without replacement.

        What does not fill a batch at the end of an epoch is left out. The shard of one rank is enough: which of its
        examples come when depends on the seeds alone.

        Raises:
            ValueError: if the shard has fewer than `size` examples.
        """
        if len(shard) < size:
            raise ValueError(f"the batch is {size}; this shard has only {len(shard)} examples")
        each_epoch = len(shard) // size
        orders = np.empty((len(self.seeds), 0), np.intp)
        for step in range(steps):
            epoch, place_in_epoch = divmod(step, each_epoch)
            if place_in_epoch == 0:
                randoms = [np.random.default_rng((seed, epoch)) for seed in self.seeds]
                orders = np.stack([shard[random.permutation(len(shard))] for random in randoms])
            yield orders[:, place_in_epoch * size : (place_in_epoch + 1) * size]


def cross_entropy(logits: Floats, labels: Labels) -> tuple[Floats, Floats]:
    """Mean loss in nats, shape (networks,), and its gradient by the logits, shape (networks, batch, classes).

    A network that has diverged has a loss of infinity or NaN, and so do its weights from then on; the others are
    not touched by it.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        shifted = logits - logits.max(axis=2, keepdims=True)
        log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=2, keepdims=True))
        gradient = np.exp(log_probabilities)
    networks, batch, _ = logits.shape
    mine = np.arange(networks)[:, None], np.arange(batch)[None], labels
    losses = -log_probabilities[mine].mean(axis=1)
    gradient[mine] -= 1
    gradient /= batch
    return losses, gradient
