"""checked.yaml says what was checked of each launcher: each test that it names exists, and is not skipped for good."""

import ast
from pathlib import Path

import pytest
import yaml

from workshop_utils.launchers.checked import FILE

ROOT = Path(__file__).parents[2]
ROWS = [(launcher, row) for launcher, rows in yaml.safe_load(FILE.read_text()).items() for row in rows]


@pytest.mark.parametrize(
    ("launcher", "row"), ROWS, ids=[f"{launcher}: {row['what']}" for launcher, row in ROWS]
)
def test_what_is_said_to_be_checked_names_a_test_that_exists_and_runs(launcher, row):
    assert set(row) in ({"what", "how"}, {"what", "not checked"})
    how = row.get("how", [])
    for named in [how] if isinstance(how, str) else how:
        file, _, name = named.partition("::")
        tests = {
            node.name: [ast.unparse(mark) for mark in node.decorator_list]
            for node in ast.parse((ROOT / file).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        assert name in tests, named
        # `skipif` depends on the machine; `skip` and `xfail` would make the row untrue everywhere.
        marks = [mark.partition("(")[0] for mark in tests[name]]
        assert not {"pytest.mark.skip", "pytest.mark.xfail"} & set(marks), named
