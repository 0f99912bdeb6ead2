"""The frameworks beside each other: the same network and batch, trained by Horovod and by the others.

Their jobs, `jobs/mnist_*`, train one small network with the same data, batch and learning rate, in PyTorch or in
TensorFlow. What differs is how the workers co-operate, and, between the two frameworks, what a step costs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from workshop_utils.benchmarks.comparison import BenchmarkError, Comparison, NotMeasured, Results, rounds
from workshop_utils.jobs import JobError, StrategyName, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.runs import RunFailed
from workshop_utils.scaling.sweep import measurement_of
from workshop_utils.strategies import strategy_of

JOBS = Path(__file__).parents[2] / "jobs"

OTHERS: tuple[StrategyName, ...] = ("torch_ddp", "multi_worker_mirrored", "parameter_server")
WORKERS = (1, 2, 4)
BATCH = 32
EPOCHS = 6
LEAST_ROUNDS, MOST_ROUNDS = 1, 3
SECONDS = 150  # after which no further round begins

Say = Callable[[str], None]


def measure(say: Say) -> Results:
    """Samples a second of Horovod and of each other way, one straight after the other, with 1, 2 and 4 workers."""
    contests = [(other, workers) for workers in WORKERS for other in OTHERS if _exists(other, workers)]
    speeds: dict[tuple[StrategyName, int], list[tuple[float, float]]] = {pair: [] for pair in contests}
    failed: dict[tuple[StrategyName, int], str] = {}
    for turn in rounds(LEAST_ROUNDS, MOST_ROUNDS, SECONDS):
        for workers in WORKERS:
            others = [other for other, count in contests if count == workers and (other, count) not in failed]
            try:
                horovod = _say_and_measure(say, turn, "horovod", workers)
            except (RunFailed, BenchmarkError) as error:
                failed |= {(other, workers): str(error) for other in others}
                continue
            for other in others:
                try:
                    speeds[other, workers].append((horovod, _say_and_measure(say, turn, other, workers)))
                except (RunFailed, BenchmarkError) as error:
                    failed[other, workers] = str(error)
    return Results(
        "Horovod beside the frameworks' own ways",
        tuple(row_of(pair, speeds[pair], failed.get(pair)) for pair in contests),
        f"Samples a second of all workers together, a perceptron of 64, 128 and 10 units, {BATCH} images a worker and "
        "step. Ours is Horovod in PyTorch. torch_ddp is PyTorch too; the others are TensorFlow, whose step itself "
        "costs more for so small a network: compare how a column changes with the workers. There is no bar: which is "
        "faster depends on model, network and machine.",
    )


def row_of(
    pair: tuple[StrategyName, int], speeds: Sequence[tuple[float, float]], failure: str | None
) -> Comparison | NotMeasured:
    """One row of the table, from pairs of Horovod's speed and the other's."""
    other, workers = pair
    subject = f"{workers} worker{'s' * (workers > 1)}: horovod, beside {other}"
    if failure is not None:
        return NotMeasured(subject, failure)
    ours, theirs = zip(*speeds, strict=True)
    return Comparison(subject, ours, theirs, "samples/s")


def job_of(strategy: StrategyName, workers: int) -> TrainingJob:
    """The job of `strategy` as it is measured."""
    arguments = {"epochs": EPOCHS, "batch-size": BATCH}
    return TrainingJob.load(JOBS / f"mnist_{strategy}").replace(workers=workers, arguments=arguments)


def _exists(strategy: StrategyName, workers: int) -> bool:
    try:
        strategy_of(job_of(strategy, workers))
    except JobError:
        return False  # TensorFlow's parameter server starts at two
    return True


def _say_and_measure(say: Say, turn: int, strategy: StrategyName, workers: int) -> float:
    say(f"frameworks: round {turn + 1}, {strategy}, {workers} workers")
    return samples_per_second(job_of(strategy, workers))


def samples_per_second(job: TrainingJob) -> float:
    """Of all workers together, without the first step.

    Raises:
        RunFailed: if the job fails.
        BenchmarkError: if it has reported no speed.
    """
    with Local().launch(job) as run:
        speed = measurement_of(job, run.wait()).samples_per_second
    if not speed > 0:
        raise BenchmarkError(f"{job.name} has reported no samples per second")
    return speed
