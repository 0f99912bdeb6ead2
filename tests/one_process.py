"""What jobs and networks trained side by side are compared with: a two-layer network of one process, in float64."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np


class MLP(NamedTuple):
    """A hidden layer of rectified units, and class logits; a gradient has the same shape."""

    w1: np.ndarray
    b1: np.ndarray
    w2: np.ndarray
    b2: np.ndarray

    @classmethod
    def initialise(cls, inputs: int, width: int, classes: int, seed: int = 0) -> MLP:
        """Uniform weights in ±√(6 / (inputs + outputs)), drawn as the jobs' scripts draw them, and no bias."""
        generator, arrays = random.Random(seed), []
        for rows, columns in ((inputs, width), (width, classes)):
            limit = math.sqrt(6 / (rows + columns))
            drawn = [generator.uniform(-limit, limit) for _ in range(rows * columns)]
            arrays += [np.array(drawn).reshape(rows, columns), np.zeros(columns)]
        return cls(*arrays)

    def logits(self, inputs: np.ndarray) -> np.ndarray:
        return np.maximum(inputs @ self.w1 + self.b1, 0) @ self.w2 + self.b2

    def accuracy(self, inputs: np.ndarray, labels: np.ndarray) -> float:
        return float((self.logits(inputs).argmax(axis=1) == labels).mean())

    def gradients(self, inputs: np.ndarray, labels: np.ndarray) -> tuple[float, MLP]:
        """The mean loss over the batch in nats, and its gradient."""
        hidden, logits = np.maximum(inputs @ self.w1 + self.b1, 0), self.logits(inputs)
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -np.log(probabilities[rows, labels]).mean()
        probabilities[rows, labels] -= 1
        d_logits = probabilities / len(labels)
        d_hidden = d_logits @ self.w2.T * (hidden > 0)
        w1, w2 = inputs.T @ d_hidden, hidden.T @ d_logits
        return float(loss), MLP(w1, d_hidden.sum(axis=0), w2, d_logits.sum(axis=0))

    def step(self, gradients: MLP, rate: float) -> MLP:
        return MLP(*(weight - rate * slope for weight, slope in zip(self, gradients, strict=True)))

    def flat(self) -> np.ndarray:
        return np.concatenate([array.ravel() for array in self])
