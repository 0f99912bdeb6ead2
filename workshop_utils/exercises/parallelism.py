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
    recognise,
)

_OTHER_MEANS = {
    "with shards of 30 and 10 images you take the plain mean of the gradients, as if both shards were equal; "
    "weight each by its number of images.": lambda gradients, sizes: sum(gradients) / len(sizes),
    "that is the sum of the gradients, and no mean: each shard's is a mean already, so weight and divide.": (
        lambda gradients, sizes: sum(gradients)  # noqa: ARG005
    ),
    "weighted, but never divided: divide by the number of all images.": (
        lambda gradients, sizes: sum(size * gradient for size, gradient in zip(sizes, gradients, strict=True))
    ),
    "divided by the number of shards; the weights add up to the number of images, so divide by that.": (
        lambda gradients, sizes: (
            sum(size * gradient for size, gradient in zip(sizes, gradients, strict=True)) / len(sizes)
        )
    ),
    "the weights are the wrong way round: the larger shard counts more, not less.": (
        lambda gradients, sizes: np.average(gradients, axis=0, weights=[1 / size for size in sizes])
    ),
}


@exercise
def weighted_mean(answer: Callable[[list[np.ndarray], list[int]], np.ndarray]) -> str:
    """`answer(gradients, sizes)` is the gradient of the whole batch from those of shards of these sizes."""
    same = [np.array([1.0, 2.0]), np.array([3.0, 6.0])]
    other = [np.array([1.0, 2.0]), np.array([5.0, -3.0])]
    recognise(answer, [(same, [30, 10]), (other, [1, 3])], _OTHER_MEANS)
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
        if np.shape(got) == expected.shape:
            parts = [mine @ part for mine, part in zip(own, rows, strict=True)]
            _explain_logits(np.asarray(got, dtype=float), parts, bias)
        expect(
            got,
            expected,
            f"the logits from {workers} worker{'s' * (workers > 1)}",
            "each worker has a part of every sum",
        )
    return "and only the logits had to cross: the hidden activations stayed at home."


def _explain_logits(got: np.ndarray, parts: list[np.ndarray], bias: np.ndarray) -> None:
    """Raise Wrong if `got` is the sum of `parts` and `bias` but for a part or the bias."""
    workers = len(parts)
    surplus = got - sum(parts) - bias
    with_workers = f"with {workers} worker{'s' * (workers > 1)}"
    if np.allclose(surplus, -bias):
        raise Wrong(f"{with_workers} the bias is missing; it belongs in once.")
    if workers == 1:
        return
    if np.allclose(surplus, (workers - 1) * bias):
        raise Wrong(f"{with_workers} the bias was added {workers} times; it belongs in once.")
    if np.allclose(got, sum(parts) / workers + bias) or np.allclose(got, (sum(parts) + bias) / workers):
        raise Wrong(f"{with_workers} this is the mean of their parts; a logit is their sum.")
    for worker, part in enumerate(parts):
        others = sum(parts) - part
        if np.allclose(surplus, -part):
            raise Wrong(
                f"{with_workers} the part of worker {worker} is missing; each has a part of every sum."
            )
        if np.allclose(surplus, -others):
            raise Wrong(
                f"{with_workers} this is the part of worker {worker} alone; the others' must be added."
            )


_NETWORK = models.MLP(*(models.Dense(np.zeros(s), np.zeros(s[1])) for s in ((784, 512), (512, 10))))
_FLOAT32 = 0.5  # of the bytes of the lesson's float64

data_parallel_megabytes = number(
    models.data_parallel_bytes(_NETWORK, 4) * _FLOAT32 / 1e6,
    "MB",
    "2(N − 1)/N times 407,050 parameters of 4 bytes, whatever the batch",
    {
        1.628: "that is the gradient once; a ring sends 2(N − 1)/N times as much",
        3.256: "that is the bound, twice the gradient; 4 workers send 2(N − 1)/N times the gradient, 1.5 times",
        1.221: "that is one of the ring's two phases; the sum must be passed on, too",
        4.885: "a number takes 4 bytes in float32; this counts 8",
        9.769: "that is what all 4 workers send together",
        0.6106: "those are millions of numbers; each takes 4 bytes",
        0.407: "those are millions of parameters; each takes 4 bytes, and a ring sends 2(N − 1)/N times the gradient",
    },
)
model_parallel_megabytes = number(
    models.model_parallel_bytes(_NETWORK, 4, 256) * _FLOAT32 / 1e6,
    "MB",
    "(N − 1)/N times 256 images times 2 · 512 + 10 values of 4 bytes",
    {
        2.442: "that is the data parallel worker's number; here no weight's gradient crosses, but the activations "
        "of 256 images, their gradients, and the logits",
        1.059: "of all that, a worker keeps a quarter at home: (N − 1)/N of it crosses",
        0.4009: "that is the forward pass; the activations' gradients come back in the backward pass",
        1.588: "a number takes 4 bytes in float32; this counts 8",
        3.176: "that is what all 4 workers send together",
        0.1985: "those are millions of numbers; each takes 4 bytes",
        0.003102: "that is for one image; the batch has 256",
    },
)
weight_of_an_image = number(
    3,
    "times",
    "its shard's mean divides by 10 where the other divides by 30, and both then count the same",
    {
        1: "so it should be, and so it is with weights; but the plain mean divides by 10 here, and by 30 there",
        1 / 3: "that is the other way round: an image of the *smaller* shard is one of few",
        0.5: "each shard counts one half; how many images share a half?",
        20: "that is how many images more the other has; compare 1/10 with 1/30",
        0.75: "that is the weight that the larger shard should have; the plain mean gives both 1/2",
    },
)
