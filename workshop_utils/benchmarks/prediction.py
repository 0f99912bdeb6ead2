"""How far predictions are off: of published curves, by hardware facts alone, and of this machine's own runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from workshop_utils.benchmarks.comparison import Bar, Comparison, NotMeasured, Results
from workshop_utils.jobs import Argument, JobError, TrainingJob
from workshop_utils.network import Network
from workshop_utils.runs import RunFailed
from workshop_utils.scaling import validation
from workshop_utils.scaling.arrays import Numbers
from workshop_utils.scaling.communication import measure as measured
from workshop_utils.scaling.cost import Path as LinkPath
from workshop_utils.scaling.cost import all_reduce_seconds, synchronous_server_seconds
from workshop_utils.scaling.fit import Term, path_terms, size_terms

JOBS = Path(__file__).parents[2] / "jobs"
NETWORK = Network(bandwidth="100Mbit")

# What a fit of own runs may see, and what it must predict besides: sizes and numbers of workers that it has not seen.
FITTED_WORKERS, HELD_WORKERS = (2, 4), (3, 6)
FITTED_NBYTES, HELD_NBYTES = (500_000, 2_000_000), (1_000_000, 4_000_000)

MOST_PUBLISHED, MOST_HARDWARE, MOST_OWN = 10.0, 25.0, 10.0  # per cent
WITHIN = Bar(high=1.0)

Say = Callable[[str], None]


def measure(say: Say) -> Results:
    """Errors in per cent, beside a plain line's, or beside the most that they may be."""
    rows: list[Comparison | NotMeasured] = [*of_published(), *of_hardware()]
    for subject, job, terms in (
        ("own ring", "measure_all_reduce", path_terms(_ring)),
        ("own parameter server", "measure_parameter_server", path_terms(synchronous_server_seconds)),
    ):
        try:
            rows.append(of_own(subject, own_runs(job, say), terms))
        except (JobError, RunFailed) as error:
            rows.append(NotMeasured(subject, str(error)))
    return Results("Errors of predictions, in per cent", tuple(rows), notes())


def of_published() -> list[Comparison]:
    """Published systems, each fitted from three points: ours beside a plain line of latency and bandwidth."""
    ours = validation.scores(validation.published_predictions())["error"]
    line = validation.scores(validation.published_predictions(by_size=size_terms()[:2]))["error"]
    rows = [
        Comparison(f"published, {name}", (100 * ours[name],), (100 * line[name],), "%")
        for name in ours.index
        if name != "all"
    ]
    return [*rows, _at_most("published, all points that were not fitted", ours["all"], MOST_PUBLISHED)]


def of_hardware() -> list[Comparison]:
    """NCCL's curves from hardware facts: nothing fitted, so each stands beside the most that all may be."""
    errors = validation.scores(validation.hardware_predictions())["error"]
    rows = [
        _at_most(f"hardware facts alone, {name}", error, MOST_HARDWARE, None)
        for name, error in errors.items()
        if name != "all"
    ]
    return [*rows, _at_most("hardware facts alone, all points", errors["all"], MOST_HARDWARE)]


def own_runs(name: str, say: Say) -> pd.DataFrame:
    """Seconds by workers and bytes, of a job of jobs/measure_... between real processes behind a slow network.

    Raises:
        JobError: if this machine cannot emulate the network.
        RunFailed: if a run fails.
    """
    servers = name == "measure_parameter_server"
    tables = []
    for workers in sorted(FITTED_WORKERS + HELD_WORKERS):
        for sizes in _sizes_of_runs(workers, servers):
            say(f"prediction: {name}, {workers} workers, {sizes} bytes")
            arguments: dict[str, Argument] = {"nbytes": sizes, "steps" if servers else "repeats": 4}
            job = TrainingJob.load(JOBS / name).replace(workers=workers, arguments=arguments)
            tables.append(measured(job, NETWORK))
    return pd.concat(tables, ignore_index=True)


def _sizes_of_runs(workers: int, servers: bool) -> list[Argument]:
    """An all-reduce job takes all sizes in one run; a parameter server one, and long for large ones of many workers."""
    every = sorted(FITTED_NBYTES + HELD_NBYTES)
    if not servers:
        return [",".join(map(str, every))]
    return [nbytes for nbytes in every if nbytes * workers <= 8_000_000]


def of_own(subject: str, table: pd.DataFrame, terms: tuple[Term, ...]) -> Comparison:
    """The median error over sizes and numbers of workers that the fit has not seen."""

    def seen(rows: pd.DataFrame) -> pd.Series:
        return rows["workers"].isin(FITTED_WORKERS) & rows["nbytes"].isin(FITTED_NBYTES)

    predictions = validation.own_predictions(table, terms, ("workers", "nbytes"), seen)
    held = int((~predictions["fitted"]).sum())
    return _at_most(
        f"{subject}, median of {held} that were left out", validation.median_error(predictions), MOST_OWN
    )


def notes() -> str:
    """What the rows mean, and a sentence on each miss."""
    fitted = "\n".join(f"  {name}: {sentence}" for name, sentence in validation.REASONS.items())
    facts = "\n".join(f"  {name}: {sentence}" for name, sentence in validation.HARDWARE_REASONS.items())
    others = "\n".join(
        f"  {row['what']}: measured {row['measured']:.2f}, predicted {row['predicted_low']:.2f} to "
        f"{row['predicted_high']:.2f} {row['unit']} – {row['why']}"
        for row in validation.other_predictions().to_dict("records")
    )
    return (
        "Errors are geometric means over points that no fit has seen; of own runs, medians. Published systems are "
        "fitted from three points each: the smallest, the largest, the one in the middle of their logarithms, from "
        "64 KB up. Theirs: a plain line of latency and bandwidth through the same three; where there is a bar, the "
        f"most that the error may be. Own runs: {NETWORK.bandwidth}/s, fitted with {FITTED_WORKERS} workers and "
        f"{FITTED_NBYTES} bytes, predicted for {HELD_WORKERS} workers and {HELD_NBYTES} bytes too.\n"
        f"Published, fitted:\n{fitted}\nFrom hardware facts:\n{facts}\nShown, not scored:\n{others}"
    )


def _ring(size: Numbers, nbytes: Numbers, path: LinkPath) -> Numbers:
    return all_reduce_seconds("ring", size, nbytes, path)


def _at_most(subject: str, error: float, most: float, bar: Bar | None = WITHIN) -> Comparison:
    return Comparison(subject, (100 * error,), (most,), "%", bar)
