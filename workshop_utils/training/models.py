"""A two-layer network in NumPy, small enough to be read, exact enough (float64) to be held against others.

It is what the lessons split between workers by hand: by the batch (`shards`) or by the units (`partition`).

    mlp = MLP.initialise(inputs=64, width=50, classes=10, seed=0)
    loss, gradients = mlp.gradients(images, labels)
    mlp = mlp.step(gradients, learning_rate=0.5)
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.integer]


class Dense(NamedTuple):
    """An affine layer: `weights` of shape (inputs, outputs) and `bias` of shape (outputs,).

    Its gradient has the same shape, so a gradient is a Dense too.
    """

    weights: Array
    bias: Array

    @classmethod
    def initialise(cls, inputs: int, outputs: int, generator: random.Random) -> Dense:
        """Uniform weights in ±√(6 / (inputs + outputs)) (Glorot and Bengio 2010, eq. 16) and no bias.

        The standard library's generator draws them, row by row, so that a script in any framework can start
        from the same weights.
        """
        limit = math.sqrt(6 / (inputs + outputs))
        drawn = [generator.uniform(-limit, limit) for _ in range(inputs * outputs)]
        return cls(np.array(drawn).reshape(inputs, outputs), np.zeros(outputs))

    def forward(self, inputs: Array) -> Array:
        """Outputs of shape (batch, outputs) for `inputs` of shape (batch, inputs)."""
        return inputs @ self.weights + self.bias

    def backward(self, inputs: Array, output_gradient: Array) -> tuple[Dense, Array]:
        """The layer's gradient, and that of its inputs, from the gradient of its outputs."""
        gradient = Dense(inputs.T @ output_gradient, output_gradient.sum(axis=0))
        return gradient, output_gradient @ self.weights.T


def relu(values: Array) -> Array:
    """Values below zero become zero."""
    return np.maximum(values, 0)


def cross_entropy(logits: Array, labels: Labels) -> tuple[float, Array]:
    """Mean loss in nats over the batch, and its gradient by the logits (shape (batch, classes)).

    Raises:
        ValueError: if the batch is empty, for an empty batch has no mean.
    """
    if len(logits) == 0:
        raise ValueError("the batch is empty; the mean loss needs at least one example")
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    gradient = np.exp(log_probabilities)
    gradient[rows, labels] -= 1
    return float(-log_probabilities[rows, labels].mean()), gradient / len(labels)


@dataclass(frozen=True)
class MLP:
    """A multilayer perceptron: one hidden layer of rectified units, and class logits.

    Frozen: `step` returns a new one, so that two ways of training can start from the same weights.
    """

    hidden: Dense
    output: Dense

    @classmethod
    def initialise(cls, inputs: int, width: int, classes: int, seed: int = 0) -> MLP:
        """Initial weights; the same for the same sizes and seed, on every machine and for every worker."""
        generator = random.Random(seed)
        hidden = Dense.initialise(inputs, width, generator)
        return cls(hidden, Dense.initialise(width, classes, generator))

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Hidden weights and bias, output weights and bias."""
        return (*self.hidden, *self.output)

    @property
    def parameters(self) -> int:
        """How many numbers there are to train."""
        return sum(array.size for array in self.arrays)

    @property
    def nbytes(self) -> int:
        """Their size, which is also that of their gradient."""
        return sum(array.nbytes for array in self.arrays)

    def forward(self, inputs: Array) -> tuple[Array, Array]:
        """Hidden activations (batch, width) and logits (batch, classes)."""
        activations = relu(self.hidden.forward(inputs))
        return activations, self.output.forward(activations)

    def loss(self, inputs: Array, labels: Labels) -> float:
        """Mean cross-entropy over the batch, in nats."""
        return cross_entropy(self.forward(inputs)[1], labels)[0]

    def accuracy(self, inputs: Array, labels: Labels) -> float:
        """The fraction of examples whose largest logit is their label's."""
        return float((self.forward(inputs)[1].argmax(axis=1) == labels).mean())

    def gradients(self, inputs: Array, labels: Labels) -> tuple[float, MLP]:
        """The mean loss over the batch, and its gradient in the shape of the network."""
        activations, logits = self.forward(inputs)
        loss, logits_gradient = cross_entropy(logits, labels)
        output, activations_gradient = self.output.backward(activations, logits_gradient)
        hidden, _ = self.hidden.backward(inputs, activations_gradient * (activations > 0))
        return loss, MLP(hidden, output)

    def step(self, gradients: MLP, learning_rate: float) -> MLP:
        """The network after one step of gradient descent."""
        return combine(lambda weight, gradient: weight - learning_rate * gradient, self, gradients)

    def flat(self) -> Array:
        """All parameters in one vector: what is sent when a gradient travels."""
        return np.concatenate([array.ravel() for array in self.arrays])

    def distance(self, other: MLP) -> float:
        """The largest difference between two networks' parameters."""
        return float(np.abs(self.flat() - other.flat()).max())


def combine(function: Callable[..., Array], *networks: MLP) -> MLP:
    """The network whose every array is `function` of the given networks' arrays."""
    arrays = [function(*same) for same in zip(*(network.arrays for network in networks), strict=True)]
    return MLP(Dense(*arrays[:2]), Dense(*arrays[2:]))


def weighted_mean(networks: Sequence[MLP], weights: Sequence[float]) -> MLP:
    """Σ wₖ·networkₖ / Σ wₖ: the gradient of a batch from those of its shards, weighted by the shards' sizes.

    Raises:
        ValueError: if the numbers of networks and weights differ, or the weights sum to zero.
    """
    if len(networks) != len(weights):
        raise ValueError(f"{len(networks)} gradients have {len(weights)} weights; each needs one")
    total = sum(weights)
    if total == 0:
        raise ValueError(f"the weights are {list(weights)}; at least one has to be above zero")
    shares = [weight / total for weight in weights]
    return combine(lambda *same: sum(map(operator.mul, shares, same)), *networks)


def shards(length: int, workers: int) -> list[slice]:
    """`length` things in `workers` contiguous shares that differ by one at most, the larger ones first.

    Raises:
        ValueError: if there is not at least one worker.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; there must be at least 1")
    share, larger = divmod(length, workers)
    ends = [share * (worker + 1) + min(worker + 1, larger) for worker in range(workers)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class Partition:
    """One worker's part of an MLP: its hidden units, its output units and all weights that lead into them.

    This is the cut of DistBelief (Dean et al. 2012, section 3): units are assigned to machines, and an
    activation travels wherever a connection crosses from one machine to another. `hidden_units` and
    `output_units` say which columns of the whole network's layers these are.
    """

    hidden: Dense
    output: Dense
    hidden_units: slice
    output_units: slice


def partition(network: MLP, workers: int) -> list[Partition]:
    """`network` cut by its units into one part a worker; sizes differ by one unit at most."""

    def own(layer: Dense, units: slice) -> Dense:
        return Dense(layer.weights[:, units], layer.bias[units])

    width, classes = network.output.weights.shape
    cuts = zip(shards(width, workers), shards(classes, workers), strict=True)
    return [Partition(own(network.hidden, h), own(network.output, o), h, o) for h, o in cuts]


def join(parts: Sequence[Partition]) -> MLP:
    """The whole network (or its gradient) from all its partitions, in order."""
    layers = ([part.hidden for part in parts], [part.output for part in parts])
    # A layer is cut by its columns, so weights and biases join along their last axis.
    return MLP(*(Dense(*map(np.hstack, zip(*layer, strict=True))) for layer in layers))


def model_parallel_bytes(network: MLP, workers: int, batch: int) -> float:
    """Bytes that a worker sends per step of `partition`'s model parallelism, on average over the workers.

    Three things cross, each to (or from) the N − 1 others: the hidden activations and the logits in the forward
    pass, the partial gradients of the hidden activations in the backward pass.
    """
    width, classes = network.output.weights.shape
    return (workers - 1) / workers * batch * (2 * width + classes) * network.output.weights.itemsize


def crossover_batch(network: MLP) -> float:
    """The batch at which both schemes send the same, whatever N: 2 · parameters / (2 · width + classes)."""
    width, classes = network.output.weights.shape
    return 2 * network.parameters / (2 * width + classes)
