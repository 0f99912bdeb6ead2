"""Planning: how long 100,000 layouts take, and how far predicted steps are from those that others have timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from workshop_utils.benchmarks.comparison import Bar, Comparison, Results
from workshop_utils.scaling.catalogue import instance, model
from workshop_utils.scaling.plan import plan_run
from workshop_utils.scaling.published_layouts import RUNS, predicted_flops_per_second
from workshop_utils.scaling.step_time import step_time
from workshop_utils.scaling.worker_memory import RECOMPUTE, Layout, worker_memory

Say = Callable[[str], None]

LAYOUTS = 100_000
MOST_SECONDS = 2.0
ROUNDS = 5
RUN = ("llama-3.1-8b", 100e9, "14d", 200_000.0, ("p5.48xlarge", "trn1.32xlarge"))
WITHIN = 0.15  # of what was published, for every single run


def measure(say: Say) -> Results:
    """Seconds of a search and of its arithmetic, and FLOP/s a device of every published run, each beside its bar."""
    timed: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        for subject, layouts_looked_at in (
            (f"a plan, for {LAYOUTS:,} layouts", search),
            (f"memory and time of {LAYOUTS:,} layouts", evaluate),
        ):
            say(f"round {number + 1} of {ROUNDS}: {subject}")
            started = time.perf_counter()
            looked_at = layouts_looked_at()
            taken = (time.perf_counter() - started) * LAYOUTS / looked_at
            timed.setdefault(subject, []).append(taken)
    rows = [
        Comparison(subject, tuple(seconds), (MOST_SECONDS,) * ROUNDS, "s", Bar(high=1.0))
        for subject, seconds in timed.items()
    ]
    for run in RUNS:
        say(f"{run.name} on {run.devices:,} devices")
        predicted, published = predicted_flops_per_second(run) / 1e12, run.flops_per_second / 1e12
        rows.append(
            Comparison(
                f"{run.name}, {run.devices:,} devices, tensor {run.tensor}, pipeline {run.pipeline}",
                (predicted,), (published,), "TFLOP/s", Bar.around(1.0, WITHIN) if run.scored else None,
            )
        )  # fmt: skip
    return Results(
        "Planning a run",
        tuple(rows),
        "First a whole plan for two kinds of machines, its seconds scaled to 100,000 layouts, most of which are out by "
        "divisibility alone; then memory and time where none is out; both beside the seconds that they may take. The "
        "others are predicted FLOP/s of a device beside published ones, of the model's own arithmetic as "
        "the source counts it: GPT, Narayanan et al. (2021b), table 1, A100; Llama 3.1 405B, Grattafiori et al. "
        "(2024), table 4, H100; the rest torchtitan's, A100, and in the last row H100 with a power limit of 500 W and "
        "half of the products recomputed, neither of which is modelled: no bar. Fitted were two numbers, the kernels' "
        "efficiency on A100 to the GPT rows and on H100 to the first row of 405B.",
    )


def search() -> int:
    """Plan a run; returns how many layouts were looked at."""
    return len(plan_run(*RUN).table)


def evaluate() -> int:
    """Memory and time of made-up layouts, all of which are asked for both; returns how many."""
    generator = np.random.default_rng(0)
    powers = ("data", "tensor", "pipeline", "micro_batch", "microbatches")
    layouts = Layout(
        **{name: 2 ** generator.integers(0, 4, LAYOUTS) for name in powers},
        zero=generator.integers(0, 4, LAYOUTS),
        recompute=generator.choice(RECOMPUTE, LAYOUTS),
    )
    transformer, machine = model(RUN[0]), instance(RUN[-1][0])
    memory, taken = worker_memory(transformer, layouts), step_time(transformer, machine, layouts)
    return int(np.isfinite(memory.total + taken.seconds).sum())
