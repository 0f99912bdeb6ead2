"""What a table of measurements says: medians and ranges, speed-up, weak and strong efficiency, communication.

Definitions, with t(N) the median step of N workers and N₁ the fewest that were measured, 1 where possible:

- **strong scaling**: the batch of all stays as it is, each worker takes an N-th. Speed-up N₁ · t(N₁) / t(N) times, of N
  at best; efficiency is speed-up over N (Amdahl's question).
- **weak scaling**: each worker's batch stays as it is, so that of all grows. Efficiency t(N₁) / t(N), 1 at best; the
  speed-up, in examples trained in a second, is N times that (Gustafson's question).

t(N₁) is that of the fastest strategy: a strategy that is slow with one worker must not look good with two.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from workshop_utils.jobs import JobError

# Of the columns of `experiment.measure_all`, those that say what was run, and not how it went.
MEASURED = {
    "key", "repeat", "state", "reason", "run_seconds", "measured_at", "cached", "seconds", "step_seconds",
    "compute_seconds", "transfer_seconds", "waiting_seconds",
    "other_seconds", "bytes_sent", "bytes_received", "server_bytes_received", "samples_per_second",
    "first_step_seconds", "accuracy", "loss", "host_share",
}  # fmt: skip
# Of those of `scaling`, what a reader is shown.
SHOWN = (
    "strategy", "workers", "network", "scaling", "gradient_nbytes", "batch_size", "repeats", "step_seconds",
    "lowest", "highest", "speedup", "efficiency", "communication_share", "bytes_sent", "server_bytes_received",
    "samples_per_second", "first_step_seconds", "accuracy",
)  # fmt: skip


def settings_of(table: pd.DataFrame) -> list[str]:
    """The columns of `table` that say what was run."""
    return [name for name in table.columns if name not in MEASURED]


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row a setting: medians over its repeats, their number and range; failed runs are left out.

    Returns:
        What was run; the medians; `repeats`; `lowest` and `highest` step, in seconds.

    Raises:
        JobError: if no run succeeded.
    """
    groups = _succeeded(table).groupby(settings_of(table), dropna=False, sort=False)
    numbers = [name for name in MEASURED & set(table.columns) if pd.api.types.is_float_dtype(table[name])]
    medians = groups[sorted(numbers)].median()
    spread = groups["step_seconds"].agg(repeats="size", lowest="min", highest="max")
    return medians.join(spread).reset_index()


def _succeeded(table: pd.DataFrame) -> pd.DataFrame:
    """The runs that have `step_seconds`; raises JobError where there is none, with what went wrong."""
    if "step_seconds" in table:
        fine = table[(table["state"] == "succeeded") & table["step_seconds"].notna()]
        if len(fine):
            return fine
    reasons = failures(table)
    if reasons:
        raise JobError(f"no run succeeded; the first of {len(reasons)} that failed: {reasons[0]}")
    raise JobError("no run has reported step_seconds; the job's script must, through place.report")


def scaling(table: pd.DataFrame) -> pd.DataFrame:
    """`summary(table)` with `speedup`, `efficiency` and `communication_share`; weak and strong by the column `scaling`.

    Rows whose t(N₁) was not measured for their own sizes and network have NaN.
    """
    rows = summary(table)
    # What is compared is the same but for the strategy and the number of workers; with strong scaling each worker's
    # batch shrinks, so the batch of all is compared instead.
    apart = {"strategy", "workers", "servers", "emulation", "batch_size"}
    alike = [rows[name] for name in settings_of(table) if name not in apart]
    strong = rows["scaling"] == "strong"
    if "batch_size" in rows:
        rows["batch_size"] = rows["batch_size"].astype(int)
        alike.append(rows["batch_size"] * rows["workers"].where(strong, 1))
    fewest = rows["workers"].groupby(alike, dropna=False).transform("min")
    at_first = rows["step_seconds"].where(rows["workers"] == fewest)
    times_faster = at_first.groupby(alike, dropna=False).transform("min") / rows["step_seconds"]
    rows["efficiency"] = times_faster.where(~strong, times_faster * fewest / rows["workers"])
    rows["speedup"] = rows["efficiency"] * rows["workers"]
    communicating = rows.reindex(columns=["transfer_seconds", "waiting_seconds"]).sum(axis=1, min_count=2)
    rows["communication_share"] = communicating / rows["step_seconds"]
    return rows


def failures(table: pd.DataFrame) -> Sequence[str]:
    """A sentence for each run that failed."""
    failed = table[table["state"] != "succeeded"]
    return [f"{row['strategy']} with {row['workers']}: {row['reason']}" for _, row in failed.iterrows()]
