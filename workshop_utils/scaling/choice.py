"""A layout that can be used, with what becomes of the run, and the numbers of a plan in words."""

from __future__ import annotations

from dataclasses import dataclass

from workshop_utils.scaling.layouts import describe
from workshop_utils.scaling.worker_memory import Layout

DAY, HOUR = 86_400.0, 3_600.0  # in seconds


@dataclass(frozen=True)
class Choice:
    """A layout that can be used, and what becomes of the run with it; times in seconds or hours, prices in dollars."""

    instance: str
    machines: int
    workers: int
    layout: Layout
    memory_nbytes: float
    step_seconds: float
    mfu: float
    hours: float
    dollars: float

    def __str__(self) -> str:
        return (
            f"{self.machines} × {self.instance} ({self.workers} workers): {describe(self.layout)}; "
            f"step {self.step_seconds:.3g} s, MFU {self.mfu:.0%}, {hours_text(self.hours)}, "
            f"{dollars_text(self.dollars)}, {self.memory_nbytes / 1e9:.0f} GB a worker"
        )

    @property
    def cost_text(self) -> str:
        """How long, for how much, and on what."""
        return (
            f"{hours_text(self.hours)} and {dollars_text(self.dollars)} on {self.machines} × {self.instance}"
        )


def count_text(number: float) -> str:
    """Such as "4.19 million"."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,.0f}"


def hours_text(hours: float) -> str:
    """Minutes, hours or days, by what people would say."""
    if hours < 1:
        return f"{hours * 60:.0f} min"
    return f"{hours:,.1f} h" if hours < 48 else f"{hours * HOUR / DAY:,.1f} days"


def dollars_text(dollars: float) -> str:
    """With cents where they count."""
    return f"${dollars:,.2f}" if dollars < 100 else f"${dollars:,.0f}"
