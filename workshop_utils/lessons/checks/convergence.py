"""Checks of lesson 09, convergence; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import Wrong, exercise, expect, mistakes, recognise, refuse, result_of
from workshop_utils.lessons.checks.open_question import question

Array = np.ndarray
Arrays = tuple[Array, Array]

lower_target = question(__name__, "lower_target")

MOST_CALLS = 200  # of the training function, by a search that trains its rates again in each round, too
EXTRA_RATES = 20  # that a search may try beside those between its start and the best


@exercise
def best_rate(answer: Callable[..., float]) -> str:
    """`answer(updates, rate)` is the best of rate · 2ᵏ, k = … −1, 0, 1 …, tried until it is not the last on a side."""
    for where, exponent, limit in (
        ("in the middle", 0, 2),
        ("8 times larger", 3, 4),
        ("4 times smaller", -2, 0),
        ("64 times smaller, and the first one diverges", -6, -3),
        ("32 times larger, just below those that diverge", 5, 5),
        ("1,024 times larger", 10, 12),
        ("4,096 times smaller", -12, -9),
    ):
        for start in (0.1, 0.3):
            _judge_rate(answer, where, start, start * 2.0**exponent, start * 2.0**limit)
    return "it looks beyond its grid's ends, and takes a rate with which every seed arrives."


def _judge_rate(answer: Callable[..., float], where: str, start: float, best: float, limit: float) -> None:
    """One search, with the `best` rate somewhere beside `start`, and some seeds that diverge above the `limit`.

    The mean over the seeds is smallest at `best`; the fastest seed, their median and the slowest are not.
    """
    case = f"with the best rate {where}, you "
    tried: dict[float, Array] = {}

    def outcome(rate: float) -> Array:
        if rate > 1.01 * limit:
            return np.full(3, np.inf) if rate > 3 * limit else np.array([20.0, 30.0, np.inf])
        octaves = np.log2(rate / best)
        above, below = octaves > 0.4, octaves < -0.4
        shape = [0.95, 1.0, 1.05] if above else [0.25, 0.3, 2.45] if below else [0.5, 0.7, 1.8]
        return 100 * (1 + 0.1 * abs(octaves)) * np.array(shape)

    calls = itertools.count(1)

    def updates(rate: Any) -> Array:
        one = np.ndim(rate) == 0 and rate > 0
        refuse(not one, f"you called `updates({rate!r})`; it trains with one positive rate at a time.")
        endless = f"{case}trained {MOST_CALLS} times and went on; when do you stop?"
        refuse(next(calls) > MOST_CALLS, endless)
        return tried.setdefault(float(rate), outcome(float(rate))).copy()

    rate = result_of(answer, updates, start)
    is_number = not isinstance(rate, str | bool | complex) and np.ndim(rate) == 0
    one = is_number and 0 < rate <= sys.float_info.max
    refuse(not one, f"you returned {rate!r}; return one learning rate.")
    if not 0.9 < rate / best < 1.1:
        own = outcome(rate)
        never = f"{case}chose one with which some seeds never arrive; they give inf."
        refuse(not np.isfinite(own).all(), never)
        refuse(not tried, "you never called `updates`: try rates, and compare their means.")
        finite = [each for each in [*tried.values(), own] if np.isfinite(each).all()]
        end = "smallest" * (rate == min(tried)) or "largest" * (rate == max(tried))
        neighbour = "Its neighbour may be better: go on until the best one has a neighbour on each side."
        is_best = own.mean() == min(each.mean() for each in finite)
        refuse(is_best and end, f"{case}chose the {end} rate that you tried. {neighbour}")
        names = "the luckiest seed", "the median", "the slowest seed"
        least = np.min([np.sort(each) for each in finite], axis=0)
        seen = " or by ".join(np.array(names)[np.sort(own) == least])
        refuse(seen, f"{case}chose another, as one would by {seen}; take the mean over the seeds.")
        raise Wrong(f"{case}chose {rate:.4g} from {start:g} on; the best mean is that of {best:.4g}.")
    for side, next_rate in (("above", 2 * best), ("below", best / 2)):
        near = any(0.9 < each / next_rate < 1.1 for each in tried)
        refuse(not near, f"{case}never tried the one {side} it: how do you know it is the best?")
    known = np.isclose(rate, [*tried], rtol=1e-6, atol=0).any()
    refuse(not known, f"{case}returned {rate:.4g}, a rate that you never tried.")
    stop = "stop as soon as the best one has a worse neighbour on each side"
    many = len(tried) > abs(np.log2(best / start)) + EXTRA_RATES
    refuse(many, f"{case}tried {len(tried)} rates; {stop}.")


STEPS = 3000  # simulated, to see whether estimates are right on average
STANDARD_ERRORS = 4.5  # that their mean may be off by


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
    shape = np.shape(result_of(answer, *copy.deepcopy(case)))
    refuse(shape != (2,), "it must return two numbers: the estimates of tr Σ and of |G|².")
    recognise(answer, [case], mistakes(__name__, "noise_from_workers", noise=_noise))
    deviation = np.tile([4.0, 1.0, 6.0, 2.0], 3)
    for workers, images, length in ((4, 8, 1.0), (2, 16, 1.0), (8, 1, 1.0), (4, 64, 1.0), (4, 8, 0.0)):
        signal = length * np.tile([3.0, 1.0, -2.0, 1.0], 3)
        steps = signal + deviation * draw.normal(size=(STEPS, workers, len(signal))) / np.sqrt(images)
        least = np.std([_noise(step, images) for step in steps], axis=0)
        each = np.array([answer(step, images) for step in steps], dtype=float)
        spread, truths = each.std(axis=0), ((deviation**2).sum(), (signal**2).sum())
        errors = spread / np.sqrt(STEPS)
        for name, mean, error, truth in zip(("tr Σ", "|G|²"), each.mean(axis=0), errors, truths, strict=True):
            over = f"over {STEPS:,} simulated steps of {workers} workers with {images} images each"
            are = f"estimates of {name} are {mean:.3g} ± {error:.1g} on average; the truth is {truth:.3g}"
            refuse(not abs(mean - truth) < STANDARD_ERRORS * error + 1e-3 * truth, f"{over}, your {are}.")
        wide = f"scatter {(spread / least).max():.1f} times as widely as they need to; use all workers alike"
        wider = f"right on average, but with {workers} workers your estimates {wide}"
        refuse((spread > 1.1 * least).any(), f"{wider}.")
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
    shared, still, moving = np.array([1.0, 2.0, 0.5]), np.zeros(3), np.array([1.0, -1.0, 0.5])
    three = [np.array([0.0, 2.0, 1.0]), np.array([0.5, 1.0, -1.0]), np.array([2.0, -3.0, 0.75])]
    got = result_of(answer, *copy.deepcopy((shared, three, still)), 1.0, 0.0)
    two = isinstance(got, tuple | list | np.ndarray) and len(got) == 2
    refuse(not two, f"it gave {got!r}; it must be two things, the new shared weights and the new momentum.")
    case = (shared, three, moving, 0.7, 0.9)
    recognise(answer, [case], mistakes(__name__, "outer_step", step=_outer_step, mean=_mean))
    cases = (
        (1.0, 0.0, still, "rate 1 and no momentum", "it is then the mean of the workers' weights"),
        (0.5, 0.0, still, "rate 0.5 and no momentum", "it goes half of the way to the workers' mean"),
        (0.7, 0.9, still, "momentum 0.9 from rest", "Nesterov: the way, and 0.9 times the new momentum"),
        (0.7, 0.9, moving, "momentum 0.9 from (1, −1, 0.5)", "the old momentum fades to 0.9 of it"),
    )
    for workers, (rate, decay, momentum, when, because) in itertools.product((three, three[:2]), cases):
        weights, after = _outer_step(shared, _mean(workers), momentum, rate, decay)
        moved, new_momentum = answer(*copy.deepcopy((shared, workers, momentum)), rate, decay)
        when = f"with {len(workers)} workers, {when}"
        expect(new_momentum, after, f"the momentum {when}", "decay · momentum + way; way = shared − mean")
        expect(moved, weights, f"the weights {when}", because)
    return "that is all that DiLoCo adds: with rate 1 and decay 0 it is local SGD."
