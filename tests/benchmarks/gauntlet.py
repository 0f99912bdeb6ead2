"""How many planted bugs each check of lesson 17 catches, how many right variants alarm it, and what a case costs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from comparison import Bar, BenchmarkError, Row, rounds

from workshop_utils.lessons.gauntlet.matrix import CHECKS, matrix
from workshop_utils.lessons.gauntlet.planting import rows


def caught(quick: bool) -> Iterator[Row]:
    """Bugs that each check catches beside all of them, right variants that alarm it beside all, and seconds a case."""
    bugs, variants = rows("bugs"), rows("variants")
    if quick:
        bugs, variants = bugs[:4], variants[:4]
    pairs = []
    for _ in rounds(1 if quick else 5, seconds=120):
        started = time.perf_counter()
        table = matrix([*bugs, *variants])
        pairs.append(((time.perf_counter() - started) / len(table), 1.0))
    if failed := [name for name in table.index if table.loc[name].str.startswith("error").any()]:
        raise BenchmarkError(f"{failed[0]} failed: {table.loc[failed[0], [*CHECKS]].to_dict()}")
    of_bugs, of_variants = (table.loc[[row.name for row in each]] for each in (bugs, variants))
    for check in CHECKS:
        number = float((of_bugs[check] == "caught").sum())
        yield Row(f"silent bugs that '{check}' catches, beside all", [(number, len(bugs))], "", Bar())
        number = float((of_variants[check] == "caught").sum())
        yield Row(
            f"right variants that alarm '{check}', beside all", [(number, len(variants))], "", Bar(high=0)
        )
    yield Row("a case of the gauntlet under all checks, beside", pairs, "s", Bar(high=1))
