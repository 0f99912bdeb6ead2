"""The two editions of the lessons, made from one source.

The notebooks in `notebooks/` are the source: whole, executed, with every solution. A learner's edition has no solutions
and no outputs, so that nothing is given away before it has run; an instructor's edition keeps both, unfolds the
solutions, and says how long each section runs and what to talk about. Which cell is what is told by its tags:

    exercise    what the learner fills in, with the check that looks at it
    hints       one hint inside the other, so that they open one at a time
    solution    what only the source and the instructor's edition have

Talking points stand in notebooks/teaching/, one file a lesson.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import nbformat
from nbconvert.preprocessors import ClearOutputPreprocessor, TagRemovePreprocessor

from workshop_utils.jobs import JobError
from workshop_utils.lessons import selection

TEACHING = "teaching"
BESIDE = ("images", "jobs")  # what notebooks name by a path, as ../images/...

Kept = Literal["new", "updated", "unchanged", "yours"]


@dataclass(frozen=True)
class Copy:
    """One notebook of a learner's folder, and what became of it: `yours` was changed by the learner and left alone."""

    path: Path
    state: Kept


def learner(source: Any) -> Any:
    """The learner's edition of a notebook: solutions and outputs gone, checks and hints kept."""
    notebook = copy.deepcopy(source)
    for step in (TagRemovePreprocessor(remove_cell_tags={selection.SOLUTION}), ClearOutputPreprocessor()):
        notebook, _ = step.preprocess(notebook, {})
    return notebook


def instructor(source: Any, talking_points: str = "") -> Any:
    """The instructor's edition: outputs kept, solutions unfolded; times and talking points after the first cell."""
    notebook = copy.deepcopy(source)
    for cell in notebook.cells:
        cell.metadata.pop("jupyter", None)
    text = "\n\n".join(part for part in (talking_points.strip(), _times(notebook)) if part)
    if text:
        cell = nbformat.v4.new_markdown_cell(f"## For the instructor\n\n{text}", id="for-the-instructor")
        notebook.cells.insert(1, cell)
    return notebook


def release(output: Path, notebooks: Sequence[Path] = ()) -> list[Path]:
    """Write both editions below `output`, each a folder with all that its notebooks name.

    Returns:
        The notebooks that were written.

    Raises:
        JobError: if there are no notebooks.
    """
    sources = {path: selection.read(path) for path in selection.chosen(notebooks)}
    written = []
    for edition in ("learner", "instructor"):
        root = output / edition
        for name in BESIDE:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(name, root / name, dirs_exist_ok=True, ignore=ignored)
        (root / selection.NOTEBOOKS).mkdir(parents=True, exist_ok=True)
        for path, source in sources.items():
            made = learner(source) if edition == "learner" else instructor(source, _talking_points(path))
            written.append(root / selection.NOTEBOOKS / path.name)
            nbformat.write(made, str(written[-1]))
    return written


def copy_for_learner(folder: Path) -> list[Copy]:
    """Bring the learner's edition into `folder`, beside `notebooks/`, and never overwrite work.

    A notebook that the learner has changed stays as it is; one that was only looked at, or run, is brought up to
    date when the source has changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for path in selection.chosen():
        made = learner(nbformat.read(str(path), as_version=4))
        made.metadata["workshop_copy_of"] = _digest(made)
        target = folder / path.name
        copies.append(Copy(target, _kept(target, made)))
        if copies[-1].state in ("new", "updated"):
            nbformat.write(made, str(target))
    return copies


def _kept(target: Path, made: Any) -> Kept:
    if not target.exists():
        return "new"
    try:
        there = selection.read(target)
    except JobError:
        return "yours"  # half saved, perhaps: not ours to replace
    if _digest(there) == _digest(made):
        return "unchanged"
    return "updated" if there.metadata.get("workshop_copy_of") == _digest(there) else "yours"


def _digest(notebook: Any) -> str:
    """What a person can change in a notebook: the cells' sources, not what running them wrote."""
    sources = "\0".join(f"{cell.cell_type}\0{cell.source}" for cell in notebook.cells)
    return hashlib.sha256(sources.encode()).hexdigest()[:16]


def _talking_points(path: Path) -> str:
    points = path.parent / TEACHING / f"{path.stem}.md"
    return points.read_text(encoding="utf-8") if points.is_file() else ""


def _times(notebook: Any) -> str:
    """A table of how long the code of each section ran when the source was executed."""
    seconds = notebook.metadata.get("workshop", {}).get("seconds")
    if not seconds:
        return ""
    rows: dict[str, float] = {}
    for (heading, _), took in zip(selection.headed_cells(notebook, level=2), seconds, strict=False):
        rows[heading or "start"] = rows.get(heading or "start", 0.0) + took
    table = "\n".join(f"| {name} | {took:.0f} |" for name, took in rows.items())
    total = f"| **all** | **{sum(rows.values()):.0f}** |"
    return f"| section | seconds its cells run |\n| --- | ---: |\n{table}\n{total}"
