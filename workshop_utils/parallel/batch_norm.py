"""Batch normalisation across workers: the one layer whose result depends on how the batch is cut.

Ioffe and Szegedy (2015), "Batch normalization", algorithm 1. The mean and the variance that normalise an example are
those of the examples around it. A worker that looks at its own part of the batch alone sees others than one process
that has the whole batch, and computes another function. With a communicator, the statistics are those of all
workers' examples (as in PyTorch's SyncBatchNorm), at the price of one small all-reduce forward and one backward.
"""

from __future__ import annotations

import numpy as np

from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel.ensemble import Floats

EPSILON = 1e-5  # added to variances
MOMENTUM = 0.1  # share of a new batch in the running statistics, as in PyTorch


class BatchNorm:
    """Normalises each unit over a batch; for several networks side by side.

    There are no scale and no shift: the layer that follows has them.

    Args:
        networks: how many there are side by side.
        units: of each.
        communicator: of the workers whose examples count together; None has each look at its own alone. All of them
            must have equally many examples, and call `forward` and `backward` equally often.

    Attributes:
        running_mean: of all batches so far, the later ones counting more, shape (networks, 1, units).
        running_variance: the same of the variance. In testing, these two take the batch's place.
    """

    def __init__(self, networks: int, units: int, communicator: Communicator | None = None) -> None:
        self._communicator = communicator
        self.running_mean: Floats = np.zeros((networks, 1, units))
        self.running_variance: Floats = np.ones((networks, 1, units))

    def forward(self, values: Floats) -> Floats:
        """`values` of shape (networks, batch, units), each unit with mean 0 and variance 1 over the batch."""
        mean, mean_of_squares = self._means(values, values * values)
        variance = np.maximum(mean_of_squares - mean * mean, 0)  # rounding may leave it just below zero
        self.running_mean += MOMENTUM * (mean - self.running_mean)
        self.running_variance += MOMENTUM * (variance - self.running_variance)
        self._deviation = np.sqrt(variance + EPSILON)
        self._normalised = (values - mean) / self._deviation
        return self._normalised

    def backward(self, by_normalised: Floats) -> Floats:
        """The loss's gradient by the values of the last `forward`, from that by its result.

        Every example has moved the mean and the variance of all others, so what it gets back depends on all of them.
        """
        mean, along = self._means(by_normalised, by_normalised * self._normalised)
        by_values: Floats = (by_normalised - mean - self._normalised * along) / self._deviation
        return by_values

    def test(self, values: Floats) -> Floats:
        """`values` normalised with the running statistics, so that no example depends on another."""
        normalised: Floats = (values - self.running_mean) / np.sqrt(self.running_variance + EPSILON)
        return normalised

    def _means(self, first: Floats, second: Floats) -> tuple[Floats, Floats]:
        """Both means over the batch, that of all workers if they count together: one all-reduce for both."""
        means = np.stack([first.mean(axis=1, keepdims=True), second.mean(axis=1, keepdims=True)])
        if self._communicator is not None:
            ring_all_reduce(self._communicator, means.reshape(-1), "mean")
        return means[0], means[1]
