"""A class's notebooks are run one by one, and nothing that they do reaches the next one or stays behind."""

import subprocess
import tempfile
from pathlib import Path

import nbformat
import pytest

from workshop_utils.jobs import JobError
from workshop_utils.lessons import editions, grading

LESSON = "07_wheels.ipynb"
STUBS = [f"answer{number} = ...\nchecks.wheels(answer{number})" for number in range(4)]
OPEN = "predicted, measured, why = ..., ..., ...\nchecks.spokes(predicted, measured, why)"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]


def lesson(answers=(*STUBS, OPEN)):
    new, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    start = (
        "import os, pathlib, time\n"
        "from types import SimpleNamespace\n"
        "from workshop_utils.lessons import checks as package\n"
        "from workshop_utils.lessons.checks.open_question import OpenQuestion\n"
        "@package.exercise\n"
        "def wheels(answer):\n"
        "    package.expect(answer, 4, 'your answer', 'two axles')\n"
        "    return '4 wheels: two axles.'\n"
        "checks = SimpleNamespace(\n"
        "    wheels=wheels,\n"
        "    spokes=OpenQuestion('spokes', (20, 40), 'A spoke carries little.'),\n"
        ")"
    )
    cells = [new("# 07 · Wheels", id="first"), code(start, id="start")]
    for number, answer in enumerate(answers):
        cells.append(code(answer, id=f"stub{number}", metadata={"tags": ["exercise"]}))
        if number == 1:
            cells.append(code("assert answer1 in (4, ...)  # the lesson goes on with the answer", id="uses"))
        cells.append(code(f"answer{number} = 4", id=f"solved{number}", metadata={"tags": ["solution"]}))
    return nbformat.v4.new_notebook(cells=cells)


@pytest.fixture
def tmp_path():
    """A folder outside that of temporary files, of which the sandbox shows nothing in any case."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


@pytest.fixture
def hand_in(tmp_path, monkeypatch):
    """Call with a learner's name and answers to put their notebook into handed_in/."""
    monkeypatch.chdir(tmp_path)
    for folder in ("notebooks", *editions.BESIDE):
        (tmp_path / folder).mkdir()
    nbformat.write(lesson(), str(tmp_path / "notebooks" / LESSON))

    def put(learner, answers, *added):
        folder = tmp_path / "handed_in" / learner
        folder.mkdir(parents=True)
        notebook = lesson(answers)
        notebook.cells[2:2] = added
        nbformat.write(notebook, str(folder / LESSON))

    return put


def has_sandbox():
    try:
        return subprocess.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]).returncode == 0
    except FileNotFoundError:
        return False


SANDBOXED = has_sandbox()


def grade(tmp_path, is_sandboxed=SANDBOXED, **options):
    grades = grading.grade_class(
        tmp_path / "handed_in", tmp_path / "out", is_sandboxed=is_sandboxed, **options
    )
    return [row for rows in grades for row in rows]


def test_each_answer_is_asked_by_the_lessons_own_check_away_from_credentials_and_jobs(
    hand_in, tmp_path, monkeypatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    helper = nbformat.v4.new_code_cell(  # one that a learner added
        "four = 4\nassert 'AWS_SECRET_ACCESS_KEY' not in os.environ\n"
        "assert 'workshop-grade-' in os.environ['HOME']\npathlib.Path('../jobs/left').write_text('')",
        id="mine",
    )
    answers = [
        "answer0 = four\nchecks.wheels(answer0)",
        "answer1 = 3\n'Right: I say so'",  # a check that was changed does not count
        STUBS[2],
        "answer3 = 4 +",
        OPEN.replace("..., ..., ...", "30, 32, 'the rim would bend between spokes farther apart'"),
    ]
    hand_in("fay", answers, helper)
    (tmp_path / "handed_in/hal").mkdir()
    (tmp_path / "handed_in/hal" / LESSON).write_text("{ half")  # costs only its owner
    graded = grade(tmp_path)
    right, wrong, not_yet, failed, answered, unreadable = ((row["state"], row["verdict"]) for row in graded)
    assert right == ("right", "4 wheels: two axles.")
    assert wrong[0] == "wrong"
    assert "gave 3; it must be 4" in wrong[1]
    assert not_yet[0] == "not yet"
    assert failed == ("failed", "NameError: name 'answer3' is not defined")
    assert answered[0] == "answered"
    assert "the rim would bend" in answered[1]
    assert grading.summary(graded[:-1]) == "1 of 4 right, 1 answered for you to judge"
    assert grading.summary(graded[:4]) == "1 of 4 right"
    assert (graded[-1]["learner"], unreadable[0]) == ("hal", "unreadable")
    assert (tmp_path / "out/fay" / LESSON).is_file()
    assert not (tmp_path / "jobs/left").exists()
    table = grading.grades_table(graded)
    assert table.set_index("learner").loc["fay", ["exercises", "wrong", "answered"]].tolist() == [5, 1, 1]


def test_the_time_is_limited_and_what_was_started_ends_with_it(hand_in, tmp_path):
    hand_in("eve", ["import subprocess\nsubprocess.Popen(['sleep', '1000'])\ntime.sleep(1000)", *STUBS[1:]])
    row, *_ = grade(tmp_path, seconds=15)
    assert (row["state"], row["exercise"]) == ("not reached", "checks.wheels")


@pytest.mark.skipif(not SANDBOXED, reason="no bubblewrap here, or it may not make a sandbox")
def test_in_the_sandbox_there_is_no_network_no_file_of_others_and_nothing_to_write_to(
    hand_in, tmp_path, monkeypatch
):
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret").write_text("key")
    monkeypatch.setenv("HOME", str(home))
    others = [
        str(tmp_path / "handed_in/eve" / LESSON),
        str(tmp_path / "out/amy" / LESSON),  # graded before
    ]
    looks = f"""
import socket
def fails(look):
    try:
        look()
    except OSError:
        return 1
    return 0
answer0 = fails(lambda: open({str(home / "secret")!r}))
answer0 += fails(lambda: socket.create_connection(("192.0.2.1", 80), timeout=3))
answer0 += fails(lambda: open("/usr/written", "w"))
answer0 += all(fails(lambda: open(path)) for path in {others!r})
checks.wheels(answer0)"""
    slow = """
from workshop_utils import on_ranks
def first(communicator):
    import numpy as np
    from workshop_utils.comm.ring import ring_all_reduce
    array = np.ones(4)
    ring_all_reduce(communicator, array)
    return float(array[0])
answer1 = sum(on_ranks(2, first, network="100Mbit").values)
checks.wheels(answer1)"""
    hand_in("amy", STUBS)
    hand_in("eve", [looks, slow, *STUBS[2:]])
    first, second, *_ = [row for row in grade(tmp_path) if row["learner"] == "eve"]
    assert (first["state"], second["state"]) == ("right", "right"), (first["verdict"], second["verdict"])


def test_without_bubblewrap_nothing_is_run_unless_the_instructor_says_so(hand_in, tmp_path, monkeypatch):
    hand_in("ida", STUBS)
    monkeypatch.setattr(grading.shutil, "which", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match=r"apt-get install bubblewrap.*--no-sandbox"):
        grade(tmp_path, is_sandboxed=True)
    assert not list((tmp_path / "out").glob("*/*.ipynb"))
