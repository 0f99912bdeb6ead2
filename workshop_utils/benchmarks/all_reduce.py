"""All-reduce: the workshop's ring beside gloo, OpenMPI, and the memory copy that no ring can beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from workshop_utils.benchmarks.bare import measured_among_ranks
from workshop_utils.benchmarks.comparison import Bar, Comparison, Results

RANKS = Path(__file__).with_name("all_reduce_ranks.py")
PROCESSES = (2, 4)
NAMES = {4096: "4 KB", 65536: "64 KB", 1 << 20: "1 MB", 1 << 24: "16 MB", 1 << 26: "64 MB"}

# How many times faster than gloo a ring over sockets must be, and shared memory at its best than each of the others.
SOCKETS_OVER_GLOO = {4096: 3.0, 65536: 3.0, 1 << 20: 1.8, 1 << 24: 1.0, 1 << 26: 1.0}
MEMORY_OVER_GLOO = {1 << 24: 2.0, 1 << 26: 2.0}
MEMORY_OVER_MPI = {4096: 1 / 3, 1 << 24: 1.5, 1 << 26: 1.5}
MEMORY_OVER_COPY = {1 << 24: 0.8, 1 << 26: 0.7}

LARGE = 1 << 24

Say = Callable[[str], None]
Samples = dict[str, tuple[float, ...]]


def measure(say: Say) -> Results:
    """Speed of each ring beside each of the others, by number of processes and size of the array."""
    rows: list[Comparison] = []
    for size in PROCESSES:
        say(f"{size} processes")
        for nbytes, samples in seconds_by_way(size).items():
            rows += comparisons(size, nbytes, samples)
    return Results(
        "All-reduce, times faster than the others",
        tuple(rows),
        "float32, in place, summed by 2 and 4 processes on this machine. Each way is measured in turn, its calls "
        "after a barrier, and at its best: our ranks and OpenMPI's are pinned to a core, gloo's, which have threads, "
        "are not. Sockets: the ring. Shared memory: `tuned_all_reduce`, which is direct for small arrays and one-sided "
        "for larger ones, beside the ring. An array is ordinary where it is not said to be allocated by the "
        "communicator. "
        "Copy limit: the time to copy 2(N − 1)/N of the array while all processes do.",
    )


def seconds_by_way(size: int) -> dict[int, Samples]:
    """Seconds of one call, by size of the array and way to reduce it.

    Raises:
        BenchmarkError: if the processes cannot be started, or fail.
    """
    measured = measured_among_ranks(RANKS, size, 5)
    return {int(nbytes): {way: tuple(s) for way, s in ways.items()} for nbytes, ways in measured.items()}


def comparisons(size: int, nbytes: int, samples: Samples) -> list[Comparison]:
    """The rows for one size of array."""
    copied = tuple(2 * (size - 1) / size * seconds for seconds in samples["copy"])

    def row(ours: str, theirs: str, bars: Mapping[int, float] | None = None) -> Comparison:
        return Comparison(
            f"{NAMES[nbytes]} × {size}: {ours}, beside {theirs}",
            tuple(1000 * seconds for seconds in samples[ours]),
            tuple(1000 * seconds for seconds in (copied if theirs == "copy limit" else samples[theirs])),
            "ms",
            Bar(low=bars[nbytes]) if bars and nbytes in bars else None,
            times_faster=True,
        )

    allocated = "shared memory, allocated"
    rows = [
        row("Unix sockets", "gloo", SOCKETS_OVER_GLOO),
        row("TCP", "gloo"),
        row("plain TCP", "gloo"),
        row(allocated, "gloo", MEMORY_OVER_GLOO),
        row(allocated, "OpenMPI", MEMORY_OVER_MPI),
        row(allocated, "copy limit", MEMORY_OVER_COPY),
        row("shared memory", "OpenMPI"),
        row("shared memory, allocated, ring", "OpenMPI"),
    ]
    return rows if nbytes < LARGE else [*rows, row("shared memory, allocated, pipelined ring", "OpenMPI")]
