"""Two ranks of each framework are tried: what works, what fails and why, and that nothing of it is left."""

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.ranks import trial

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def wait(_):
    time.sleep(1000)


def full(_):
    raise OSError(28, "No space left on device")


@pytest.fixture
def only(monkeypatch):
    """`only(name, program)` leaves one framework, for lesson 99, whose ranks call `program`."""

    def leave(name, program=trial._program):
        monkeypatch.setattr(trial, "LESSONS", {name: "99"})
        monkeypatch.setattr(trial, "_program", program)

    return leave


def test_the_lessons_of_a_framework_are_those_whose_ranks_use_it():
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        for framework in re.findall(r'framework="(\w+)"', code):
            listed = re.findall(r"(\d\d)(?: to (\d\d))?", trial.LESSONS[framework])
            number = int(path.name[:2])
            assert any(int(first) <= number <= int(last or first) for first, last in listed), path.name


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            wait,
            r"did not end within 3 s. rank 0, rank 1 wait at test_trial.py, line \d+ \(in wait\)\.\n +→ a firewall",
        ),
        (
            full,
            r"raised OSError: \[Errno 28\] No space left on device.*\n +→ A disk is full: free some of it",
        ),
    ],
)
def test_what_fails_is_named_with_its_first_cause_the_lessons_and_what_to_do(program, says, only):
    only("ranks", program)
    (finding,) = trial.results("3s")
    assert str(finding).startswith("✗ ranks           two ranks fail, as would lessons 99: ")
    assert re.search(says, str(finding)), finding


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("name", "end"), [("ranks", ", also over slow links"), ("mpi", "")])
def test_what_works_is_said(name, end, only):
    only(name)
    assert [(each.state, each.text) for each in trial.results()] == [("good", f"two ranks meet{end}")]


def test_what_fails_over_slow_links_alone_breaks_parts_of_lessons(only, monkeypatch):
    only("ranks")
    monkeypatch.setattr(trial, "_meet", lambda _, link, __: link and int(link))
    (finding,) = trial.results()
    assert finding.text.startswith(
        "two ranks fail over slow links, as would lessons 99 in part: invalid literal"
    )


@pytest.mark.processes
def test_the_check_up_s_exit_code_says_whether_a_trial_failed(only):
    only("ranks", full)
    said = CliRunner().invoke(cli.app, ["doctor", "--try"])
    assert (said.exit_code, "as would lessons 99" in said.stdout) == (1, True)
    assert "\n1 to mend before all lessons can run here." in said.stdout
    assert CliRunner().invoke(cli.app, ["doctor"]).exit_code == 0
