"""Checks of lesson 01, one worker; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import (
    NotYet,
    Wrong,
    compare,
    exercise,
    is_missing,
    listed,
    mistakes,
    recognise,
    refuse,
    refuse_any,
)
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.network.devices import EmulatedDevice
from workshop_utils.ranks.results import Results
from workshop_utils.scaling.laws import amdahl_speedup, gustafson_speedup, karp_flatt

Function = Callable[..., Any]

# A law's cases: the first two are compared with typical mistakes.
FRACTIONS: list[tuple[float, ...]] = [(0.05, 8), (0.3, 64), (0.2, 1), (0, 8), (1, 8), (0.001, 1000), (0.1, 7)]
FRACTIONS += [(0.6, 16), (0.5, 2), (0.9, 3)]
SECONDS: list[tuple[float, ...]] = [(10, 4, 4), (3, 1, 5), (2, 1, 2), (1.28, 0.6, 4), (10, 2, 4), (5, 7, 8)]
SECONDS += [(10, 6, 2), (9, 5, 3), (100, 20, 64), (1.28, 2.4, 16), (1, 7, 3)]
# Of section 7's step: of one worker's forward and backward pass, the update's share of it, and what is sent.
STEP_SECONDS, UPDATE_SHARE, IMAGES = 1.2, 1 / 15, 1440
GRADIENT_NBYTES = 8 * 750 * (64 + 10)
BARRIER_NBYTES = 1000  # more than the barriers of a step send


@exercise
def laws(answer: tuple[Function, Function, Function]) -> str:
    """`answer` is Amdahl's speed-up, Gustafson's scaled speed-up, and the fraction of Karp and Flatt."""
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise Wrong("give three functions: (my_amdahl, my_gustafson, my_karp_flatt).")
    references: tuple[Function, ...] = (amdahl_speedup, gustafson_speedup, karp_flatt)
    for own, name, law, cases in zip(
        answer,
        ("my_amdahl({}, {})", "my_gustafson({}, {})", "my_karp_flatt({}, {}, {})"),
        references,
        (FRACTIONS, FRACTIONS, SECONDS),
        strict=True,
    ):
        if is_missing(own):
            raise NotYet(f"write `{name.partition('(')[0]}`, then run this again.")
        recognise(own, cases[:2], mistakes(__name__, name.partition("(")[0]))
        compare(own, law, [(name, "", *case) for case in cases])
    return "Amdahl and Gustafson are one law: with s = g / (g + (1 − g) N) they give the same speed-up."


@measured
def where_it_stops(results: Any) -> float:
    """The number of workers with the shortest median step; as many less one, and more one, must have been tried."""
    seconds: dict[int, list[float]] = {}
    runs = runs_of(results, "train_together", network="100Mbit")
    twice = "`results` has the same run twice; that shows no spread: call `measure` again for each"
    refuse(len({id(run) for run in runs}) < len(runs), f"{twice}.")
    for run in runs:
        seconds.setdefault(len(run), []).append(_seconds_of_step(run))
    once = [workers for workers, each in seconds.items() if len(each) < 2]
    single = f"`results` has only one run each with {listed(sorted(once))} workers, so no spread"
    refuse(once, f"{single}: take two or more.")
    medians = {workers: float(np.median(each)) for workers, each in seconds.items()}
    shortest = min(medians, key=medians.__getitem__)
    untried = {shortest - 1, shortest + 1} - {0, *seconds}
    best = f"of {listed(sorted(seconds))} workers, {shortest} have the shortest step"
    others = listed(sorted(untried))
    refuse(untried, f"{best}; with {others} it may be shorter still: try that, too.")
    return shortest


def _seconds_of_step(run: Results) -> float:
    """The slowest worker's. Raises Wrong where this was not the lesson's step on the lesson's devices."""
    workers, trained = len(run), len(run.arguments.get("labels", ()))
    device = str(EmulatedDevice.parse(f"{STEP_SECONDS}s"))
    refuse_any(
        "`results` has a run on ",
        {
            f"{run.device or 'no emulated device'}; it must be {device}.": run.device != device,
            f"{trained:,} images; it must be {IMAGES:,}, as in section 7.": trained != IMAGES,
        },
    )
    for each in run:
        exchanges = 2 * (workers - 1 if each.rank == 0 else 1) * (workers > 1)  # one warms up
        nbytes = exchanges * GRADIENT_NBYTES
        sent = f"rank {each.rank} of {workers} sent {each.bytes_sent:,.0f} bytes"
        is_other = abs(each.bytes_sent - nbytes) > BARRIER_NBYTES
        refuse(is_other, f"{sent}; by section 7's exchange it sends {nbytes:,}.")
    try:
        seconds = max(float(value[0]) for value in run.values)
    except (TypeError, ValueError, IndexError, KeyError):
        raise Wrong(
            "`results` has a run that returned no seconds; `train_together` returns them first."
        ) from None
    least = STEP_SECONDS * (1 / workers + UPDATE_SHARE)
    refuse(
        not seconds > 0.95 * least,
        f"`results` has a step of {seconds:.2f} s with {workers} workers; their devices alone need {least:.2f} s.",
    )
    return seconds
