"""Which check catches which bug: rows of the gauntlet by columns of checks, measured on real ranks.

    matrix(rows("bugs"))             # "class", and for each check "caught", "missed", "outside" or "error: …"
    matrix(rows("variants"))         # of right runs: "caught" is a false alarm
    matrix(rows("fresh"))            # bugs that were planted when all checks were there

A check looks at a run on each of its ranks, and then judges what all of them saw. Here are those that people use; one
more is one more entry of CHECKS:

| check | caught if |
| --- | --- |
| falls | the loss has not fallen by 3 % in 16 steps |
| loss_equals | it is not one process's in 8 steps |
| gradients | a parameter's gradient is not one process's in the first step |
| invariants | ranks contradict each other, or a resumed run one that went on; there is no reference |
| types | `spmd_types` rejects the bug, restated for it |
| bytes | ranks have sent less than the closed forms of their layout say |
| verify | `parallel.verify` finds a number that is not one process's, in a cut of the layout |

Dropout is off where a run is compared with one process's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
import yaml

from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.subset import Subset
from workshop_utils.lessons.gauntlet import judging, planting
from workshop_utils.lessons.gauntlet.planting import Row
from workshop_utils.lessons.gauntlet.verified import verified
from workshop_utils.lessons.gauntlet.watching import watch
from workshop_utils.ranks import RanksFailed, on_ranks

RANKS = 8

Look = Callable[[Communicator, Row], Any]  # on each rank of a row; returns what it saw
Judge = Callable[[Row, Sequence[Any]], judging.Findings]
Seeing = list[Any] | str  # what a look saw, by rank; or why the run failed


class Check(NamedTuple):
    """A column. What is seen by a look is judged by all checks that have it."""

    look: Look
    judge: Judge


CHECKS: dict[str, Check] = {
    "falls": Check(watch, judging.falls),
    "loss_equals": Check(watch, judging.loss_equals),
    "gradients": Check(watch, judging.gradients),
    "invariants": Check(watch, judging.invariants),
    "types": Check(watch, judging.placements),
    "bytes": Check(watch, judging.sent),
    "verify": Check(verified, judging.reported),
}


def matrix(rows: Sequence[Row], checks: Mapping[str, Check] = CHECKS, timeout: str = "600s") -> pd.DataFrame:
    """A row for each of `rows`, by name: its "class" and each check's verdict.

    A verdict is "caught", "missed", "outside" where the check cannot state the row, or "error: …" if the run, or the
    check, failed. `attrs["findings"]` has what was found, by row and check; `attrs["processor_seconds"]`, by row, what
    its ranks have taken of the processor, which depends less than time on how busy the machine is.
    """
    looks = list(dict.fromkeys(check.look for check in checks.values()))
    verdicts: dict[str, dict[str, str]] = {}
    findings: dict[str, dict[str, list[str]]] = {}
    processor_seconds = {}
    for row, (seen, seconds) in zip(rows, look_at(rows, looks, timeout), strict=True):
        verdicts[row.name], findings[row.name] = {"class": row.kind}, {}
        processor_seconds[row.name] = seconds
        for name, check in checks.items():
            verdict, found = _verdict(row, check.judge, seen[check.look])
            verdicts[row.name][name], findings[row.name][name] = verdict, found
    table = pd.DataFrame.from_dict(verdicts, orient="index")
    table.attrs |= {"findings": findings, "processor_seconds": processor_seconds}
    return table


def kept(
    kind: Literal["bugs", "variants", "fresh"], scores: Literal["first", "mended"] = "mended"
) -> pd.DataFrame:
    """The table of these rows as `scores.yaml` has it: by checks as first written, or as they are now."""
    text = Path(__file__).with_name("scores.yaml").read_text(encoding="utf-8")
    table = pd.DataFrame.from_dict(yaml.safe_load(text)[scores][kind], orient="index")
    table.insert(0, "class", [row.kind for row in planting.rows(kind)])
    return table


def _verdict(row: Row, judge: Judge, seen: Seeing) -> tuple[str, list[str]]:
    if isinstance(seen, str):
        return f"error: {seen}", []
    try:
        found = judge(row, seen)
    except Exception as error:
        return f"error: {type(error).__name__}: {error}", []
    return "outside" if found is None else "caught" if found else "missed", found or []


def look_at(
    rows: Sequence[Row], looks: Sequence[Look], timeout: str
) -> list[tuple[dict[Look, Seeing], float]]:
    """What the ranks of each row saw, by look, or why it failed; and their seconds of the processor.

    A call that fails is made again in halves, and at last look by look.
    """
    ranks = RANKS if len(rows) > 1 else max(row.ranks for row in rows)
    cases = placed(rows, ranks)
    try:
        by_rank = on_ranks(ranks, see, {"cases": cases, "looks": looks}, timeout=timeout).values
    except RanksFailed as error:
        if len(rows) > 1:
            half = len(rows) // 2
            return [each for part in (rows[:half], rows[half:]) for each in look_at(part, looks, timeout)]
        if len(looks) > 1:
            parts, seconds = zip(*(look_at(rows, [each], timeout)[0] for each in looks), strict=True)
            return [({look: seen for part in parts for look, seen in part.items()}, sum(seconds))]
        return [({looks[0]: str(error).partition("\n")[0]}, 0.0)]
    of_cases = [[by_rank[rank][number] for rank in own] for number, (_, own) in enumerate(cases)]
    return [
        (
            {look: [seen[place] for seen, _ in of_ranks] for place, look in enumerate(looks)},
            sum(seconds for _, seconds in of_ranks),
        )
        for of_ranks in of_cases
    ]


def placed(rows: Sequence[Row], ranks: int) -> list[tuple[Row, list[int]]]:
    """Each row with neighbouring ranks, those that have least to do so far; all ranks keep to the order of rows."""
    load, cases = np.zeros(ranks), []
    for row in rows:
        firsts = range(0, ranks - row.ranks + 1, row.ranks)
        first = min(firsts, key=lambda first: load[first : first + row.ranks].max())
        own = slice(first, first + row.ranks)
        load[own] = load[own].max() + row.ranks
        cases.append((row, [*range(ranks)[own]]))
    return cases


def see(
    communicator: Communicator, cases: Sequence[tuple[Row, list[int]]], looks: Sequence[Look]
) -> dict[int, tuple[list[Any], float]]:
    """What this rank sees with each look, and its seconds of the processor, by the number of the case."""
    torch.set_num_threads(1)
    noted = {}
    for number, (row, ranks) in enumerate(cases):
        if communicator.rank in ranks:
            started = time.process_time()
            seen = [look(Subset(communicator, ranks), row) for look in looks]
            noted[number] = seen, time.process_time() - started
    return noted
