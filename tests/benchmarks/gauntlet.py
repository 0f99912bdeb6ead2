"""How many planted bugs the checks of lesson 17 catch, how many right variants alarm them, and what a case costs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd
from comparison import Bar, BenchmarkError, Row, rounds

from workshop_utils.lessons.gauntlet.matrix import CHECKS, Check, kept, matrix
from workshop_utils.lessons.gauntlet.planting import Row as Case
from workshop_utils.lessons.gauntlet.planting import rows
from workshop_utils.setup.machine import cores

KINDS = {  # of cases: what alarms at them are, and how many of them all checks together must give
    "bugs": ("silent bugs that {} catches", Bar(low=22 / 24)),
    "fresh": ("fresh bugs that {} catches", Bar(low=10 / 12)),
    "variants": ("right variants that alarm {}", Bar(high=0)),
}
SETS = {
    "verify": {"verify": CHECKS["verify"]},
    "the others": {name: check for name, check in CHECKS.items() if name != "verify"},
}


def caught(quick: bool) -> Iterator[Row]:
    """Cases at which each check alarms, and all checks together, beside all cases; and seconds a case, beside one."""
    cases = {kind: rows(kind)[: 4 if quick else None] for kind in KINDS}
    every, load = [row for kind in KINDS for row in cases[kind]], os.getloadavg()[0]
    measured: dict[str, list[tuple[pd.DataFrame, float, float]]] = {name: [] for name in SETS}
    for _ in rounds(1 if quick else 3, seconds=120, least=1):
        for name, checks in SETS.items():
            measured[name].append(_measured(every, checks))
    table = pd.concat([measured[name][-1][0][[*checks]] for name, checks in SETS.items()], axis=1)
    if failed := [name for name in table.index if table.loc[name].str.startswith("error").any()]:
        raise BenchmarkError(f"{failed[0]} failed: {table.loc[failed[0]].to_dict()}")
    for kind, (subject, bar) in KINDS.items():
        alarms = table.loc[[row.name for row in cases[kind]]] == "caught"
        for check in CHECKS:
            yield _share(subject.format(f"'{check}'"), alarms[check], Bar(high=bar.high))
        yield _share(subject.format("some check"), alarms.any(axis=1), bar)
    at_first = kept("fresh", "first")["verify"] == "caught"
    yield _share("fresh bugs that 'verify' caught before it was mended", at_first, Bar())
    for name, runs in measured.items():
        bar = Bar(high=1) if name == "verify" else Bar()
        subject = f"a case under {name}, begun at load {load:.0f}"
        yield Row(subject, [(seconds, 1.0) for _, seconds, _ in runs], "s", bar)
        subject = f"a case under {name}, processor time by {cores()} cores"
        yield Row(subject, [(seconds, 1.0) for _, _, seconds in runs], "s", Bar())


def _measured(cases: Sequence[Case], checks: Mapping[str, Check]) -> tuple[pd.DataFrame, float, float]:
    """The table; seconds a case, and what they would be if nothing waited, and no core did anything else."""
    started, own = time.perf_counter(), time.process_time()
    table = matrix(cases, checks, timeout="3000s")
    seconds, own = time.perf_counter() - started, time.process_time() - own
    processor = own + sum(table.attrs["processor_seconds"].values())
    return table, seconds / len(cases), processor / cores() / len(cases)


def _share(subject: str, alarms: pd.Series, bar: Bar) -> Row:
    return Row(f"{subject}, beside all", [(float(alarms.sum()), len(alarms))], "", bar)
