"""An emulated network of 100 Mbit/s beside theory: ring, central, parameter servers; Gloo, Horovod and MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop_utils.benchmarks.comparison import Bar, BenchmarkError, Comparison, NotMeasured, Results, rounds
from workshop_utils.comm.central import central_seconds
from workshop_utils.comm.parameter_server import server_bytes_received
from workshop_utils.comm.ring import ring_seconds
from workshop_utils.jobs import Argument, JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network
from workshop_utils.runs import Run
from workshop_utils.scaling.communication import goodput

JOBS = Path(__file__).parents[2] / "jobs"

NETWORK = Network(bandwidth="100Mbit")
WORKERS = (2, 3, 4, 6, 8)
REPEATS = 4  # of which the first is left out: connections are still opening up
LEAST_ROUNDS, MOST_ROUNDS = 1, 2
SECONDS = 150  # after which no further round begins
AS_THEORY = Bar.around(1.0, 0.1)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Contest:
    """A job of jobs/measure_..., the seconds that a repeat must take at least, and its bars."""

    subject: str
    job: str
    arguments: dict[str, Argument]
    seconds: Callable[[int, float], float]  # (workers, bytes per second) to seconds
    bar: Bar | None  # of measured over theory
    growth: Bar | None  # of eight workers' seconds over those of two


def _ring(nbytes: int) -> Callable[[int, float], float]:
    return lambda workers, bandwidth: ring_seconds(workers, nbytes, 0.0, bandwidth)


def _central(nbytes: int) -> Callable[[int, float], float]:
    return lambda workers, bandwidth: central_seconds(workers, nbytes, 0.0, bandwidth)


def _server(nbytes: int) -> Callable[[int, float], float]:
    """All gradients go in, and only then all parameters out."""
    return lambda workers, bandwidth: 2 * server_bytes_received(workers, nbytes) / bandwidth


CONTESTS = (
    Contest("ring", "measure_all_reduce", {"nbytes": 4_000_000}, _ring(4_000_000), AS_THEORY, Bar(high=2.0)),
    # Not ours, so without a bar: that of a ring is what no all-reduce can do better than.
    Contest("gloo", "measure_gloo", {"nbytes": 4_000_000}, _ring(4_000_000), None, None),
    Contest("horovod", "measure_horovod", {"nbytes": 4_000_000}, _ring(4_000_000), None, None),
    Contest("mpi", "measure_mpi", {"nbytes": 4_000_000}, _ring(4_000_000), None, None),
    Contest(
        "central all-reduce",
        "measure_all_reduce",
        {"nbytes": 2_000_000, "algorithm": "central"},
        _central(2_000_000),
        None,
        Bar(low=6.5),
    ),
    Contest(
        "parameter server",
        "measure_parameter_server",
        {"nbytes": 2_000_000},
        _server(2_000_000),
        AS_THEORY,
        Bar(low=3.7),
    ),
)


def measure(say: Say) -> Results:
    """Seconds of each contest with each number of workers, and how they grow from the fewest to the most."""
    rows: list[Comparison | NotMeasured] = []
    measured: dict[tuple[str, int], list[float]] = {}
    failed: dict[str, str] = {}
    for turn in rounds(LEAST_ROUNDS, MOST_ROUNDS, SECONDS):
        for workers in WORKERS:
            for contest in CONTESTS:
                if contest.subject in failed:
                    continue
                say(f"network: round {turn + 1}, {contest.subject}, {workers} workers")
                try:
                    seconds = seconds_of_repeats(contest, workers)
                except (JobError, BenchmarkError) as error:
                    failed[contest.subject] = str(error)
                else:
                    measured.setdefault((contest.subject, workers), []).extend(seconds)
    for contest in CONTESTS:
        if contest.subject in failed:
            rows.append(NotMeasured(contest.subject, failed[contest.subject]))
        else:
            rows += rows_of(contest, [measured[contest.subject, workers] for workers in WORKERS])
    return Results(
        f"An emulated network of {NETWORK.bandwidth}/s",
        tuple(rows),
        "Ours is what was measured, theirs what the links need for the bytes, at the 95.6 % of their rate that TCP "
        "leaves for payload; the first 128 KB of a burst pass at once. Times are of the slowest rank. Growth is the "
        "seconds of 8 workers over those of 2; theory says 1.75 for a ring, 7 for central, 4 for a dedicated server. "
        "Gloo, Horovod and MPI choose their own algorithms, and are shown beside a ring's theory.",
    )


def seconds_of_repeats(contest: Contest, workers: int) -> list[float]:
    """Seconds of each repeat but the first, of its slowest rank.

    Raises:
        JobError: if this machine cannot emulate the network.
        RunFailed: if the job fails.
        BenchmarkError: if it has not reported every repeat.
    """
    servers = contest.job == "measure_parameter_server"
    count: dict[str, Argument] = {"steps" if servers else "repeats": REPEATS}
    job = TrainingJob.load(JOBS / contest.job).replace(
        workers=workers, arguments={**contest.arguments, **count}
    )
    with Local(network=NETWORK, warm=True).launch(job) as run:
        seconds = _slowest(run.wait(), "step_seconds" if servers else "all_reduce_seconds")
    if len(seconds) != REPEATS:
        raise BenchmarkError(f"{contest.subject}: {len(seconds)} of {REPEATS} repeats were reported")
    return seconds[1:]


def _slowest(run: Run, name: str) -> list[float]:
    slowest: dict[int, float] = {}
    for record in run.records:
        if record.get(name) is not None:
            slowest[int(record["step"])] = max(record[name], slowest.get(int(record["step"]), 0.0))
    return [seconds for _, seconds in sorted(slowest.items())]


def rows_of(contest: Contest, measured: Sequence[Sequence[float]]) -> list[Comparison]:
    """One row for each number of workers of WORKERS, beside theory, and one for the growth."""
    rows = []
    for workers, seconds in zip(WORKERS, measured, strict=True):
        theory = contest.seconds(workers, goodput(NETWORK))
        subject = f"{contest.subject}, {workers} workers"
        rows.append(Comparison(subject, tuple(seconds), (theory,) * len(seconds), "s", contest.bar))
    growth = f"{contest.subject}: growth from {WORKERS[0]} to {WORKERS[-1]} workers"
    return [*rows, Comparison(growth, tuple(measured[-1]), tuple(measured[0]), "s", contest.growth)]
