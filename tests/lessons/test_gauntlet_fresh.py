"""The fresh bugs as they are written: twelve, each of which can be planted."""

from __future__ import annotations

import pytest

from workshop_utils.lessons.gauntlet.model import Options
from workshop_utils.lessons.gauntlet.planting import Row, planted, rows

FRESH = rows("fresh")


def test_no_two_of_the_twelve_have_the_same_name_or_the_same_change() -> None:
    assert len(FRESH) == len({bug.name for bug in FRESH}) == len({bug.changes for bug in FRESH}) == 12


def test_some_need_three_directions_or_eight_ranks() -> None:
    assert sum(bug.ranks >= 8 or len(bug.layout) >= 3 for bug in FRESH) >= 4


@pytest.mark.parametrize("bug", FRESH, ids=lambda bug: bug.name)
def test_a_bug_can_be_planted(bug: Row) -> None:
    Options(**bug.options)
    with planted(bug):  # refuses a text that does not occur exactly once
        pass
