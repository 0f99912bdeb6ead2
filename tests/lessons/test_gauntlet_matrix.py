"""Which check catches which planted bug, and which right variants it takes for one, is as committed."""

from pathlib import Path

import pytest
import yaml

from workshop_utils.lessons import gauntlet
from workshop_utils.lessons.gauntlet import matrix
from workshop_utils.lessons.gauntlet.planting import Row, row_of, rows

# All rows are trained by the first test, on a machine that may be busy.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(3000)]

SCORES = yaml.safe_load((Path(gauntlet.__file__).parent / "scores.yaml").read_text(encoding="utf-8"))
ROWS = {kind: rows(kind) for kind in ("bugs", "variants", "fresh")}
LOSS = "workshop_utils.lessons.gauntlet.trainer:Training.mean_loss"
FAILING = {"where": LOSS, "old": "return float(loss[0])", "new": "return 1 / 0"}


@pytest.fixture(scope="module")
def table():
    return matrix.matrix([row for kind in ROWS for row in ROWS[kind]], timeout="2900s")


@pytest.mark.parametrize(("kind", "name"), [(kind, row.name) for kind in ROWS for row in ROWS[kind]])
def test_each_check_says_of_a_row_what_is_committed(kind, name, table):
    verdicts = table.loc[name, [*matrix.CHECKS]].to_dict()
    expected = SCORES["mended"][kind][name]
    assert verdicts == {check: expected[check] for check in verdicts}, table.attrs["findings"][name]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("kind", ROWS)
def test_every_row_has_its_scores(kind, scores):
    assert [*SCORES[scores][kind]] == [row.name for row in ROWS[kind]]


def test_a_run_that_fails_is_told_in_its_row_and_loses_no_other():
    failing = row_of(
        {"name": "failing", "class": "an error", "layout": {"data": 2}, "options": {}, "says": "", **FAILING}
    )
    table = matrix.matrix([failing, Row("right", "none", {"data": 2}, {}, "")])
    reference_free = [check for check in matrix.CHECKS if check != "types"]
    assert table.loc["failing", reference_free].str.contains("ZeroDivisionError").all()
    assert {*table.loc["right", reference_free]} == {"missed"}
    assert table.attrs["processor_seconds"]["right"] > 0
