"""A class's notebooks are run one by one, and nothing that they do reaches the next one or stays behind."""

import nbformat
import pytest

from workshop_utils import grading
from workshop_utils.jobs import JobError

LESSON = "07_wheels.ipynb"
STUB = "answer = ...\nchecks.wheels(answer)"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]


def lesson(answer=STUB, **changes):
    new, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    start = (
        "import os, pathlib, time\n"
        "from types import SimpleNamespace\n"
        "from workshop_utils import exercises\n"
        "checks = SimpleNamespace(wheels=exercises.number(4, 'wheels', 'two axles'))"
    )
    cells = [
        new("# 07 · Wheels", id="first"),
        code(start, id="start"),
        code(answer, id="stub", metadata={"tags": ["exercise"]}),
        code("answer = 4", id="solved", metadata={"tags": ["solution"]}),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.cells += changes.get("added", [])
    return notebook


@pytest.fixture
def hand_in(tmp_path, monkeypatch):
    """Call with a learner's name and an answer to put their notebook into handed_in/."""
    monkeypatch.chdir(tmp_path)
    for folder in ("notebooks", "images", "jobs"):
        (tmp_path / folder).mkdir()
    nbformat.write(lesson(), str(tmp_path / "notebooks" / LESSON))

    def put(learner, answer, **changes):
        folder = tmp_path / "handed_in" / learner
        folder.mkdir(parents=True)
        nbformat.write(lesson(answer, **changes), str(folder / LESSON))

    return put


def grade(tmp_path, **options):
    return [
        row for rows in grading.grade(tmp_path / "handed_in", tmp_path / "out", **options) for row in rows
    ]


def test_each_answer_is_asked_by_the_lessons_own_check(hand_in, tmp_path):
    hand_in("ada", "answer = 4\nchecks.wheels(answer)")
    hand_in("bob", "answer = 3\n'Right: I say so'")  # a check that was changed does not count
    hand_in("cleo", STUB)
    hand_in("dan", "answer = 4 +")
    graded = grade(tmp_path)
    rows = {row["learner"]: (row["state"], row["said"]) for row in graded}
    assert rows["ada"] == ("right", "4 wheels: two axles.")
    assert rows["bob"][0] == "wrong"
    assert "gave 3; it must be 4" in rows["bob"][1]
    assert rows["cleo"][0] == "not yet"
    assert rows["dan"] == ("failed", "NameError: name 'answer' is not defined")
    assert (tmp_path / "out/ada" / LESSON).is_file()
    table = grading.table(graded)
    assert table.set_index("learner").loc["bob", ["exercises", "wrong"]].tolist() == [1, 1]


def test_the_time_is_limited_and_what_was_started_ends_with_it(hand_in, tmp_path):
    hand_in("eve", "import subprocess\nsubprocess.Popen(['sleep', '1000'])\ntime.sleep(1000)")
    (row,) = grade(tmp_path, seconds=15)
    assert (row["state"], row["exercise"]) == ("not reached", "checks.wheels")


def test_cells_that_a_learner_added_run_and_credentials_stay_away(hand_in, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    helper = nbformat.v4.new_code_cell(
        "four = 4\nassert 'AWS_SECRET_ACCESS_KEY' not in os.environ\n"
        "assert 'workshop-grade-' in os.environ['HOME']\npathlib.Path('../jobs/left').write_text('')",
        id="mine",
    )
    hand_in("fay", "answer = four\nchecks.wheels(answer)")
    path = tmp_path / "handed_in/fay" / LESSON
    notebook = nbformat.read(str(path), as_version=4)
    notebook.cells.insert(2, helper)
    nbformat.write(notebook, str(path))
    (row,) = grade(tmp_path)
    assert row["state"] == "right", row
    assert not (tmp_path / "jobs/left").exists()


def test_a_file_that_is_no_notebook_costs_only_its_owner(hand_in, tmp_path):
    hand_in("gus", "answer = 4\nchecks.wheels(answer)")
    (tmp_path / "handed_in/hal").mkdir()
    (tmp_path / "handed_in/hal" / LESSON).write_text("{ half")
    assert {row["learner"]: row["state"] for row in grade(tmp_path)} == {"gus": "right", "hal": "unreadable"}


def test_a_folder_that_holds_nothing_to_grade_is_named(hand_in, tmp_path):
    with pytest.raises(JobError, match="nowhere is no folder"):
        grading.submissions(tmp_path / "nowhere")
    with pytest.raises(JobError, match=r"holds no LEARNER/NOTEBOOK.ipynb, such as ada/07_wheels.ipynb"):
        grading.submissions(tmp_path / "jobs")
    hand_in("ian", STUB)
    (tmp_path / "handed_in/ian" / LESSON).rename(tmp_path / "handed_in/ian/wheels.ipynb")
    with pytest.raises(JobError, match=r"wheels.ipynb answers no lesson"):
        grading.submissions(tmp_path / "handed_in")
