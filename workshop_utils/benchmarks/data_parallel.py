"""A data parallel step: the workshop's overlapped DDP beside PyTorch's, on the same module and the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workshop_utils.benchmarks.bare import measured_among_ranks
from workshop_utils.benchmarks.comparison import Bar, Comparison, Results

RANKS = Path(__file__).with_name("data_parallel_ranks.py")
PROCESSES = (2, 4)
AT_MOST = Bar(high=1.1)

Say = Callable[[str], None]
Samples = dict[str, tuple[float, ...]]


def measure(say: Say) -> Results:
    """Seconds of a step by each way, by number of processes and module."""
    rows: list[Comparison] = []
    for size in PROCESSES:
        say(f"{size} processes")
        for module, samples in seconds_by_way(size).items():
            rows += comparisons(size, module, samples)
    return Results(
        "A data parallel step, beside PyTorch's DistributedDataParallel",
        tuple(rows),
        "Perceptrons of four hidden layers, 32 images a rank, SGD with momentum, buckets of 1 MB of which "
        "gradients are views, 2 and 4 processes of one thread on this machine. Ways take turns, a step each after "
        "a barrier, and a step lasts as long as the mean of its ranks. All but the last row send through TCP, as "
        "gloo does.",
    )


def seconds_by_way(size: int) -> dict[str, Samples]:
    """Seconds of each step, by module and way.

    Raises:
        BenchmarkError: if the processes cannot be started, or fail.
    """
    measured = measured_among_ranks(RANKS, size, 3, ("--mca", "btl", "^ofi"))
    return {module: {way: tuple(s) for way, s in ways.items()} for module, ways in measured.items()}


def comparisons(size: int, module: str, samples: Samples) -> list[Comparison]:
    """The rows for one module."""
    theirs = tuple(1000 * seconds for seconds in samples["PyTorch"])
    bars = {"overlapped": AT_MOST}
    return [
        Comparison(
            f"{module} × {size}: {way}", tuple(1000 * s for s in samples[way]), theirs, "ms", bars.get(way)
        )
        for way in ("overlapped", "bucketed", "naive", "overlapped, shared memory")
    ]
