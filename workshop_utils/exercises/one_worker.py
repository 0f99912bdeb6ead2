"""Checks of lesson 01, one worker; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

from workshop_utils.exercises import (
    exercise,
    expect,
    number,
    recognise,
)
from workshop_utils.scaling import laws
from workshop_utils.scaling.compute import training_flops
from workshop_utils.scaling.memory import training_memory

_OTHER_LAWS = {
    "that is Gustafson's law, in which the work grows with the workers; here the same work is shared.": (
        lambda s, n: s + (1 - s) * n
    ),
    "that is the ceiling, of endlessly many workers; where does their number come in?": lambda s, n: 1 / s,  # noqa: ARG005
    "that is the time, if one worker needs 1; the speed-up is one over it.": lambda s, n: s + (1 - s) / n,
    "the parts are swapped: s cannot be shared, and 1 − s is divided by the workers.": (
        lambda s, n: 1 / (1 - s + s / n)
    ),
    "brackets: the whole sum, s + (1 − s) / N, belongs below the line.": lambda s, n: 1 / s + (1 - s) / n,
    "here nothing but the shared part takes time; the serial part s has to be added to it.": (
        lambda s, n: n / (1 - s)
    ),
    "that is the number of workers: it would be right if nothing were serial.": lambda s, n: n,  # noqa: ARG005
}


@exercise
def amdahl(answer: Callable[[float, float], float]) -> str:
    """`answer(serial_fraction, workers)` is Amdahl's speed-up."""
    recognise(answer, [(0.05, 8), (0.3, 64)], _OTHER_LAWS)
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


ceiling = number(
    50,
    "times",
    "1 / s is never reached, however many workers there are",
    {
        2: "that is s in per cent; the ceiling is 1 / s, with s as a fraction",
        0.5: "1 / 2; but s is 2 per cent, that is 0.02",
        0.02: "that is s itself; the ceiling is what is left when the shared part takes no time: 1 / s",
        98: "that is the part that can be shared, in per cent; what remains is the other part, and it takes s",
        1.02: "that is 1 / (1 − s); but it is the part 1 − s that endlessly many workers make vanish",
    },
)
karp_flatt = number(
    1 / 9,
    "",
    "(1/3 − 1/4) / (1 − 1/4), which is what `fit_serial_fraction` solves",
    {
        0.25: "that is what is lost of the ideal speed-up, 1 − 3/4; solve 3 = 1 / (s + (1 − s)/4) for s",
        0.75: "that is the efficiency, 3/4; solve 3 = 1 / (s + (1 − s)/4) for s",
        1 / 3: "that is the time of four workers, if one needs 1; part of it is shared work, (1 − s)/4",
        1 / 12: "1/3 − 1/4 is (1 − 1/4) · s, not s; divide once more",
    },
)
adam_gigabytes = number(
    training_memory(7e9, "adam").total / 1e9,
    "GB",
    "7 billion times 4 bytes, for the parameter, its gradient and Adam's two means",
    {
        28: "those are the parameters alone; there are gradients, and two means of Adam's",
        56: "only half of it: parameters, gradients and Adam's *two* means make four times 4 bytes",
        84: "three of four: parameters, gradients, and Adam's *two* means",
        7: "those are the parameters, in billions; each takes 4 bytes, and so do three numbers beside it",
        448: "4 · 4 is 16 bytes a parameter; this is 64",
    },
)
days_on_one_gpu = number(
    training_flops(7e9, 140e9) / 4e14 / 86400,
    "days",
    "6 · N · D is 5.9e21, and the GPU does 4e14 a second",
    {
        56.7: "2 · N · D is the forward pass alone; the backward pass takes twice as much",
        113.4: "4 · N · D is the backward pass alone",
        28.36: "N · D times what? Forward 2, backward 4",
        1.47e7: "those are seconds; a day has 86,400",
        4083: "those are hours",
    },
)
