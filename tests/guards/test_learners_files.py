"""What learners have is safe: copies are never overwritten, and no exercise loses its cell from version to version.

`exercise_cells.json` holds the ids of the cells of all exercises, by lesson and tag. A learner's notebook, a grader's
table and a link into a lesson all name a cell by its id. An id may be added, and none may go or move to another lesson.
With new ones, write the file again, and read the difference before committing it:

    GUARDS_UPDATE=1 python -m pytest tests/guards/test_learners_files.py; git diff tests/guards/exercise_cells.json
"""

import json
import os
import shutil
from pathlib import Path

import nbformat
import pytest
from adapter import ROOT, workshop

FILE = Path(__file__).with_name("exercise_cells.json")
TAGS = ("exercise", "hints", "solution")
LESSON, OTHER = "01_one_worker.ipynb", "04_ring_all_reduce.ipynb"
MINE = "my_lessons"

Cells = dict[str, dict[str, list[str]]]  # lesson → tag → ids


def tags_of(cell):
    return list(cell.get("metadata", {}).get("tags", []))


def read(path):
    return nbformat.read(str(path), as_version=4)


def exercise_cells():
    """The ids of all cells that belong to an exercise, as they are now."""
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found[path.stem] = {tag: [cell["id"] for cell in cells if tag in tags_of(cell)] for tag in TAGS}
    return found


# The ids of cells


def test_no_exercise_loses_its_cell_or_moves_to_another_lesson():
    now = exercise_cells()
    if os.environ.get("GUARDS_UPDATE"):
        FILE.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        pytest.fail(f"written: look at the difference with git diff {FILE.relative_to(ROOT)}")
    assert now == json.loads(FILE.read_text(encoding="utf-8")), (
        "learners' notebooks name cells by these ids: give back what is gone; for new ones, write the file again"
    )
    ids = [identity for tags in now.values() for some in tags.values() for identity in some]
    assert sorted(ids) == sorted(set(ids))


# copy-lessons


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with two lessons and what they name, and the working folder in it."""
    lessons = f"notebooks/{LESSON}", f"notebooks/{OTHER}"
    for name in (
        *lessons,
        "docs/glossary.md",
        "docs/setup.md",
        "jobs/mnist_torch_ddp",
        "images/00_whole_idea.svg",
    ):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def copy_lessons(*arguments):
    """What `workshop copy-lessons` says; it must succeed."""
    answer = workshop("copy-lessons", *arguments)
    assert answer.code == 0, f"{answer.err}{answer.traceback}"
    return answer.out


def change(path, edit):
    """Let `edit` change the notebook at `path`."""
    notebook = read(path)
    edit(notebook)
    nbformat.write(notebook, str(path))


def improve_the_source(checkout, lesson=LESSON):
    """A new version of a lesson, told apart by a sentence at its end."""
    new = nbformat.v4.new_markdown_cell("A new paragraph.", id="new-paragraph")
    change(checkout / "notebooks" / lesson, lambda notebook: notebook.cells.append(new))


def assert_without_solutions(copy, source):
    """The notebook `copy` has every cell of `source`, but no solution and no output."""
    solutions = [cell for cell in source.cells if "solution" in tags_of(cell)]
    assert solutions
    cells = read(copy).cells
    assert [cell.id for cell in cells] == [cell.id for cell in source.cells if cell not in solutions]
    assert not [cell.id for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    text = copy.read_text(encoding="utf-8")
    assert not [cell.id for cell in solutions if json.dumps(cell.source)[1:-1] in text]


def test_a_folder_gets_every_lesson_with_exercises_and_hints_and_without_solutions(checkout):
    for words, folder in ((), MINE), (["elsewhere"], "elsewhere"):
        said = copy_lessons(*words)
        assert sorted(path.name for path in (checkout / folder).iterdir()) == [LESSON, OTHER]
        assert f"{folder}/{LESSON}: new" in said
        assert_without_solutions(checkout / folder / LESSON, read(checkout / "notebooks" / LESSON))


def test_a_second_call_changes_nothing_and_says_nothing(checkout):
    def state():
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (checkout / MINE).iterdir()}

    copy_lessons()
    before = state()
    assert copy_lessons() == ""
    assert state() == before


def answer(notebook):
    next(cell for cell in notebook.cells if "exercise" in tags_of(cell)).source = "answer = 42"


WORK = {
    "an exercise is answered": answer,
    "a cell is added": lambda notebook: notebook.cells.insert(
        3, nbformat.v4.new_code_cell("1 + 1", id="own")
    ),
    "a cell is deleted": lambda notebook: notebook.cells.pop(),
    "cells are swapped": lambda notebook: notebook.cells.insert(2, notebook.cells.pop(3)),
    "a space is added": lambda notebook: notebook.cells[0].update(source=notebook.cells[0].source + " "),
}
SOMEBODY_ELSES = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1", id="x")])
NOT_A_COPY = (b"", b"{ half", b'{"cells": [', b"my shopping list\n", b"{}", b'{"cells": []}', b"[]", b"null", b"7",
              b"\x89PNG\r\n\xff\xfe\x00", nbformat.writes(SOMEBODY_ELSES).encode())  # fmt: skip


@pytest.mark.parametrize("work", [*WORK.values(), *NOT_A_COPY], ids=[*WORK, *map(repr, NOT_A_COPY)])
def test_what_a_learner_has_changed_or_made_is_never_overwritten(checkout, work):
    mine = checkout / MINE / LESSON
    if callable(work):
        copy_lessons()
        change(mine, work)
    else:
        mine.parent.mkdir()
        mine.write_bytes(work)
    before = mine.read_bytes()
    improve_the_source(checkout)
    said = copy_lessons()
    assert mine.read_bytes() == before
    assert f"{MINE}/{LESSON}: left alone" in said
    assert (checkout / MINE / OTHER).is_file(), "the other lesson comes all the same"


def test_a_copy_that_was_only_run_follows_the_source(checkout):
    copy_lessons()

    def run(notebook):
        for count, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
            cell.execution_count = count + 1
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="ran\n")]

    mine = checkout / MINE / LESSON
    change(mine, run)
    copy_lessons()
    assert "ran" in mine.read_text(encoding="utf-8"), "nothing is new, so outputs stay"
    improve_the_source(checkout)
    said = copy_lessons()
    assert f"{MINE}/{LESSON}: updated" in said
    assert read(mine).cells[-1].source == "A new paragraph."


def test_neither_other_files_nor_the_source_are_touched(checkout):
    folder = checkout / MINE
    (folder / "notes").mkdir(parents=True)
    others = {"notes/mine.md": b"notes", "99_own.ipynb": b"{ half", "data.bin": b"\x00\xff", ".hidden": b"h"}
    for name, content in others.items():
        (folder / name).write_bytes(content)
    copy_lessons()
    improve_the_source(checkout)
    source = {path: path.read_bytes() for path in (checkout / "notebooks").iterdir()}
    copy_lessons()
    release()
    assert {name: (folder / name).read_bytes() for name in others} == others
    assert {path.name for path in folder.iterdir()} == {LESSON, OTHER, "notes", *others} - {"notes/mine.md"}
    assert {path: path.read_bytes() for path in (checkout / "notebooks").iterdir()} == source


# release


def release(*arguments):
    """The learner's and the instructor's edition that `workshop release` makes."""
    answer = workshop("release", *arguments, "--output", "out")
    assert answer.code == 0, f"{answer.err}{answer.traceback}"
    return [Path("out/learner"), Path("out/instructor")]


def test_a_release_has_an_edition_for_learners_and_one_for_instructors(checkout):
    points = checkout / "notebooks" / "teaching" / f"{Path(LESSON).stem}.md"
    points.parent.mkdir()
    points.write_text("Ask why one worker is not enough.", encoding="utf-8")
    learner, instructor = (edition / "notebooks" / LESSON for edition in release())
    source = read(checkout / "notebooks" / LESSON)
    assert_without_solutions(learner, source)
    assert "Ask why" not in learner.read_text(encoding="utf-8")
    (added,) = (cell for cell in read(instructor).cells if cell.id not in {own.id for own in source.cells})
    assert "Ask why one worker is not enough." in added.source
    cells = [cell for cell in read(instructor).cells if cell.id != added.id]
    for cell, own in zip(cells, source.cells, strict=True):
        assert (cell.id, cell.source, cell.get("outputs")) == (own.id, own.source, own.get("outputs"))
        assert "solution" not in tags_of(cell) or not cell.metadata.get("jupyter", {}).get("source_hidden")


@pytest.mark.parametrize("lessons", [(), (OTHER,)])
def test_each_edition_has_the_lessons_that_are_named_and_what_they_name(checkout, lessons):
    (checkout / "jobs/mnist_torch_ddp/__pycache__").mkdir(exist_ok=True)
    for edition in release(*(f"notebooks/{name}" for name in lessons)):
        assert {path.name for path in (edition / "notebooks").iterdir()} == set(lessons or (LESSON, OTHER))
        assert (edition / "jobs/mnist_torch_ddp/train.py").is_file()
        assert (edition / "images/00_whole_idea.svg").is_file()
        assert (edition / "docs/setup.md").is_file()
        assert not list(edition.rglob("__pycache__"))
