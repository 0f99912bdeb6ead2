"""Two ways of doing the same thing, measured in turn, and the bar that their ratio must meet."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class BenchmarkError(RuntimeError):
    """Something could not be measured; the message says what, and why."""


class Bar(NamedTuple):
    """What a ratio must be: at least `low` and at most `high`."""

    low: float = 0.0
    high: float = math.inf


AS_THEORY = Bar(0.9, 1.1)
WITHIN_A_TENTH = Bar(high=1.1)


@dataclass(frozen=True)
class Row:
    """A subject and its pairs, at least one, of ours and theirs, measured one straight after the other.

    What a busy machine does to one of a pair it mostly does to the other, so the ratio is taken pair by pair, and the
    bar is for the median of those ratios: ours over theirs, or with `times_faster` theirs over ours.
    """

    subject: str
    pairs: Sequence[tuple[float, float]]
    unit: str
    bar: Bar
    times_faster: bool = False

    @property
    def ratios(self) -> list[float]:
        """One ratio a pair, in order of size."""
        return sorted(theirs / ours if self.times_faster else ours / theirs for ours, theirs in self.pairs)

    @property
    def is_met(self) -> bool:
        """Whether the median ratio is within the bar."""
        return self.bar.low <= statistics.median(self.ratios) <= self.bar.high

    def __str__(self) -> str:
        ratios, (ours, theirs) = self.ratios, map(statistics.median, zip(*self.pairs, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        return (
            f"{self.subject:<62} {ours:>9.4g} {theirs:>9.4g} {self.unit:<3} "
            f"{statistics.median(ratios):>7.3g} ({low:.3g} to {high:.3g}), {self.bar.low:g} to {self.bar.high:g}: "
            f"{'met' if self.is_met else 'MISSED'}"
        )


def rounds(most: int, seconds: float, least: int = 3) -> Iterator[int]:
    """Number the rounds of a benchmark: `most` of them, or fewer, but `least`, once `seconds` have passed."""
    started = time.monotonic()
    for number in range(most):
        if number >= min(least, most) and time.monotonic() - started > seconds:
            return
        yield number
