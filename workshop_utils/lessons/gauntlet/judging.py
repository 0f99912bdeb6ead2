"""What the checks that people use find in a run, given what each of its ranks has seen.

A judge returns its findings: none in a run that seems right, and None where it has no way to state the row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workshop_utils.lessons.gauntlet import watching
from workshop_utils.lessons.gauntlet.model import Options
from workshop_utils.lessons.gauntlet.planting import Row
from workshop_utils.lessons.gauntlet.traffic import bytes_sent
from workshop_utils.lessons.gauntlet.watching import Seen

FALLEN = 0.97  # of the first loss, what the last ones must be below; right runs come to 0.95 or less
# Relative, in float64, a hundred times the most by which right runs differ: 1e-14, in a gradient.
TOLERANCE = 1e-12

Findings = list[str] | None


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
    return [] if apart <= TOLERANCE else [f"the loss is off by {apart:.1e}"]


def gradients(_: Row, seen: Sequence[Seen]) -> Findings:
    """Which parameters' gradients are not those of one process."""
    return [
        f"{name} of rank {rank} is off by {error:.1e}"
        for rank, each in enumerate(seen)
        for name, error in each.gradient_errors.items()
        if not error <= TOLERANCE
    ]


def invariants(row: Row, seen: Sequence[Seen]) -> Findings:
    """Where ranks contradict each other, what they were handed, or themselves after a restart."""
    restarted = [
        f"{name} of rank {rank} differs by {apart:.1e} after a restart"
        for rank, each in enumerate(seen)
        for name, apart in each.resumed.items()
        if not apart <= TOLERANCE
    ]
    return [*_copies(seen), *_numbers(seen), *_shares(row, seen), *_masks(seen), *restarted]


def _copies(seen: Sequence[Seen]) -> list[str]:
    """Whether what several ranks hold is not the same after some steps."""
    first: dict[str, Tensor] = {}
    found = []
    for each in seen:
        for words, weight in each.weights.items():
            apart = watching.difference(weight, first.setdefault(words, weight))
            found += [] if apart <= TOLERANCE else [f"copies differ by {apart:.1e}: {words}"]
    return found


def _numbers(seen: Sequence[Seen]) -> list[str]:
    """Whether losses or norms differ between ranks, or the norm is not that of all gradients, each counted once."""
    found = []
    for name in ("losses", "norms"):
        told = [getattr(each, name) for each in seen if getattr(each, name)[0] is not None]
        alike = all(np.allclose(each, told[0], rtol=TOLERANCE, atol=0) for each in told)
        found += [] if alike else [f"{name} differ between ranks"]
    squares = {words: square for each in seen for words, square in each.squares.items()}
    norm, told_norm = math.sqrt(sum(squares.values())), known(seen, "norms")[0]
    return found + (
        [] if abs(told_norm / norm - 1) <= TOLERANCE else [f"the norm is {norm}, not {told_norm}"]
    )


def _shares(row: Row, seen: Sequence[Seen]) -> list[str]:
    """Whether replicas' targets are not all that there are, or an evaluation is not the mean of its parts'."""
    sequence = Options(**row.options).sequence
    parts = [watching.counted(targets) for _, targets in watching.evaluation_set(sequence)]
    expected = {"batch": watching.counted(watching.batch_of(0, sequence)[1]), "evaluation": sum(parts)}
    found = [f"{each.total} targets count in the batch" for each in seen if each.total != expected["batch"]]
    for name, number in expected.items():
        total = sum(share for _, share in {(each.replica, each.shares[name]) for each in seen})
        found += [] if total == number else [f"ranks take {total} targets of the {name}, not {number}"]
    whole, *means = known(seen, "evaluations")
    mean = np.average(means, weights=parts)
    return found + (
        [] if abs(whole / mean - 1) <= TOLERANCE else [f"an evaluation is {whole}, its parts' {mean}"]
    )


def _masks(seen: Sequence[Seen]) -> list[str]:
    """Whether dropout is not the same on ranks with the same activations, or the same on others."""
    found, by_layer = [], defaultdict(set)
    for each in seen:
        for layer, mask in each.masks.items():
            by_layer[layer].add(mask)
    for layer, pairs in by_layer.items():
        places, different = len({place for place, _ in pairs}), len({mask for _, mask in pairs})
        found += [f"{different} masks for {places} places: {layer}"] * (not len(pairs) == places == different)
    return found


def placements(row: Row, _: Sequence[Seen]) -> Findings:
    """Whether types of placement refuse the bug, restated for them; right variants are not restated."""
    from workshop_utils.lessons.gauntlet import types  # here, since no other check needs spmd_types

    if row.name not in types.restatements()["bugs"]:
        return None
    verdict = types.verdict(row.name)
    return None if verdict == "outside" else ["the type checker rejects it"] * (verdict == "caught")


def sent(row: Row, seen: Sequence[Seen]) -> Findings:
    """Whether ranks have sent less than the closed forms of their layout say. More may be slow, and right."""
    groups: dict[tuple[int, ...], dict[int, list[Tensor]]] = defaultdict(dict)
    for each in seen:
        ranks, place = each.sharing
        groups[ranks][place] = each.routed
    kept = []
    for group in groups.values():
        in_order = [group[place] for place in sorted(group)]
        kept += [torch.stack(at_once) for at_once in zip(*in_order, strict=True)]
    options = Options(**row.options)
    expected = round(bytes_sent(row.layout, options, watching.batch_of(0, options.sequence), kept))
    total = sum(each.nbytes for each in seen)
    return [f"ranks sent {total:,} bytes, not {expected:,}"] if total < expected else []


def reported(_: Row, seen: Sequence[list[str]]) -> Findings:
    """What a verifier reports on rank 0."""
    return seen[0]


def known(seen: Sequence[Seen], name: str) -> list[float]:
    """Numbers of a run, from the first rank that knows them."""
    numbers: list[float] = next(getattr(each, name) for each in seen if getattr(each, name)[0] is not None)
    return numbers
