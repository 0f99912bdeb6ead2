"""Measurements of one worker and of a run: seconds by phase, memory by stage, samples a second of all workers.

The stopwatch is laid around the phases of a step, and asked for their medians in the end:

    clock = Stopwatch()
    for images, labels in batches:
        with clock("forward"):
            loss = cross_entropy(model(images), labels)
        with clock("backward"):
            loss.backward()
    clock.medians()                    # {"forward": 0.012, "backward": 0.025}
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from workshop_utils.runs import Run


class Stopwatch:
    """Times the phases of a step again and again. `seconds` holds each phase's visits, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the block as one visit to `phase`."""
        started = time.perf_counter()
        yield
        self.seconds.setdefault(phase, []).append(time.perf_counter() - started)

    def medians(self, skip: int = 0) -> dict[str, float]:
        """Seconds of each phase: the median of its visits but the first `skip`, which may hold start-up costs.

        Raises:
            ValueError: if that leaves no visit of some phase.
        """
        for phase, visits in self.seconds.items():
            if len(visits) <= skip:
                raise ValueError(f"{phase} was visited {len(visits)} times, not more than skip={skip}")
        return {phase: statistics.median(visits[skip:]) for phase, visits in self.seconds.items()}


class MemoryMeter:
    """How much memory this process holds, stage after stage, as the operating system counts it (resident set).

    `nbytes` are the readings since the meter was made, by stage.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self.nbytes: dict[str, int] = {}

    def read(self, stage: str) -> int:
        """Note the bytes held more than at the start."""
        self.nbytes[stage] = self._process.memory_info().rss - self._before
        return self.nbytes[stage]


def samples_per_second(run: Run) -> float:
    """What all workers of `run` trained together in a second, by the last report of each, which is of the whole run.

    Raises:
        ValueError: if no step was reported with samples_per_second.
    """
    reports = run.metrics.dropna(subset=["samples_per_second"])
    if reports.empty:
        raise ValueError(f"{run.name} has reported no samples_per_second yet")
    return float(reports.groupby("worker")["samples_per_second"].last().sum())
