"""The two editions of the lessons, made from one source.

The notebooks in `notebooks/` are the source: complete, executed, with every solution. The learner's edition has neither
solutions nor outputs, which would give the results away; the instructor's edition keeps both, unfolds the solutions,
and adds talking points and the running time of each section. A cell's tags tell its purpose:

    exercise    for the learner to fill in, with its check
    hints       one hint inside the other, so that they open one at a time
    solution    only in the source and the instructor's edition

Talking points are in notebooks/teaching/, one file per lesson.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import nbformat
from nbconvert.preprocessors import ClearOutputPreprocessor, TagRemovePreprocessor

from workshop_utils.jobs import JobError
from workshop_utils.lessons import selection

TEACHING = "teaching"
BESIDE = ("docs", "images", "jobs")  # what notebooks name by a path, as ../images/...

Kept = Literal["new", "updated", "unchanged", "yours"]  # yours: changed by the learner, and left alone


def learner(source: Any) -> Any:
    """The learner's edition of a notebook: solutions and outputs gone, checks and hints kept."""
    notebook = copy.deepcopy(source)
    for step in (TagRemovePreprocessor(remove_cell_tags={selection.SOLUTION}), ClearOutputPreprocessor()):
        notebook, _ = step.preprocess(notebook, {})
    return notebook


def instructor(source: Any, talking_points: str = "") -> Any:
    """The instructor's edition: outputs, unfolded solutions, and talking points and times after the first cell."""
    notebook = copy.deepcopy(source)
    for cell in notebook.cells:
        cell.metadata.pop("jupyter", None)
    if text := "\n\n".join(filter(None, (talking_points.strip(), _times(notebook)))):
        cell = nbformat.v4.new_markdown_cell(f"## For the instructor\n\n{text}", id="for-the-instructor")
        notebook.cells.insert(1, cell)
    return notebook


def release(output: Path, notebooks: Sequence[Path] = ()) -> list[Path]:
    """Write both editions below `output`, each a folder with everything that its notebooks refer to.

    Returns:
        The notebooks that were written.

    Raises:
        JobError: if there are no notebooks.
    """
    sources = {path: selection.read_notebook(path) for path in selection.notebook_paths(notebooks)}
    written = []
    for edition in ("learner", "instructor"):
        root, ignored = output / edition, shutil.ignore_patterns("__pycache__")
        for name in BESIDE:
            shutil.copytree(name, root / name, dirs_exist_ok=True, ignore=ignored)
        (root / selection.NOTEBOOKS).mkdir(parents=True, exist_ok=True)
        for path, source in sources.items():
            points = path.parent / TEACHING / f"{path.stem}.md"
            text = points.read_text(encoding="utf-8") if points.is_file() else ""
            made = learner(source) if edition == "learner" else instructor(source, text)
            written.append(root / selection.NOTEBOOKS / path.name)
            nbformat.write(made, str(written[-1]))
    return written


def default_folder() -> Path:
    """Where a learner's copies go: into this checkout, or into a folder with all that they name by a path."""
    return Path("my_lessons" if selection.has_lessons(Path()) else "workshop/my_lessons")


def copy_for_learner(folder: Path) -> dict[Path, Kept]:
    """Copy the learner's edition into `folder`, without ever overwriting work, and beside it what the lessons name.

    A notebook that the learner has changed stays as it is. One that was only read or run is updated if the source has
    changed. Returns what became of each copy.
    """
    source = selection.lessons_folder()
    if source.resolve() != folder.parent.resolve():
        for name in BESIDE:
            target = folder.parent / name
            if target.exists() and not target.is_dir():
                raise JobError(
                    f"{target} is no folder; the lessons need the workshop's there: name another folder"
                )
            shutil.copytree(source / name, target, copy_function=_copy_if_new, dirs_exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    copies: dict[Path, Kept] = {}
    for path in sorted((source / selection.NOTEBOOKS).glob(selection.LESSONS)):
        made = learner(selection.read_notebook(path))
        made.metadata["workshop_copy_of"] = _digest(made)
        target = folder / path.name
        copies[target] = _kept(target, made)
        if copies[target] in ("new", "updated"):
            nbformat.write(made, str(target))
    return copies


def _copy_if_new(source: str, target: str) -> None:
    if not os.path.lexists(target):
        shutil.copy(source, target)


def _kept(target: Path, made: Any) -> Kept:
    if not target.exists():
        return "new"
    try:
        existing = selection.read_notebook(target)
    except JobError:
        return "yours"  # half saved, perhaps: not ours to replace
    if _digest(existing) == _digest(made):
        return "unchanged"
    return "updated" if existing.metadata.get("workshop_copy_of") == _digest(existing) else "yours"


def _digest(notebook: Any) -> str:
    """Hash of what a person can change in a notebook: the cells' sources, not their outputs."""
    sources = "\0".join(f"{cell.cell_type}\0{cell.source}" for cell in notebook.cells)
    return hashlib.sha256(sources.encode()).hexdigest()[:16]


def _times(notebook: Any) -> str:
    """A table of how long the cells of each section ran when the source was executed."""
    rows: dict[str, float] = {}
    seconds = iter(notebook.metadata.get("workshop", {}).get("seconds", []))
    section = "start"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            rows[section] = rows.get(section, 0.0) + next(seconds, 0.0)
        elif headings := re.findall(r"^##\s+(.+)$", cell.source, flags=re.MULTILINE):
            section = headings[-1]
    if not (total := sum(rows.values())):
        return ""
    table = [f"| {name} | {seconds:.0f} |" for name, seconds in rows.items()]
    head = ["| section | seconds its cells run |", "| --- | ---: |"]
    return "\n".join([*head, *table, f"| **all** | **{total:.0f}** |"])
