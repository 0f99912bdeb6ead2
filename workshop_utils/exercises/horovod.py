"""Checks of lesson 05, Horovod; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workshop_utils import adasum
from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.exercises import (
    exercise,
    expect,
    number,
    recognise,
)

_OTHER_SCHEDULES = {
    "it begins at 0; a warm-up begins at one worker's rate, which it must have at step 0.": (
        lambda rate, workers, step, steps: rate * workers * min(1, step / steps)
    ),
    "it is one step ahead: `step` counts from 0, so at step 0 nothing has been added yet.": (
        lambda rate, workers, step, steps: rate * (1 + (workers - 1) * min(1, (step + 1) / steps))
    ),
    "it adds N times the rate to that of one worker, and ends at N + 1 times; add N − 1 times.": (
        lambda rate, workers, step, steps: rate * (1 + workers * min(1, step / steps))
    ),
    "it ends at one worker's rate; after the warm-up it must be N times that.": (
        lambda rate, workers, step, steps: rate * min(1, step / steps)  # noqa: ARG005
    ),
    "it never stops growing: after the warm-up it grows no further, so take at most 1 for step / warmup_steps.": (
        lambda rate, workers, step, steps: rate * (1 + (workers - 1) * step / steps)
    ),
}
_OTHER_SUMS = {
    "that is the mean: it halves even what only one of them says; two orthogonal gradients, which have "
    "nothing in common, both count in full.": lambda first, second: (first + second) / 2,
    "that is the sum: of two equal gradients, which say the same, so it counts once, it makes twice as "
    "much.": lambda first, second: first + second,
    "half is missing: take *half* of the projection away from each, or equal gradients cancel.": (
        lambda first, second: (
            (1 - first @ second / (first @ first)) * first + (1 - first @ second / (second @ second)) * second
        )
    ),
    "the norms are swapped: the factor of a gradient is divided by its *own* squared length.": (
        lambda first, second: (
            (1 - first @ second / (2 * second @ second)) * first
            + (1 - first @ second / (2 * first @ first)) * second
        )
    ),
    "the lengths are not squared: divide the dot product by 2 ‖a‖², that is `2 * (first @ first)`.": (
        lambda first, second: (
            (1 - first @ second / (2 * np.linalg.norm(first))) * first
            + (1 - first @ second / (2 * np.linalg.norm(second))) * second
        )
    ),
}


@exercise
def warm_up(answer: Callable[[float, int, int, int], float]) -> str:
    """`answer(learning_rate, workers, step, warmup_steps)` is the learning rate of `step`, counted from 0."""
    recognise(answer, [(0.1, 8, 0, 10), (0.2, 4, 7, 10), (0.1, 8, 99, 10)], _OTHER_SCHEDULES)
    expect(
        answer(0.1, 1, 0, 10),
        0.1,
        "one worker's learning rate at its first step",
        "one worker needs no warm-up",
    )
    expect(
        answer(0.1, 8, 0, 10), 0.1, "the first learning rate of 8 workers", "it begins at that of one worker"
    )
    expect(
        answer(0.1, 8, 10, 10), 0.8, "the learning rate of 8 workers after the warm-up", "8 times that of one"
    )
    expect(
        answer(0.1, 8, 5, 10), 0.45, "the learning rate half-way", "it grows by the same amount in every step"
    )
    expect(answer(0.1, 8, 99, 10), 0.8, "the learning rate long after the warm-up", "it grows no further")
    for workers, step in ((2, 3), (4, 7), (16, 1)):
        expected = 0.2 * (1 + (workers - 1) * step / 10)
        expect(
            answer(0.2, workers, step, 10),
            expected,
            f"the learning rate of {workers} workers at step {step} of 10",
        )
    return "from that of one worker to N times it, and no further."


@exercise
def adasum_of_two(answer: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> str:
    """`answer(first, second)` combines two gradients as Adasum does."""
    east, north = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    slanted = np.array([2.0, 1.0])
    recognise(answer, [(east, 3 * north), (east, slanted), (slanted, east + north)], _OTHER_SUMS)
    cases = (
        ("two orthogonal gradients", east, north, "they have nothing in common, so both count in full"),
        ("two equal gradients", east, east, "they say the same, so it counts once"),
        ("two opposite gradients", east, -east, "they cancel"),
        ("gradients of lengths 1 and 3 in one direction", east, 3 * east, "the mean of both"),
        ("gradients at 45°", east, east + north, "each loses half of the other's projection on it"),
    )
    for what, first, second, because in cases:
        expect(
            answer(first.copy(), second.copy()), adasum.combine(first, second), f"Adasum of {what}", because
        )
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=7), generator.normal(size=7)
    expect(answer(first, second), adasum.combine(first, second), "Adasum of two gradients of 7 numbers")
    return "what both say counts once, what only one says counts in full."


learning_rate_half_way = number(
    0.1 * (1 + 7 / 2),
    "",
    "half of the way from 0.1 to 8 · 0.1",
    {
        0.8: "that is the end of the warm-up",
        0.4: "half of 8 · 0.1; but the warm-up does not begin at 0, it begins at one worker's 0.1",
        0.1: "that is where the warm-up begins",
        0.35: "that is what has been added by now, to 0.1",
        0.5: "half of 8 is added to 1; but from 1 to 8 it is 7, and half of that is to be added",
        0.2828: "half of the way by factors; the warm-up adds the same amount in every step",
    },
)
messages_of_a_step = number(
    5,
    "messages",
    "200 · 100 kB are 20 MB, in buffers of 4 MB",
    {
        200: "that is without fusion; a buffer takes several gradients",
        1: "with the default of 128 MiB it would be; the threshold is 4 MB, and there are 20 MB",
        40: "that is how many gradients go into one buffer of 4 MB; how many buffers are 200 of them?",
        20: "those are megabytes, 200 · 100 kB; a buffer takes 4 of them",
        50: "200 / 4 is gradients by megabytes; a gradient has 0.1 MB",
        4: "4 buffers of 4 MB take 16 of the 20 MB",
    },
)
half_precision_megabytes = number(
    ring_bytes_sent(4, 200_000_000) / 1e6,
    "MB",
    "2 · 3/4 times 200 MB: every number has 2 bytes instead of 4",
    {
        600: "that is with 32 bits; every number has 2 bytes now instead of 4",
        200: "that is what the gradients take in 16 bits; of it, a ring sends 2 (N − 1)/N times as much",
        150: "that is one of the ring's two phases",
        400: "twice 200 MB is the bound; 4 workers send 2 · 3/4 of 200 MB",
        1200: "that is what all 4 workers send together",
        100: "half of half: 400 MB in 32 bits are 200 MB in 16, and a ring sends 2 · 3/4 of it",
    },
)
