"""Pipelines and tensor-parallel blocks: ours beside PyTorch's, and the measured bubble beside its formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from workshop_utils.benchmarks.bare import measured_among_ranks
from workshop_utils.benchmarks.comparison import Bar, BenchmarkError, Comparison, NotMeasured, Results
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.parallel.schedule import bubble, bubble_fraction, timeline_of

RANKS = Path(__file__).with_name("model_parallel_ranks.py")
PROCESSES = (2, 4)
JOBS = Path(__file__).parents[2] / "jobs"
MICROBATCHES, REPEATS = 8, 3
SECONDS = {"forward-seconds": 0.08, "backward-seconds": 0.16}
CHUNKS = {"gpipe": 1, "one_f_one_b": 1, "interleaved": 2}
THEIRS = {
    "GPipe": "ScheduleGPipe",
    "1F1B": "Schedule1F1B",
    "tensor-parallel blocks": "DTensor's parallelize_module",
}
AS_FAST = Bar(high=1.1)
AS_FORMULA = Bar.around(1.0, 0.1)

Say = Callable[[str], None]


def measure(say: Say) -> Results:
    """Step times beside PyTorch's, and idle shares beside the formula, for each number of processes."""
    rows: list[Comparison | NotMeasured] = []
    for size in PROCESSES:
        say(f"model_parallel: {size} processes")
        try:
            rows += beside_torch(size, seconds_by_subject(size))
        except BenchmarkError as error:
            rows.append(NotMeasured(f"{size} processes beside PyTorch's", str(error)))
    for size in PROCESSES:
        for schedule in CHUNKS:
            say(f"model_parallel: idle share of {schedule}, {size} processes")
            rows.append(beside_formula(schedule, size, bubbles(schedule, size)))
    return Results(
        "Model parallelism beside PyTorch's, and bubbles beside their formula",
        tuple(rows),
        "A GPT of 4 blocks, 144 units wide, 8 microbatches of 2 sequences of 48, float32. The same processes take "
        "steps of ours (in shared memory) and of PyTorch's (over gloo) in turn, on this machine's cores. For the idle "
        "share, passes sleep 80 and 160 ms instead of computing, so that ranks need no core each. Theirs: the formula, "
        "(p − 1)/(v · m + p − 1).",
    )


def seconds_by_subject(size: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step by subject, of "ours" and "theirs", among `size` ranks.

    Raises:
        BenchmarkError: if the processes cannot be started, or fail.
    """
    found: dict[str, dict[str, list[float]]] = measured_among_ranks(RANKS, size, 2)
    return found


def beside_torch(size: int, seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Comparison]:
    """The rows of step times for one number of processes."""
    return [
        Comparison(
            f"{subject} × {size}: a step, beside {THEIRS[subject]}",
            tuple(1000 * each for each in ways["ours"]),
            tuple(1000 * each for each in ways["theirs"]),
            "ms",
            AS_FAST,
        )
        for subject, ways in seconds.items()
    ]


def bubbles(schedule: str, size: int) -> list[float]:
    """The idle share in each of several runs of the schedule, between real processes whose passes sleep.

    Raises:
        RunFailed: if the job fails.
    """
    job = TrainingJob.load(JOBS / "measure_pipeline").replace(
        workers=size,
        arguments={
            "schedule": schedule,
            "chunks": CHUNKS[schedule],
            "microbatches": MICROBATCHES,
            "repeats": REPEATS,
            **SECONDS,
        },
    )
    with Local(warm=True).launch(job) as run:
        records = run.wait().records
    by_repeat = [[each for each in records if each["step"] == repeat] for repeat in range(REPEATS)]
    return [bubble(timeline_of(each)) for each in by_repeat]


def beside_formula(schedule: str, size: int, found: Sequence[float]) -> Comparison:
    """The row of an idle share, in per cent."""
    formula = 100 * bubble_fraction(size, MICROBATCHES, CHUNKS[schedule])
    return Comparison(
        f"{schedule} × {size}: idle share, beside the formula",
        tuple(100 * each for each in found),
        (formula,) * len(found),
        "%",
        AS_FORMULA,
    )
