"""Every row of variants.yaml can be planted; that each is right was measured when they were written."""

from workshop_utils.lessons.gauntlet.model import Options
from workshop_utils.lessons.gauntlet.planting import planted, rows
from workshop_utils.parallel.mesh import check

VARIANTS = rows("variants")


def test_names_are_unique():
    assert len({row.name for row in VARIANTS}) == len(VARIANTS)


def test_every_layout_and_every_option_is_there():
    for row in VARIANTS:
        check(row.ranks, **row.layout)
        Options(**row.options)


def test_every_old_text_occurs_once():
    for row in VARIANTS:
        assert row.changes
        with planted(row):  # refuses any other number
            pass
