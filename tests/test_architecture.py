"""The plan of the house is kept: rooms import one way, and what is said of them is what the code does."""

import itertools
import re
from pathlib import Path

import pytest

from workshop_utils import architecture

ROOT = Path(__file__).parents[1]


def package(folder: Path, **modules: str) -> Path:
    """A package called `workshop_utils` with these modules."""
    root = folder / "workshop_utils"
    root.mkdir()
    for name, text in modules.items():
        (root / f"{name}.py").write_text(text)
    return root


def test_every_room_has_one_place_in_the_plan_and_the_plan_has_no_other():
    order = architecture.order()
    assert len(order) == len(set(order))
    assert set(order) == architecture.rooms()


def test_rooms_import_only_from_rooms_before_them_but_for_the_named_exceptions():
    kept, against = architecture.keeps_to_plan(architecture.imports())
    assert against == set(architecture.EXCEPTIONS)
    assert len(kept) > 50  # it was really read


@pytest.mark.parametrize(
    "statement",
    [
        "import workshop_utils.cli",
        "from workshop_utils import cli",
        "from workshop_utils.cli import app",
        "def later():\n    from workshop_utils import cli",
        "if TYPE_CHECKING:\n    from workshop_utils.cli import app",
    ],
)
def test_an_import_against_the_order_is_found_however_it_is_written(statement, tmp_path):
    found = architecture.imports(package(tmp_path, jobs=statement, cli=""))
    assert found == {("jobs", "cli")}
    assert architecture.keeps_to_plan(found) == (set(), {("jobs", "cli")})


def test_imports_along_the_order_and_of_other_packages_are_kept(tmp_path):
    text = "import numpy\nfrom workshop_utils import jobs\nfrom workshop_utils.cli import launch"
    found = architecture.imports(package(tmp_path, cli=text, jobs=""))
    assert architecture.keeps_to_plan(found) == ({("cli", "jobs")}, set())


def test_a_room_without_a_place_is_named():
    with pytest.raises(ValueError, match="attic: no floor"):
        architecture.keeps_to_plan({("attic", "jobs")})


def test_the_chain_in_the_documentation_is_that_of_the_plan():
    text = (ROOT / "docs" / "architecture.md").read_text()
    (chain,) = re.findall(r"^(`jobs` ←.*?)\n\n", text, flags=re.MULTILINE | re.DOTALL)
    floors = [re.findall(r"`(\w+)`", part) for part in chain.split("←")]
    order = architecture.order()
    for before, after in itertools.pairwise(floors):
        assert max(map(order.index, before)) < min(map(order.index, after)), (before, after)


def test_the_documentation_has_as_many_exceptions_as_the_plan():
    text = (ROOT / "docs" / "architecture.md").read_text()
    words = {1: "is one exception", 2: "are two exceptions", 3: "are three exceptions"}
    assert f"There {words[len(architecture.EXCEPTIONS)]}" in text
