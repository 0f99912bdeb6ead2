"""A run as it happens, in a terminal: one line a worker."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from typing import Any

import pandas as pd
import typer
from rich.live import Live
from rich.table import Table

from workshop_utils.runs import Run, RunFailed, RunState

COLUMNS = {"device": "{}", "step": "{:.0f}", "loss": "{:.4f}", "accuracy": "{:.3f}"}
COLUMNS["samples_per_second"] = "{:,.0f}"
REFRESH_SECONDS = 0.25


def show(run: Run) -> None:
    """Follow `run` to its end, and stop it where that is left early. Raises typer.Exit with 1 where it failed."""
    # A notebook forces colours, but it cannot redraw a table.
    redraws = sys.stdout.isatty()
    table = Live(get_renderable=lambda: _table(run), refresh_per_second=1 / REFRESH_SECONDS)
    try:
        with table if redraws else contextlib.nullcontext():
            _print(run, reports=not redraws)
    finally:
        run.stop()
    if run.state is RunState.FAILED:
        typer.echo(f"workshop: {run.reason}", err=True)
        raise typer.Exit(1)
    for line in run.logs():  # such as the step from which it resumed
        if str(line) not in run.notices:
            typer.echo(str(line))
    typer.echo(f"{run.name}: {run.state} in {run.seconds:.1f} s")
    if run.remark:
        typer.echo(run.remark)


def _table(run: Run) -> Table:
    waits = f"; it waits for {run.waits_for}" if run.waits_for else ""
    table = Table(title=f"{run.name}: {run.state}, {run.seconds:.1f} s{waits}", title_justify="left")
    table.add_column("worker")
    table.add_column("state")
    for name in COLUMNS:
        table.add_column(name.replace("samples_per_second", "samples/s"), justify="right")
    latest = run.metrics.reindex(columns=["worker", *COLUMNS]).groupby("worker").last().to_dict("index")
    started = {start["worker"] for start in run.starts}
    for worker in run.workers:
        state = "training" if worker in latest else "started" if worker in started else "starting"
        state = state if run.state is RunState.RUNNING else str(run.state)
        table.add_row(worker, state, *_values(latest.get(worker, {})).values())
    return table


def _values(report: Mapping[Any, Any]) -> dict[str, str]:
    """The columns of a report as text, "" for what it does not name."""
    values = {name: report.get(name, math.nan) for name in COLUMNS}
    return {name: "" if pd.isna(value) else COLUMNS[name].format(value) for name, value in values.items()}


def _print(run: Run, reports: bool) -> None:
    """Each notice, above a table if there is one, and with `reports` each report, as a line of text as it comes."""
    printed, told, waits_for = 0, 0, ""
    while True:
        running = run.state is RunState.RUNNING
        for notice in run.notices[told:]:
            print(notice)
            told += 1
        if reports and run.waits_for != waits_for:
            waits_for = run.waits_for
            print(f"{run.name} waits for {waits_for}" if waits_for else f"{run.name} has started")
        records = run.records[printed:] if reports else []
        for record in records:
            values = ", ".join(f"{name} {text}" for name, text in _values(record).items() if text)
            print(f"[{record['worker']}] {values}")
        printed += len(records)
        sys.stdout.flush()
        if not running:
            return
        with contextlib.suppress(TimeoutError, RunFailed):
            run.wait(REFRESH_SECONDS)
