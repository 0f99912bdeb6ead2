"""The planted bugs as they are written: every one can be planted, and none is like another in name."""

from __future__ import annotations

import pytest

from workshop_utils.lessons.gauntlet.model import Options
from workshop_utils.lessons.gauntlet.planting import Row, planted, rows

BUGS = rows("bugs")
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


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_can_be_planted(bug: Row) -> None:
    Options(**bug.options)
    with planted(bug):  # refuses a text that does not occur exactly once
        pass
