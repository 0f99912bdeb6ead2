"""Two ways of doing the same thing, measured in turn, and the bar that their ratio must meet."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self


class BenchmarkError(ValueError):
    """Something could not be measured; the message says what, and why."""


def rounds(least: int, most: int, seconds: float) -> Iterator[int]:
    """Number the rounds of a benchmark: `most` of them, or fewer, but `least`, once `seconds` have passed."""
    started = time.monotonic()
    for number in range(most):
        if number >= least and time.monotonic() - started > seconds:
            return
        yield number


@dataclass(frozen=True)
class Bar:
    """What a ratio must be: at least `low` and at most `high`, where they are given."""

    low: float = -math.inf
    high: float = math.inf

    @classmethod
    def around(cls, middle: float, tolerance: float) -> Self:
        """The bar `middle ± tolerance`."""
        return cls(middle - tolerance, middle + tolerance)

    def is_met_by(self, value: float) -> bool:
        """Whether `value` is within the bar; NaN never is."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"{(self.low + self.high) / 2:.2f} ± {(self.high - self.low) / 2:.2f}"
        return f"≤ {self.high:g}" if math.isfinite(self.high) else f"≥ {self.low:g}"


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some values."""

    lower_quartile: float
    median: float
    upper_quartile: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of at least one value; quartiles between two values are interpolated."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Comparison:
    """`ours[i]` and `theirs[i]` were measured one straight after the other, in `unit`.

    What a busy machine does to one of a pair it mostly does to the other, so the ratio is taken pair by pair, and
    the bar is held against the median of those ratios: ours over theirs, or with `times_faster` theirs over ours.
    Without a `bar` it is shown for information.

    Raises:
        BenchmarkError: if there are no pairs, or a value has no partner.
    """

    subject: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    unit: str
    bar: Bar | None = None
    times_faster: bool = False

    def __post_init__(self) -> None:
        if not self.ours or len(self.ours) != len(self.theirs):
            raise BenchmarkError(
                f"{self.subject}: {len(self.ours)} of ours and {len(self.theirs)} of theirs were measured; "
                "there must be as many of each, and at least one"
            )

    @property
    def ratios(self) -> tuple[float, ...]:
        """One ratio a pair."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return tuple(theirs / ours if self.times_faster else ours / theirs for ours, theirs in pairs)

    @property
    def ratio(self) -> Spread:
        """Of the pairs' ratios."""
        return Spread.of(self.ratios)

    @property
    def is_met(self) -> bool:
        """Whether the bar is met; true where there is none."""
        return self.bar is None or self.bar.is_met_by(self.ratio.median)


@dataclass(frozen=True)
class NotMeasured:
    """A row of a table for what could not be measured, and so has not met its bar."""

    subject: str
    reason: str
    is_met: bool = False


@dataclass(frozen=True)
class Results:
    """One table of results; `notes` say what was measured, and how."""

    title: str
    rows: tuple[Comparison | NotMeasured, ...]
    notes: str

    @property
    def missed(self) -> int:
        """How many bars were not met."""
        return sum(not row.is_met for row in self.rows)
