"""Which check catches which bug: rows of the gauntlet by columns of checks, measured on real ranks.

    matrix(rows("bugs"))             # "class", and for each check "caught", "missed", "outside" or "error: …"
    matrix(rows("variants"))         # of right runs: "caught" is a false alarm

A check looks at a run on each of its ranks, and then judges what all of them saw. Here are those that people use; one
more is one more entry of CHECKS:

| check | caught if |
| --- | --- |
| falls | the loss has not fallen by 3 % in 16 steps |
| loss_equals | it is not one process's in 8 steps |
| gradients | a parameter's gradient is not one process's in the first step |
| invariants | ranks contradict each other, or a resumed run one that went on; there is no reference |
| types | `spmd_types` rejects the bug, restated for it |
| bytes | ranks have sent other than the closed forms of their layout say |

Dropout is off where a run is compared with one process's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.subset import Subset
from workshop_utils.lessons.gauntlet import watching
from workshop_utils.lessons.gauntlet.model import Options
from workshop_utils.lessons.gauntlet.planting import Row
from workshop_utils.lessons.gauntlet.traffic import bytes_sent
from workshop_utils.lessons.gauntlet.watching import Seen
from workshop_utils.ranks import RanksFailed, on_ranks

RANKS = 8
FALLEN = 0.97  # of the first loss, what the last ones must be below; right runs come to 0.95 or less
# Relative, in float64, a hundred times the most by which right runs differ: 1e-14, in a gradient.
TOLERANCE = 1e-12

Look = Callable[[Communicator, Row], Any]  # on each rank of a row; returns what it saw
Seeing = list[Any] | str  # by rank; or why the run failed
Findings = list[str] | None  # none in a run that seems right; None: the check has no way to state the row
Judge = Callable[[Row, Sequence[Any]], Findings]


class Check(NamedTuple):
    """A column. What is seen by a look is judged by all checks that have it."""

    look: Look
    judge: Judge


def falls(_: Row, seen: Sequence[Seen]) -> Findings:
    """Whether the loss does not fall: its last three are not below the first by a margin."""
    losses = known(seen, "losses")
    last = np.mean(losses[-3:])
    return [] if last < FALLEN * losses[0] else [f"the loss goes from {losses[0]:.3f} to {last:.3f}"]


def loss_equals(row: Row, seen: Sequence[Seen]) -> Findings:
    """Whether losses are not those of one process."""
    losses = known(seen, "compared")
    expected, _ = watching.one_process(tuple(sorted(row.options.items())), len(losses))
    apart = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, expected, strict=True))
    return [f"the loss is off by {apart:.1e}"] if not apart <= TOLERANCE else []


def gradients(_: Row, seen: Sequence[Seen]) -> Findings:
    """Which parameters' gradients are not those of one process."""
    errors = [
        (rank, name, error) for rank, each in enumerate(seen) for name, error in each.gradient_errors.items()
    ]
    return [
        f"{name} of rank {rank} is off by {error:.1e}"
        for rank, name, error in errors
        if not error <= TOLERANCE
    ]


def invariants(row: Row, seen: Sequence[Seen]) -> Findings:
    """Where ranks contradict each other, themselves after a restart, or the batch."""
    found = []
    by_held = defaultdict(list)
    for each in seen:
        for words, weight in each.weights.items():
            by_held[words].append(weight)
    for words, weights in by_held.items():
        apart = max(watching.difference(each, weights[0]) for each in weights)
        found += [f"copies differ by {apart:.1e}: {words}"] * (not apart <= TOLERANCE)
    for name in ("losses", "norms"):
        known_by = [np.array(getattr(each, name)) for each in seen if getattr(each, name)[0] is not None]
        alike = all(np.allclose(each, known_by[0], rtol=TOLERANCE, atol=0) for each in known_by)
        found += [] if alike else [f"{name} differ between ranks"]
    squares = {words: square for each in seen for words, square in each.squares.items()}
    norm, reported = math.sqrt(sum(squares.values())), seen[0].norms[0] or 0.0
    found += [f"the norm is {norm}, not {reported}"] * (not abs(reported / norm - 1) <= TOLERANCE)
    sequence = Options(**row.options).sequence
    in_batch = watching.counted(watching.batch_of(0, sequence)[1])
    in_set = sum(watching.counted(targets) for _, targets in watching.evaluation_set(sequence))
    found += [f"{each.total} targets count, not {in_batch}" for each in seen if each.total != in_batch]
    for name, expected in (("batch", in_batch), ("evaluation", in_set)):
        shares = {(each.replica, each.shares[name]) for each in seen}
        total = sum(share for _, share in shares)
        found += [f"of the {name} {total} targets are counted, not {expected}"] * (total != expected)
    found += [
        f"{name} differs by {apart:.1e} after a restart"
        for each in seen
        for name, apart in each.resumed.items()
        if not apart <= TOLERANCE
    ]
    return found + masks(seen)


def masks(seen: Sequence[Seen]) -> list[str]:
    """Where dropout is not the same on ranks with the same activations, or the same on others."""
    found, by_layer = [], defaultdict(set)
    for each in seen:
        for layer, mask in each.masks.items():
            by_layer[layer].add(mask)
    for layer, pairs in by_layer.items():
        places, different = len({place for place, _ in pairs}), len({mask for _, mask in pairs})
        found += [f"{different} masks for {places} places: {layer}"] * (not len(pairs) == places == different)
    return found


def refused_types(row: Row, _: Sequence[Seen]) -> Findings:
    """Whether types of placement refuse the bug, restated for them; right variants are not restated."""
    from workshop_utils.lessons.gauntlet import types  # here, since no other check needs spmd_types

    if row.name not in types.restatements()["bugs"]:
        return None
    return {"outside": None, "missed": [], "caught": ["the restated program is rejected"]}[
        types.verdict(row.name)
    ]


def sent(row: Row, seen: Sequence[Seen]) -> Findings:
    """Whether ranks have sent other than the closed forms say."""
    groups: dict[tuple[int, ...], dict[int, list[Tensor]]] = defaultdict(dict)
    for each in seen:
        ranks, place = each.sharing
        groups[ranks][place] = each.routed
    kept = [
        torch.stack(list(at_once))
        for group in groups.values()
        for at_once in zip(*(group[place] for place in sorted(group)), strict=True)
    ]
    options = Options(**row.options)
    expected = bytes_sent(row.layout, options, watching.batch_of(0, options.sequence), kept)
    total = sum(each.nbytes for each in seen)
    return [f"ranks sent {total:,} bytes, not {expected:,.0f}"] if total != round(expected) else []


def known(seen: Sequence[Seen], name: str) -> list[float]:
    """By step, from the first rank that knows them."""
    return next(getattr(each, name) for each in seen if getattr(each, name)[0] is not None)


CHECKS: dict[str, Check] = {
    "falls": Check(watching.watch, falls),
    "loss_equals": Check(watching.watch, loss_equals),
    "gradients": Check(watching.watch, gradients),
    "invariants": Check(watching.watch, invariants),
    "types": Check(watching.watch, refused_types),
    "bytes": Check(watching.watch, sent),
}


def matrix(rows: Sequence[Row], checks: Mapping[str, Check] = CHECKS, timeout: str = "600s") -> pd.DataFrame:
    """A row for each of `rows`, by name: its "class" and each check's verdict.

    A verdict is "caught", "missed", "outside" where the check cannot state the row, or "error: …" if the run, or the
    check, failed. `attrs["findings"]` has what was found, by row and check.
    """
    looks = list(dict.fromkeys(check.look for check in checks.values()))
    verdicts: dict[str, dict[str, str]] = {}
    findings: dict[str, dict[str, list[str]]] = {}
    for row, seen in zip(rows, look_at(rows, looks, timeout), strict=True):
        verdicts[row.name], findings[row.name] = {"class": row.kind}, {}
        for name, check in checks.items():
            verdict, found = _verdict(row, check.judge, seen[check.look])
            verdicts[row.name][name], findings[row.name][name] = verdict, found
    table = pd.DataFrame.from_dict(verdicts, orient="index")
    table.attrs["findings"] = findings
    return table


def _verdict(row: Row, judge: Judge, seen: Seeing) -> tuple[str, list[str]]:
    if isinstance(seen, str):
        return f"error: {seen}", []
    try:
        found = judge(row, seen)
    except Exception as error:
        return f"error: {type(error).__name__}: {error}", []
    return "outside" if found is None else "caught" if found else "missed", found or []


def look_at(rows: Sequence[Row], looks: Sequence[Look], timeout: str) -> list[dict[Look, Seeing]]:
    """What the ranks of each row saw, by look, or why it failed. A call that fails is made again in halves."""
    ranks = RANKS if len(rows) > 1 else max(row.ranks for row in rows)
    cases = placed(rows, ranks)
    try:
        by_rank = on_ranks(ranks, see, {"cases": cases, "looks": looks}, timeout=timeout).values
    except RanksFailed as error:
        if len(rows) > 1:
            half = len(rows) // 2
            return [each for part in (rows[:half], rows[half:]) for each in look_at(part, looks, timeout)]
        if len(looks) > 1:
            return [
                {look: seen for each in looks for look, seen in look_at(rows, [each], timeout)[0].items()}
            ]
        return [{looks[0]: str(error).partition("\n")[0]}]
    return [
        {look: [by_rank[rank][number][place] for rank in own] for place, look in enumerate(looks)}
        for number, (_, own) in enumerate(cases)
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
) -> dict[int, list[Any]]:
    """What this rank sees with each look, by the number of the case."""
    torch.set_num_threads(1)
    return {
        number: [look(Subset(communicator, ranks), row) for look in looks]
        for number, (row, ranks) in enumerate(cases)
        if communicator.rank in ranks
    }
