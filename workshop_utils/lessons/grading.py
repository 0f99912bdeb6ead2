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
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from workshop_utils.jobs import JobError
from workshop_utils.launchers.local.group import Event, Process, ProcessGroup
from workshop_utils.lessons import editions
from workshop_utils.lessons.selection import chosen, read

EXERCISE, GRADED = "exercise", "graded"
SECONDS = 600.0  # for one notebook
INHERITED = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "OMP_NUM_THREADS", "JUPYTER_PREFER_ENV_PATH")
COLUMNS = ["learner", "lesson", "exercise", "state", "said", "seconds"]
STATES = ("right", "wrong", "not yet")  # of a check that was asked


def submissions(folder: Path) -> dict[Path, Path]:
    """The notebooks LEARNER/NOTEBOOK.ipynb in `folder`, each with the lesson that it answers.

    Raises:
        JobError: if there are none, or one is not called as a lesson is.
    """
    if not folder.is_dir():
        raise JobError(f"{folder} is no folder; it must hold a folder for each learner, with their notebooks")
    lessons = {path.name: path for path in chosen()}
    handed_in = sorted(folder.glob("*/*.ipynb"))
    for path in handed_in:
        if path.name not in lessons:
            raise JobError(
                f"{path} answers no lesson; notebooks must be called as the lessons are, such as {next(iter(lessons))}"
            )
    if not handed_in:
        raise JobError(f"{folder} holds no LEARNER/NOTEBOOK.ipynb, such as ada/{next(iter(lessons))}")
    return {path: lessons[path.name] for path in handed_in}


def grade(folder: Path, output: Path, seconds: float = SECONDS) -> Iterator[list[dict[str, Any]]]:
    """Run each notebook of `folder`, and give its rows: learner, lesson, exercise, state, said, seconds.

    `state` is right, wrong, not yet, failed (the answer or its check raised), not reached (the time was over, or the
    kernel died before) or unreadable. The executed notebooks are kept below `output`, by learner.
    """
    for path, lesson in submissions(folder).items():
        kept = output / path.parent.name / path.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        try:
            handed_in = nbformat.read(str(path), as_version=4)
            nbformat.validate(handed_in)
        except Exception as error:  # a file of any content may have been handed in
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            results = [("all", "unreadable", said)]
        else:
            carry_out(assembled(read(lesson), handed_in), kept, seconds)
            results = [
                (cell.metadata["exercise"], *_verdict(cell))
                for cell in read(kept).cells
                if GRADED in cell.metadata.get("tags", [])
            ]
        took = time.monotonic() - start
        yield [
            dict(zip(COLUMNS, (path.parent.name, lesson.stem, *result, took), strict=True))
            for result in results
        ]


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """One line a learner and lesson, with how many exercises came to which state, and the seconds."""
    frame = pd.DataFrame(rows, columns=COLUMNS)
    notebooks = frame.groupby(["learner", "lesson"])
    counts = notebooks["state"].value_counts().unstack(fill_value=0)
    counts.insert(0, "exercises", counts.sum(axis="columns"))
    counts["seconds"] = notebooks["seconds"].max().round().astype(int)
    return counts.rename_axis(columns=None).reset_index()


def write(rows: list[dict[str, Any]], output: Path) -> Path:
    """Keep what each check said as `output/grades.csv`."""
    path = output / "grades.csv"
    pd.DataFrame(rows, columns=COLUMNS).to_csv(path, index=False)
    return path


def assembled(source: Any, handed_in: Any) -> Any:
    """The lesson as it was given out, with the learner's answers, each followed by the lesson's own check.

    Cells that the learner added stand behind the lesson's cell behind which the learner put them.
    """
    notebook = editions.learner(source)
    lesson_ids = {cell.id for cell in notebook.cells}
    answers = {cell.id: cell.source for cell in handed_in.cells if cell.cell_type == "code"}
    added: dict[str, list[Any]] = {}
    behind = ""
    for cell in handed_in.cells:
        if cell.id in lesson_ids:
            behind = cell.id
        elif cell.cell_type == "code":
            added.setdefault(behind, []).append(_may_fail(cell.source, cell.id))
    cells = added.pop("", [])
    for cell in notebook.cells:
        if EXERCISE in cell.metadata.get("tags", []):
            check = ast.unparse(ast.parse(cell.source).body[-1])
            cells.append(_may_fail(answers.get(cell.id, cell.source), cell.id))
            cells.append(_may_fail(check, f"graded-{cell.id}"[:64], GRADED))
            cells[-1].metadata["exercise"] = check.partition("(")[0]
        else:
            cells.append(cell)
        cells += added.get(cell.id, [])
    notebook.cells = cells
    return notebook


def carry_out(notebook: Any, kept: Path, seconds: float) -> None:
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
        environment |= {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp"), "WORKSHOP_SIZE": "small"}
        command = (sys.executable, "-m", "papermill", "--no-progress-bar", "-k", "python3")
        process = Process(
            kept.stem, (*command, str(entry), str(executed)), environment, str(root / "notebooks")
        )
        ended = threading.Event()

        def on_event(event: Event) -> None:
            if event["event"] == "ended":
                ended.set()

        group = ProcessGroup([process], on_event, seconds, scratch=root / "processes")
        try:
            ended.wait()
        finally:
            group.stop()
            ended.wait()
        shutil.copyfile(executed, kept)


def _may_fail(source: str, identity: str, *tags: str) -> Any:
    """A code cell that may raise without ending its notebook."""
    return nbformat.v4.new_code_cell(source, id=identity, metadata={"tags": [*tags, "raises-exception"]})


def _verdict(cell: Any) -> tuple[str, str]:
    """State and words of an executed check."""
    for output in cell.outputs:
        if output.output_type == "error":
            return "failed", f"{output.ename}: {output.evalue}"
        state, _, said = output.get("data", {}).get("text/plain", "").partition(": ")
        if state.lower() in STATES:
            return state.lower(), said
    return "not reached", "the time was over, or a cell before had failed"
