"""The gauntlet's rows as they are written: every one can be planted, and none is like another in name."""

from __future__ import annotations

import pytest

from workshop_utils.lessons.gauntlet.model import Options
from workshop_utils.lessons.gauntlet.planting import Row, planted, rows
from workshop_utils.parallel.mesh import check

BUGS, FRESH, VARIANTS = rows("bugs"), rows("fresh"), rows("variants")
CLASSES = {
    "a missing or doubled all-reduce of a gradient",
    "a mean where a sum belongs, or by the wrong group's size",
    "a norm or clip over local shards alone",
    "a bias added on every rank",
    "dropout or initialisation with the wrong random state",
    "a stale or uninitialised buffer after a resume",
    "microbatches of unequal tokens weighted alike",
    "position ids of a local chunk",
    "a causal mask of the wrong chunk",
    "router losses counted on one rank",
    "expert gradients averaged over ranks that do not hold them",
    "tied embeddings whose gradient is not summed over stages",
    "the loss scaled twice under accumulation",
    "evaluation over padded duplicates",
}


def test_every_class_of_bugs_is_there_and_no_other() -> None:
    assert {bug.kind for bug in BUGS} == CLASSES


def test_no_two_bugs_have_the_same_name_or_the_same_change() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 26
    assert len({(bug.changes, str(bug.layout)) for bug in BUGS}) == len(BUGS)


def test_some_bugs_need_a_composition_of_four_ranks() -> None:
    assert sum(bug.ranks >= 4 and len(bug.layout) >= 2 for bug in BUGS) >= 6


def test_no_two_of_the_twelve_fresh_bugs_have_the_same_name_or_the_same_change() -> None:
    assert len(FRESH) == len({bug.name for bug in FRESH}) == len({bug.changes for bug in FRESH}) == 12


def test_some_fresh_bugs_need_three_directions_or_eight_ranks() -> None:
    assert sum(bug.ranks >= 8 or len(bug.layout) >= 3 for bug in FRESH) >= 4


def test_names_of_variants_are_unique() -> None:
    assert len({row.name for row in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize("row", [*BUGS, *FRESH, *VARIANTS], ids=lambda row: row.name)
def test_a_row_can_be_planted(row: Row) -> None:
    check(row.ranks, **row.layout)
    Options(**row.options)
    assert row.changes
    with planted(row):  # refuses a text that does not occur exactly once
        pass
