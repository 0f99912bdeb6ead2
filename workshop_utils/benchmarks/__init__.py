"""What the workshop's own machinery costs, measured beside the tools that it stands in for: `workshop bench`.

Each benchmark measures ours and theirs in turn, several times in one run, and holds the median of their ratio
against a bar. Times depend on the machine and on what else it does; ratios much less.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from workshop_utils.benchmarks import (
    all_reduce,
    data_parallel,
    frameworks,
    launch,
    memory_per_rank,
    model_parallel,
    network,
    recovery,
    throughput,
)
from workshop_utils.benchmarks.comparison import BenchmarkError, Comparison, NotMeasured, Results, Spread
from workshop_utils.machine import cores
from workshop_utils.runs import RunFailed

Benchmark = Callable[[Callable[[str], None]], Results]

BENCHMARKS: dict[str, Benchmark] = {
    "launch": launch.cold,
    "warm": launch.warm,
    "throughput": throughput.measure,
    "network": network.measure,
    "all_reduce": all_reduce.measure,
    "frameworks": frameworks.measure,
    "data_parallel": data_parallel.measure,
    "memory_per_rank": memory_per_rank.measure,
    "model_parallel": model_parallel.measure,
    "recovery": recovery.measure,
}

WIDTH = 120  # of a table that goes to a file


def run(names: Sequence[str] | None = None, benchmarks: Mapping[str, Benchmark] = BENCHMARKS) -> int:
    """Measure the benchmarks called `names`, all of them by default, and print a table each.

    Returns the exit code: 0 where every bar was met, 1 where one was missed or could not be measured.

    Raises:
        BenchmarkError: if there is no benchmark of a name.
    """
    for name in names or ():
        if name not in benchmarks:
            raise BenchmarkError(f"benchmark is {name!r}; it must be one of {', '.join(benchmarks)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(_machine(), highlight=False)
    missed = 0
    for name in names or benchmarks:
        started = time.monotonic()
        with console.status(name) as status:
            try:
                results = benchmarks[name](status.update)
            except (BenchmarkError, RunFailed, OSError) as error:
                results = Results(name, (NotMeasured(name, str(error)),), "")
        missed += results.missed
        show(results, console)
        console.print(f"[dim]{name} took {time.monotonic() - started:.0f} s[/dim]\n", highlight=False)
    console.print("Every bar was met." if not missed else f"Bars missed: {missed}.", highlight=False)
    return 1 if missed else 0


def show(results: Results, console: Console) -> None:
    """Print `results` as a table: both medians, their ratio with its quartiles, the bar, and whether it was met."""
    table = Table(title=results.title, title_justify="left", caption=results.notes, caption_justify="left")
    table.add_column("", ratio=1)
    for heading in ("ours", "theirs", "ratio (quartiles)", "bar", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results.rows:
        if isinstance(row, NotMeasured):
            table.add_row(f"{escape(row.subject)}: {escape(row.reason)}", "–", "–", "–", "", "[red]missed")
        else:
            table.add_row(*_cells(row))
    console.print(table, highlight=False)


def _cells(row: Comparison) -> tuple[str, ...]:
    ratio, digits = row.ratio, 1 if row.ratio.median >= 10 else 3
    quartiles = f"({ratio.lower_quartile:.{digits}f} – {ratio.upper_quartile:.{digits}f})"
    verdict = "" if row.bar is None else "[green]met" if row.is_met else "[red]missed"
    return (
        escape(row.subject),
        _value(Spread.of(row.ours).median, row.unit),
        _value(Spread.of(row.theirs).median, row.unit),
        f"{ratio.median:.{digits}f} {quartiles}",
        str(row.bar or "–"),
        verdict,
    )


def _value(value: float, unit: str) -> str:
    if unit == "s" and value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"


def _machine() -> str:
    """What the figures were taken on, and whether it was quiet."""
    count = cores()
    load = os.getloadavg()[0]
    quiet = "" if load < count / 2 else ": it is busy with other work, so look at ratios, not at times"
    return f"{platform.machine()}, {count} cores, Python {platform.python_version()}, load {load:.1f}{quiet}"
