"""A plugin for the run of the notebooks: each exercise is not yet solved as it stands, and takes its own solution.

PYTHONPATH=tests pytest -p verdicts --nbval-lax notebooks/04_ring_all_reduce.ipynb
"""

import pytest
from lesson_kinds import best_verdict


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    yield
    tags = item.cell.metadata.get("tags", [])
    if {"exercise", "solution"} & set(tags):
        said = [output.get("data", {}).get("text/plain", "") for output in item.test_outputs]
        expected = best_verdict(item.cell.source) if "solution" in tags else "Not yet: "
        assert any(text.startswith(expected) for text in said), f"{item.cell.id} is answered with {said}"
