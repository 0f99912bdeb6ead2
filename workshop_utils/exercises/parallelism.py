"""Checks of lesson 02, data and model parallelism; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workshop_utils import models
from workshop_utils.exercises import (
    Wrong,
    exercise,
    expect,
    number,
)


@exercise
def weighted_mean(answer: Callable[[list[np.ndarray], list[int]], np.ndarray]) -> str:
    """`answer(gradients, sizes)` is the gradient of the whole batch from those of shards of these sizes."""
    same = [np.array([1.0, 2.0]), np.array([3.0, 6.0])]
    expect(answer(same, [5, 5]), np.array([2.0, 4.0]), "the mean of equal shards")
    expect(
        answer(same, [30, 10]),
        np.array([1.5, 3.0]),
        "the mean of shards of 30 and 10 images",
        "each image counts the same, so the first shard counts three times as much",
    )
    expect(
        answer([*same, np.array([9.0, 9.0])], [1, 1, 0]),
        np.array([2.0, 4.0]),
        "the mean of shards of 1, 1 and 0 images",
        "a shard without images has no say",
    )
    generator = np.random.default_rng(0)
    gradients, sizes = [generator.normal(size=(3, 4)) for _ in range(3)], [17, 17, 16]
    expected = np.average(gradients, axis=0, weights=sizes)
    expect(answer(gradients, sizes), expected, "the mean of gradients of shape (3, 4)")
    return "that is the gradient of the whole batch."


@exercise
def combined_logits(answer: Callable[[list[np.ndarray], list[np.ndarray], np.ndarray], np.ndarray]) -> str:
    """`answer(activations, rows, bias)` is the logits of a layer whose weights are cut by their rows.

    Worker k has activations[k] of shape (batch, units k) and rows[k] of shape (units k, classes).
    """
    generator = np.random.default_rng(0)
    mlp = models.MLP.initialise(5, 7, 4)
    bias = generator.normal(size=4)
    activations, _ = mlp.forward(generator.normal(size=(6, 5)))
    expected = activations @ mlp.output.weights + bias
    for workers in (1, 2, 3):
        cut = models.shards(7, workers)
        own = [activations[:, units].copy() for units in cut]
        rows = [mlp.output.weights[units].copy() for units in cut]
        got = answer(own, rows, bias.copy())
        if workers > 1 and np.shape(got) == expected.shape:
            surplus = np.asarray(got, dtype=float) - expected
            if np.allclose(surplus, (workers - 1) * bias):
                raise Wrong(f"with {workers} workers the bias was added {workers} times; it belongs in once.")
        expect(
            got,
            expected,
            f"the logits from {workers} worker{'s' * (workers > 1)}",
            "each worker has a part of every sum",
        )
    return "and only the logits had to cross: the hidden activations stayed at home."


_NETWORK = models.MLP(*(models.Dense(np.zeros(s), np.zeros(s[1])) for s in ((784, 512), (512, 10))))
_FLOAT32 = 0.5  # of the bytes of the lesson's float64

data_parallel_megabytes = number(
    models.data_parallel_bytes(_NETWORK, 4) * _FLOAT32 / 1e6,
    "MB",
    "2(N − 1)/N times 407,050 parameters of 4 bytes, whatever the batch",
)
model_parallel_megabytes = number(
    models.model_parallel_bytes(_NETWORK, 4, 256) * _FLOAT32 / 1e6,
    "MB",
    "(N − 1)/N times 256 images times 2 · 512 + 10 values of 4 bytes",
)
weight_of_an_image = number(
    3, "times", "its shard's mean divides by 10 where the other divides by 30, and both then count the same"
)
