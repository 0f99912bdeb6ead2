"""Checks of lesson 02, data and model parallelism; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workshop_utils.lessons.checks import compare, exercise, expect, explain, mistakes, questions, recognise
from workshop_utils.training import models

__getattr__ = questions(__name__)


@exercise
def weighted_mean(answer: Callable[[list[np.ndarray], list[int]], np.ndarray]) -> str:
    """`answer(gradients, sizes)` is the gradient of the whole batch from those of shards of these sizes."""
    same = [np.array([1.0, 2.0]), np.array([3.0, 6.0])]
    other = [np.array([1.0, 2.0]), np.array([5.0, -3.0])]
    recognise(answer, [(same, [30, 10]), (other, [1, 3])], mistakes(__name__, "weighted_mean"))
    generator = np.random.default_rng(0)
    each_counts = "each image counts the same, so the first shard counts three times as much"
    cases = [
        ("the mean of equal shards", "", same, [5, 5]),
        ("the mean of shards of 30 and 10 images", each_counts, same, [30, 10]),
        ("the mean of shards of 1, 1 and 0 images", "a shard without images has no say",
         [*same, np.array([9.0, 9.0])], [1, 1, 0]),
        ("the mean of gradients of shape (3, 4)", "", list(generator.normal(size=(3, 3, 4))), [17, 17, 16]),
    ]  # fmt: skip
    compare(answer, lambda gradients, sizes: np.average(gradients, axis=0, weights=sizes), cases)
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
        if np.shape(got) == expected.shape:
            parts = [mine @ part for mine, part in zip(own, rows, strict=True)]
            explain(got, _logit_mistakes(parts, bias))
        what = f"the logits from {workers} worker{'s' * (workers > 1)}"
        expect(got, expected, what, "each worker has a part of every sum")
    return "and only the logits had to cross: the hidden activations stayed at home."


def _logit_mistakes(parts: list[np.ndarray], bias: np.ndarray) -> dict[str, np.ndarray]:
    """What a missing part, or a wrong number of biases, gives, by the sentence on each."""
    workers, total = len(parts), np.sum(parts, axis=0)
    of = f"with {workers} worker{'s' * (workers > 1)}"
    mistakes = {f"{of} the bias is missing; it belongs in once.": total}
    if workers > 1:
        mean = f"{of} this is the mean of their parts; a logit is their sum"
        mistakes |= {
            f"{of} the bias was added {workers} times; it belongs in once.": total + workers * bias,
            f"{mean}.": total / workers + bias,
            f"{mean}, and the bias belongs in whole.": (total + bias) / workers,
        }
        for worker, part in enumerate(parts):
            others = f"{of} the part of worker {worker} is missing; each has some of every sum."
            alone = f"{of} this is the part of worker {worker} alone; add those of the others."
            mistakes |= {others: total - part + bias, alone: part + bias}
    return mistakes
