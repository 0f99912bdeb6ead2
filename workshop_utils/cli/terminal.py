"""A run as it happens: the lines of its workers, and in a terminal a table below them, one row a worker."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import typer
from rich.console import Console
from rich.live import Live
from rich.segment import Segment, Segments
from rich.table import Table

from workshop_utils.logs import printable
from workshop_utils.runs import STACK, LogLine, Record, Run, RunFailed, RunState

COLUMNS = {"device": "{}", "step": "{:.0f}", "loss": "{:.4f}", "accuracy": "{:.3f}"}
COLUMNS["samples_per_second"] = "{:,.0f}"
REFRESH_SECONDS = 0.25
COLOURS = (36, 35, 32, 33, 34, 31)  # of workers, in turn: codes of ANSI


def show(run: Run) -> None:
    """Follow `run` to its end, and stop it where that is left early. Raises typer.Exit with 1 where it failed."""
    # A notebook forces colours, but it cannot redraw a table.
    redraws = sys.stdout.isatty()
    table = Live(get_renderable=lambda: _table(run), refresh_per_second=1 / REFRESH_SECONDS)
    try:
        with table if redraws else contextlib.nullcontext():
            _follow(run, table.console if redraws else None)
    finally:
        run.stop()
    if run.state is RunState.FAILED:
        typer.echo(f"workshop: {run.reason}", err=True)
        raise typer.Exit(1)
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


def _follow(run: Run, console: Console | None) -> None:
    """Print what comes as it comes: above the table of a `console` each line, without one each report as well."""
    position, waits_for = 0, ""
    while True:
        running = run.state is RunState.RUNNING
        if console is None and run.waits_for != waits_for:
            waits_for = run.waits_for
            print(f"{run.name} waits for {waits_for}" if waits_for else f"{run.name} has started")
        arrivals = list(run.arrivals(start=position))
        position += len(arrivals)
        # Stacks that were asked for are in the message of the run.
        arrivals = [each for each in arrivals if isinstance(each, dict) or each.stream != STACK]
        if console is None:
            sys.stdout.write("".join(f"{text}\n" for text in _plain(arrivals)))
            sys.stdout.flush()
        elif lines := [_coloured(each, run) for each in arrivals if isinstance(each, LogLine)]:
            console.print(Segments([Segment("".join(lines))]), end="", crop=False)
        if not running:
            return
        with contextlib.suppress(TimeoutError, RunFailed):
            run.wait(REFRESH_SECONDS)


def _plain(arrivals: Iterable[LogLine | Record]) -> Iterable[str]:
    for each in arrivals:
        if isinstance(each, LogLine):
            yield str(each)
        elif each["workshop"] == "metric":
            values = ", ".join(f"{name} {text}" for name, text in _values(each).items() if text)
            yield f"[{each['worker']}] {values}"


def _coloured(line: LogLine, run: Run) -> str:
    number = run.workers.index(line.worker) if line.worker in run.workers else -1
    name = f"\x1b[{COLOURS[number % len(COLOURS)]}m[{line.worker}]\x1b[0m"
    return f"{name} {printable(line.text)}\x1b[0m\n"
