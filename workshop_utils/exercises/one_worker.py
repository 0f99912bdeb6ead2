"""Checks of lesson 01, one worker; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

from workshop_utils.exercises import (
    exercise,
    expect,
    number,
)
from workshop_utils.scaling import laws
from workshop_utils.scaling.compute import training_flops
from workshop_utils.scaling.memory import training_memory
from workshop_utils.scaling.published import PEAK_FLOPS_PER_SECOND, UTILISATION


@exercise
def amdahl(answer: Callable[[float, float], float]) -> str:
    """`answer(serial_fraction, workers)` is Amdahl's speed-up."""
    expect(answer(0.05, 1), 1, "speed-up with 1 worker", "one worker is as fast as itself")
    expect(answer(0, 8), 8, "speed-up with serial fraction 0 and 8 workers", "everything is shared")
    expect(answer(1, 8), 1, "speed-up with serial fraction 1 and 8 workers", "nothing can be shared")
    expect(
        answer(0.05, 1000),
        laws.amdahl_speedup(0.05, 1000),
        "speed-up with serial fraction 0.05 and 1,000 workers",
        "the serial part takes 0.05 of the time, the rest 0.95 / 1,000",
    )
    for serial, workers in ((0.5, 2), (0.1, 7), (0.3, 64)):
        expected = laws.amdahl_speedup(serial, workers)
        expect(
            answer(serial, workers), expected, f"speed-up with serial fraction {serial} and {workers} workers"
        )
    return "that is Amdahl's law."


ceiling = number(50, "times", "1 / s is never reached, however many workers there are")
karp_flatt = number(1 / 9, "", "(1/3 − 1/4) / (1 − 1/4), which is what `fit_serial_fraction` solves")
adam_gigabytes = number(
    training_memory(7e9, "adam").total / 1e9,
    "GB",
    "7 billion times 4 bytes, for the parameter, its gradient and Adam's two means",
)
days_on_one_gpu = number(
    training_flops(7e9, 140e9) / (UTILISATION * PEAK_FLOPS_PER_SECOND["H100"]) / 86400,
    "days",
    "6 · N · D is 5.9e21, and the GPU does 4e14 a second",
)
