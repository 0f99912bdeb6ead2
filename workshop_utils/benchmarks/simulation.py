"""How fast virtual time passes: rings of many ranks, and a thousand asynchronous workers, simulated on one core."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from workshop_utils.benchmarks.comparison import Bar, Comparison, Results
from workshop_utils.comm.asynchronous import compute_times, simulate_pushes
from workshop_utils.comm.parameter_server import Arrangement
from workshop_utils.comm.recurrence import ring_finish_seconds
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.simulated import Link, Shape, simulate

LINK = Link(latency_seconds=20e-6, bandwidth_bytes_per_second=1.25e9)
ELEMENTS = 10_000_000
ROUNDS = 3

Say = Callable[[str], None]


def measure(say: Say) -> Results:
    """Processor seconds of each simulation, beside the seconds that it may take."""
    cases = simulations()
    seconds: dict[str, list[float]] = {subject: [] for subject in cases}
    for number in range(ROUNDS):
        for subject, (run, _) in cases.items():
            say(f"round {number + 1} of {ROUNDS}: {subject}")
            started = time.process_time()
            run()
            seconds[subject].append(time.process_time() - started)
    return Results(
        "Virtual time",
        tuple(
            Comparison(subject, tuple(seconds[subject]), (most,) * ROUNDS, "s", Bar(high=1.0))
            for subject, (_, most) in cases.items()
        ),
        "Processor time of one core, beside the most that it may be ('theirs'). Rings: the first two run the "
        "collective's own text, message by message; the next two are the recurrence that says the same, checked equal "
        "to it by a test. Stragglers: log-normal slowness a rank, and log-normal latency a message. Asynchronous: 10⁶ "
        "updates by one parameter server, of log-normal computing times that are drawn within the measured time, "
        "checked by a test against the parameter server's own text.",
    )


def simulations() -> Mapping[str, tuple[Callable[[], object], float]]:
    """What is simulated, by subject, and the seconds that it may take."""

    def program(size: int) -> Callable[[], object]:
        return lambda: simulate(
            size, lambda communicator: ring_all_reduce(communicator, Shape(ELEMENTS)), LINK
        )

    def with_stragglers() -> object:
        slowness = np.random.default_rng(0).lognormal(0.0, 0.3, many)
        return ring_finish_seconds(
            many, 4 * ELEMENTS, LINK, slowness=slowness, combine_bytes_per_second=10e9, jitter=0.3
        )

    def asynchronous() -> object:
        times = compute_times(1_000, 1_000, seconds=0.1, jitter=0.3)
        return simulate_pushes(Arrangement(1, 1_000, 1_000, "asynchronous"), 100_000, times, LINK)

    many = 10_000
    return {
        "64 ranks, the collective's own text": (program(64), 0.1),
        "1,024 ranks, the collective's own text": (program(1024), 15.0),
        "10,000 ranks, recurrence": (lambda: ring_finish_seconds(many, 4 * ELEMENTS, LINK), 1.0),
        "10,000 ranks with stragglers, recurrence": (with_stragglers, 5.0),
        "1,000 asynchronous workers × 1,000 steps": (asynchronous, 1.0),
    }
