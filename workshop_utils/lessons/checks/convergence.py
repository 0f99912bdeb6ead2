"""Checks of lesson 09, convergence; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import Wrong, exercise, expect, mistakes, recognise, result_of
from workshop_utils.lessons.checks.open_question import OpenQuestion

Array = np.ndarray
Arrays = tuple[Array, Array]

lower_target = OpenQuestion(
    "times",
    (0.7, 4),
    "the noise scale says what a batch is worth at one moment. The critical batch counts all updates from the first "
    "on, also those that pass larger losses, where the noise scale is smaller. So it need not grow as much as "
    "the noise scale at the target. Both come from few seeds and coarse rates: do not expect the second digit.",
    predictable=(0.1, 30),
)

MOST_RATES = 100  # that a search may try; a sensible one needs about ten


@exercise
def best_rate(answer: Callable[..., float]) -> str:
    """`answer(updates, rate)` is the best of rate · 2ᵏ, k = … −1, 0, 1 …, tried until it is not the last on a side."""
    for where, exponent, limit in (
        ("in the middle", 0, 2),
        ("8 times larger", 3, 4),
        ("4 times smaller", -2, 0),
        ("64 times smaller, and the first one diverges", -6, -3),
        ("32 times larger, just below those that diverge", 5, 5),
    ):
        for start in (0.1, 0.3):
            _judge_rate(answer, where, start, start * 2.0**exponent, start * 2.0**limit)
    return "it looks beyond its grid's ends, and takes a rate with which every seed arrives."


def _judge_rate(answer: Callable[..., float], where: str, start: float, best: float, limit: float) -> None:
    """One search, with the `best` rate somewhere beside `start`, and some seeds that diverge above the `limit`."""
    tried: list[float] = []

    def outcome(rate: float) -> Array:
        octaves = abs(np.log2(rate / best))
        each = 100 * (1 + octaves) * np.array([0.9, 1.0, 1.1])
        if octaves > 0.4:
            each[0] *= 0.3  # a lucky seed, faster than all with the best rate
        if rate > 1.01 * limit:
            each[1:] = np.inf
            each[0] = np.inf if rate > 3 * limit else 20.0
        return each

    def updates(rate: Any) -> Array:
        if np.ndim(rate) or not rate > 0:
            raise Wrong(f"you called `updates({rate!r})`; it trains with one positive rate at a time.")
        tried.append(float(rate))
        if len(tried) > MOST_RATES:
            raise Wrong(f"{case}trained with {MOST_RATES} rates and went on; when do you stop?")
        return outcome(float(rate))

    case = f"with the best rate {where}, you "
    rate = result_of(answer, updates, start)
    if isinstance(rate, str | bool) or np.ndim(rate) or not rate > 0:
        raise Wrong(f"you returned {rate!r}; return one learning rate.")
    rate = float(rate)
    if not 0.9 < rate / best < 1.1:
        arriving = {each: outcome(each) for each in [*tried, rate] if np.isfinite(outcome(each)).all()}
        if rate not in arriving:
            raise Wrong(f"{case}chose one with which some seeds never arrive; they give inf.")
        if rate == min(arriving, key=lambda each: arriving[each].mean()) and rate in (min(tried), max(tried)):
            raise Wrong(
                f"{case}chose the {'smallest' if rate == min(tried) else 'largest'} rate that you tried. Its neighbour "
                "may be better: go on until the best one has a neighbour on each side."
            )
        if rate == min(arriving, key=lambda each: arriving[each].min()):
            raise Wrong(f"{case}chose by the luckiest seed; take the mean over the seeds.")
        raise Wrong(f"{case}chose {rate:.4g} from {start:g} on; the best is {best:.4g}.")
    for side, neighbour in (("above", 2 * best), ("below", best / 2)):
        if not any(0.9 < each / neighbour < 1.1 for each in tried):
            raise Wrong(f"{case}never tried the one {side} it: how do you know it is the best?")


def _noise(gradients: Array, images: int) -> Arrays:
    """McCandlish et al. (2018), appendix A.1: one worker's batch is the small one, that of all workers the large."""
    mean = gradients.mean(axis=0)
    trace = images * ((gradients - mean) ** 2).sum() / (len(gradients) - 1)
    return trace, (mean**2).sum() - trace / (images * len(gradients))


@exercise
def noise_from_workers(answer: Callable[..., Any]) -> str:
    """`answer(gradients, images)` estimates tr Σ and |G|² from the workers' gradients, without bias."""
    draw = np.random.default_rng(0)
    case = draw.normal(size=(4, 6)) + 1.0, 8
    got = result_of(answer, *copy.deepcopy(case))
    if np.shape(got) != (2,):
        raise Wrong("it must return two numbers: the estimates of tr Σ and of |G|².")
    recognise(answer, [case], mistakes(__name__, "noise_from_workers", noise=_noise))
    for workers, images in ((4, 8), (2, 16), (8, 1)):
        signal, deviation = np.array([3.0, 1.0, -2.0, 1.0]), np.array([4.0, 1.0, 6.0, 2.0])
        size = (4000, workers, len(signal))
        steps = signal + deviation * draw.normal(size=size) / np.sqrt(images)
        trace, squared = np.mean([answer(step, images) for step in steps], axis=0)
        for name, mean, truth in (
            ("tr Σ", trace, (deviation**2).sum()),
            ("|G|²", squared, (signal**2).sum()),
        ):
            if not abs(mean / truth - 1) < 0.08:
                raise Wrong(
                    f"over {len(steps):,} simulated steps of {workers} workers with {images} images each, your "
                    f"estimates of {name} are {mean:.3g} on average; the truth is {truth:.3g}."
                )
    return "over thousands of simulated steps both estimates are right on average: workers measure the noise scale."


def _outer_step(shared: Array, mean: Array, momentum: Array, rate: float, decay: float) -> Arrays:
    """DiLoCo's outer step to where the workers are in the `mean`, by Nesterov's momentum."""
    way = shared - mean
    after = decay * momentum + way
    return shared - rate * (way + decay * after), after


def _mean(workers: list[Array]) -> Array:
    return np.mean(workers, axis=0)


@exercise
def outer_step(answer: Callable[..., Arrays]) -> str:
    """`answer(shared, workers, momentum, rate, decay)` is DiLoCo's outer step: the new shared weights and momentum."""
    shared, workers = np.array([1.0, 2.0]), [np.array([0.0, 2.0]), np.array([0.5, 1.0])]
    still, moving = np.zeros(2), np.array([1.0, -1.0])
    got = result_of(answer, *copy.deepcopy((shared, workers, still)), 1.0, 0.0)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Wrong(f"it gave {got!r}; it must be two things, the new shared weights and the new momentum.")
    case = (shared, workers, moving, 0.7, 0.9)
    recognise(answer, [case], mistakes(__name__, "outer_step", step=_outer_step, mean=_mean))
    cases = (
        (1.0, 0.0, still, "with rate 1 and no momentum", "it is then the mean of the workers' weights"),
        (0.5, 0.0, still, "with rate 0.5 and no momentum", "it goes half of the way to the mean"),
        (0.7, 0.9, still, "with momentum 0.9 from rest", "Nesterov: the way, and 0.9 times the new momentum"),
        (0.7, 0.9, moving, "with momentum 0.9 from (1, −1)", "the old momentum fades to 0.9 of it"),
    )
    for rate, decay, momentum, when, because in cases:
        weights, after = _outer_step(shared, _mean(workers), momentum, rate, decay)
        moved, new_momentum = answer(*copy.deepcopy((shared, workers, momentum)), rate, decay)
        expect(new_momentum, after, f"the momentum {when}", "decay · momentum + way; way = shared − mean")
        expect(moved, weights, f"the weights {when}", because)
    return "that is all that DiLoCo adds: with rate 1 and decay 0 it is local SGD."
