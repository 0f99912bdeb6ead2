"""checked.yaml says what was checked of each launcher: each test that it names exists, and is not skipped for good."""

import ast
from pathlib import Path

import yaml

from workshop_utils.launchers.checked import FILE

ROOT = Path(__file__).parents[2]


def test_each_row_names_tests_that_exist_and_run_or_says_why_nobody_could_check():
    rows = [row for rows in yaml.safe_load(FILE.read_text()).values() for row in rows]
    named = set()
    for row in rows:
        assert set(row) in ({"what", "how"}, {"what", "not checked"})
        how = row.get("how", [])
        named.update([how] if isinstance(how, str) else how)
    there = set()
    for file in {test.partition("::")[0] for test in named}:
        for node in ast.parse((ROOT / file).read_text()).body:
            marks = {ast.unparse(mark).partition("(")[0] for mark in getattr(node, "decorator_list", ())}
            # `skipif` depends on the machine; `skip` and `xfail` would make the row untrue everywhere.
            if isinstance(node, ast.FunctionDef) and not marks & {"pytest.mark.skip", "pytest.mark.xfail"}:
                there.add(f"{file}::{node.name}")
    assert named <= there
