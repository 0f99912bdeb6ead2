"""What a learner gets, what an instructor gets, and that nobody's work is lost."""

import nbformat
import pytest

from workshop_utils import editions
from workshop_utils.jobs import JobError

LESSON = "07_wheels.ipynb"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with one lesson, executed."""
    monkeypatch.chdir(tmp_path)
    for folder in ("notebooks", "images", "jobs/one/__pycache__"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "jobs/one/train.py").write_text("")
    (tmp_path / "jobs/one/__pycache__/train.pyc").write_text("")
    write(tmp_path / "notebooks" / LESSON)
    return tmp_path


def write(path, answer="4"):
    new, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    printed = nbformat.v4.new_output("stream", name="stdout", text="made\n")
    cells = [
        new("# 07 · Wheels", id="first"),
        code("print('made')", id="run", outputs=[printed], execution_count=1),
        new("## Now you", id="task"),
        code("answer = ...\ncheck(answer)", id="stub", metadata={"tags": ["exercise"]}, execution_count=2),
        new("<details><summary>Hint 1</summary>count</details>", id="hint", metadata={"tags": ["hints"]}),
        code(
            f"answer = {answer}\ncheck(answer)",
            id="solved",
            metadata={"tags": ["solution"], "jupyter": {"source_hidden": True}},
            execution_count=3,
        ),
        new("Next: 08.", id="last"),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["workshop"] = {"fingerprint": "x", "seconds": [2.0, 0.5, 0.6]}
    nbformat.write(notebook, str(path))


def ids(notebook):
    return [cell.id for cell in notebook.cells]


def read(path):
    return nbformat.read(str(path), as_version=4)


def test_a_learner_gets_checks_and_hints_and_neither_solutions_nor_outputs(project):
    editions.release(project / "out")
    made = read(project / "out/learner/notebooks" / LESSON)
    assert ids(made) == ["first", "run", "task", "stub", "hint", "last"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in made.cells)
    assert "answer = 4" not in (project / "out/learner/notebooks" / LESSON).read_text()


def test_an_instructor_gets_outputs_open_solutions_times_and_talking_points(project):
    (project / "notebooks/teaching").mkdir()
    (project / "notebooks/teaching/07_wheels.md").write_text("Ask why wheels are round.")
    editions.release(project / "out")
    made = read(project / "out/instructor/notebooks" / LESSON)
    assert ids(made) == ["first", "for-the-instructor", "run", "task", "stub", "hint", "solved", "last"]
    assert made.cells[1].source.startswith("## For the instructor\n\nAsk why wheels are round.")
    assert "| start | 2 |\n| Now you | 1 |\n| **all** | **3** |" in made.cells[1].source
    assert made.cells[2].outputs[0].text == "made\n"
    assert "jupyter" not in made.cells[6].metadata


def test_each_edition_has_what_its_notebooks_name(project):
    editions.release(project / "out")
    for edition in ("learner", "instructor"):
        assert (project / "out" / edition / "jobs/one/train.py").is_file()
        assert (project / "out" / edition / "images").is_dir()
        assert not (project / "out" / edition / "jobs/one/__pycache__").exists()


def test_the_source_is_not_touched(project):
    before = (project / "notebooks" / LESSON).read_bytes()
    editions.release(project / "out")
    editions.copy_for_learner(project / "mine")
    assert (project / "notebooks" / LESSON).read_bytes() == before


def states(project):
    return [copy.state for copy in editions.copy_for_learner(project / "mine")]


def test_work_is_never_overwritten(project):
    assert states(project) == ["new"]
    assert states(project) == ["unchanged"]
    mine = project / "mine" / LESSON
    notebook = read(mine)
    notebook.cells[3].source = "answer = 5\ncheck(answer)"
    nbformat.write(notebook, str(mine))
    write(project / "notebooks" / LESSON, answer="6")
    before = mine.read_bytes()
    assert states(project) == ["yours"]
    assert mine.read_bytes() == before


def test_a_copy_that_was_only_run_follows_the_source(project):
    states(project)
    mine = project / "mine" / LESSON
    notebook = read(mine)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="ran\n")]
    nbformat.write(notebook, str(mine))
    source = read(project / "notebooks" / LESSON)
    source.cells[1].source = "print('made better')"
    nbformat.write(source, str(project / "notebooks" / LESSON))
    assert states(project) == ["updated"]
    assert read(mine).cells[1].source == "print('made better')"


def test_a_file_that_cannot_be_read_is_left_alone(project):
    states(project)
    (project / "mine" / LESSON).write_text("{ half")
    assert states(project) == ["yours"]


def test_a_folder_without_lessons_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        JobError, match="there is no notebook in notebooks/; run this in the project's folder"
    ):
        editions.release(tmp_path / "out")
    with pytest.raises(JobError, match=r"there is no notebook .*03_x\.ipynb"):
        editions.release(tmp_path / "out", [tmp_path / "03_x.ipynb"])
