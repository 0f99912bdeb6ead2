"""Runs what a class has handed in, and says how each exercise went.

    grade(Path("handed_in"), Path("build/grades"))

`handed_in` holds a folder a learner, with their notebooks in it, called as the lessons are. What is run is the lesson
as it was given out, with the learner's answers put in: their exercise cells, found by the cell's id, and the cells
they added. So a paragraph that somebody deleted by accident breaks nothing, and a check that somebody changed does not
count: after each answer the lesson's own check is asked once more, and what it says then is the grade.

Each notebook runs in processes and a folder of its own, with copies of jobs and images, a home of its own and none of
the instructor's credentials in its environment, at the small size, with a time limit; whatever it started ends with it.
That keeps accidents apart. It is no wall against malice: run unknown code on a machine that you can lose.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from workshop_utils import editions
from workshop_utils.jobs import JobError
from workshop_utils.lessons import chosen
from workshop_utils.processes.group import Event, Process, ProcessGroup

EXERCISE, GRADED = "exercise", "graded"
SECONDS = 600.0  # for one notebook
INHERITED = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "OMP_NUM_THREADS", "JUPYTER_PREFER_ENV_PATH")
COLUMNS = ["learner", "lesson", "exercise", "state", "said", "seconds"]


@dataclass(frozen=True)
class Submission:
    """One notebook that a learner handed in, and the lesson that it answers."""

    learner: str
    path: Path
    lesson: Path


def submissions(folder: Path) -> list[Submission]:
    """What lies in `folder`: LEARNER/NOTEBOOK.ipynb for each learner.

    Raises:
        JobError: if there is nothing, or a notebook is called as no lesson is.
    """
    if not folder.is_dir():
        raise JobError(f"{folder} is no folder; it must hold a folder for each learner, with their notebooks")
    lessons = {path.name: path for path in chosen()}
    found = []
    for path in sorted(folder.glob("*/*.ipynb")):
        if path.name not in lessons:
            raise JobError(
                f"{path} answers no lesson; notebooks must be called as the lessons are, such as {next(iter(lessons))}"
            )
        found.append(Submission(path.parent.name, path, lessons[path.name]))
    if not found:
        raise JobError(f"{folder} holds no LEARNER/NOTEBOOK.ipynb, such as ada/{next(iter(lessons))}")
    return found


def grade(
    folder: Path, output: Path, seconds: float = SECONDS, size: str = "small"
) -> Iterator[list[dict[str, Any]]]:
    """Run each submission of `folder`, and give its rows: learner, lesson, exercise, state, said, seconds.

    `state` is right, wrong, not yet, failed (the answer or its check raised), not reached (the time was over, or the
    kernel died before) or unreadable. The executed notebooks are kept below `output`, by learner.
    """
    for submission in submissions(folder):
        kept = output / submission.learner / submission.path.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        try:
            handed_in = nbformat.read(str(submission.path), as_version=4)
            nbformat.validate(handed_in)
        except Exception as error:  # a file of any content may have been handed in
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            yield [_row(submission, "all", "unreadable", said, 0.0)]
            continue
        source = nbformat.read(str(submission.lesson), as_version=4)
        carry_out(assembled(source, handed_in), kept, seconds, size)
        executed = nbformat.read(str(kept), as_version=4)
        took = time.monotonic() - began
        yield [
            _row(submission, cell.metadata["exercise"], *_verdict(cell), took)
            for cell in executed.cells
            if GRADED in cell.metadata.get("tags", [])
        ]


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """One line a learner and lesson, with how many exercises came to which state, and the seconds."""
    frame = pd.DataFrame(rows, columns=COLUMNS)
    counts = frame.pivot_table(
        index=["learner", "lesson"], columns="state", values="said", aggfunc="count", fill_value=0
    )
    counts.insert(0, "exercises", counts.sum(axis="columns"))
    counts["seconds"] = frame.groupby(["learner", "lesson"])["seconds"].max().round().astype(int)
    return counts.rename_axis(columns=None).reset_index()


def write(rows: list[dict[str, Any]], output: Path) -> Path:
    """Keep what each check said as `output/grades.csv`."""
    path = output / "grades.csv"
    pd.DataFrame(rows, columns=COLUMNS).to_csv(path, index=False)
    return path


def assembled(source: Any, handed_in: Any) -> Any:
    """The lesson as it was given out, with the learner's answers, each followed by the lesson's own check."""
    notebook = editions.learner(source)
    answers = {cell.id: cell for cell in handed_in.cells if cell.cell_type == "code"}
    added = _added(notebook, handed_in)
    cells = list(added.pop("", []))
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type == "code" and EXERCISE in cell.metadata.get("tags", []):
            given = cell.source
            if cell.id in answers:
                cell.source = answers[cell.id].source
            cell.metadata["tags"] = [*cell.metadata["tags"], "raises-exception"]
            cells.append(_check(given, cell.id))
        cells.extend(added.pop(cell.id, []))
    notebook.cells = cells
    return notebook


def carry_out(notebook: Any, kept: Path, seconds: float, size: str) -> None:
    """Execute `notebook` into `kept` in processes of its own, for `seconds` at most; a failing cell stops it."""
    with tempfile.TemporaryDirectory(prefix="workshop-grade-") as name:
        root = Path(name)
        for beside in editions.BESIDE:
            shutil.copytree(beside, root / beside)
        for made in ("notebooks", "home", "tmp"):
            (root / made).mkdir()
        entry, executed = root / "notebooks" / kept.name, root / f"executed-{kept.name}"
        nbformat.write(notebook, str(entry))
        shutil.copyfile(entry, executed)  # what is there when not even the first cell was reached
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment |= {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp"), "WORKSHOP_SIZE": size}
        command = (sys.executable, "-m", "papermill", "--no-progress-bar", "-k", "python3")
        ended = threading.Event()

        def on_event(event: Event) -> None:
            if event["event"] == "ended":
                ended.set()

        process = Process(
            kept.stem, (*command, str(entry), str(executed)), environment, str(root / "notebooks")
        )
        group = ProcessGroup([process], on_event, seconds, scratch=root / "processes")
        try:
            ended.wait()
        finally:
            group.stop()
            ended.wait()
        shutil.copyfile(executed, kept)


def _added(given: Any, handed_in: Any) -> dict[str, list[Any]]:
    """The code cells that the learner added, by the id of the lesson's cell before them."""
    known = {cell.id for cell in given.cells}
    after = ""
    added: dict[str, list[Any]] = {}
    for cell in handed_in.cells:
        if cell.id in known:
            after = cell.id
        elif cell.cell_type == "code":
            cell.metadata = nbformat.NotebookNode({"tags": ["raises-exception"]})
            cell.outputs, cell.execution_count = [], None
            added.setdefault(after, []).append(cell)
    return added


def _check(given: str, exercise: str) -> Any:
    """A cell with the check that stands at the end of an exercise as it was given out."""
    last = ast.parse(given).body[-1]
    source = ast.unparse(last)
    name = source.partition("(")[0]
    cell = nbformat.v4.new_code_cell(source, id=f"graded-{exercise}"[:64])
    cell.metadata = nbformat.NotebookNode({"tags": [GRADED, "raises-exception"], "exercise": name})
    return cell


def _verdict(cell: Any) -> tuple[str, str]:
    """State and words of an executed check."""
    for output in cell.outputs:
        if output.output_type == "error":
            return "failed", f"{output.ename}: {output.evalue}"
        text = output.get("data", {}).get("text/plain", "")
        state, colon, said = text.partition(": ")
        if colon and state.lower() in ("right", "wrong", "not yet"):
            return state.lower(), said
    return "not reached", "the time was over, or a cell before had failed"


def _row(submission: Submission, exercise: str, state: str, said: str, seconds: float) -> dict[str, Any]:
    values = (submission.learner, submission.lesson.stem, exercise, state, said, seconds)
    return dict(zip(COLUMNS, values, strict=True))
