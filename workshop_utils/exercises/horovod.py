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
)


@exercise
def warm_up(answer: Callable[[float, int, int, int], float]) -> str:
    """`answer(learning_rate, workers, step, warmup_steps)` is the learning rate of `step`, counted from 0."""
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


learning_rate_half_way = number(0.1 * (1 + 7 / 2), "", "half of the way from 0.1 to 8 · 0.1")
messages_of_a_step = number(5, "messages", "200 · 100 kB are 20 MB, in buffers of 4 MB")
half_precision_megabytes = number(
    ring_bytes_sent(4, 200_000_000) / 1e6, "MB", "2 · 3/4 times 200 MB: every number has 2 bytes instead of 4"
)
