"""Are a committed notebook's outputs those of the code that stands beside them?

Notebooks are committed executed, so their outputs can go stale: a cell is edited, or a module that it imports.
`refresh` executes a notebook in place, cleans it, and writes a fingerprint of what its outputs depend on into its
metadata; a test compares it with the fingerprint of what is there now.

What counts: the code cells, the modules of `workshop_utils` that they import, and the jobs that they name. Code is
compared by its syntax tree, so a comment or a line break makes nothing stale.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from workshop_utils import lessons
from workshop_utils.exercises.choice import WIDGET_VIEW

ROOT = Path(__file__).parents[1]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
CELL_TIMEOUT_SECONDS = 600
SOLUTION = "solution"  # the tag of a cell that holds an exercise's solution


def fingerprint(notebook: Any) -> str:
    """A hash of all code that `notebook`'s outputs depend on."""
    digest = hashlib.sha256()
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    for source in sources:
        digest.update(_normal(source).encode())
    for path in sorted(_dependencies("\n".join(sources))):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        text = path.read_text(encoding="utf-8")
        digest.update((_normal(text) if path.suffix == ".py" else text).encode())
    return digest.hexdigest()[:16]


def recorded(notebook: Any) -> str | None:
    """The fingerprint that was written when `notebook` was last executed by `refresh`."""
    value: str | None = notebook.metadata.get("workshop", {}).get("fingerprint")
    return value


def is_fresh(path: Path) -> bool:
    """Whether the outputs in `path` are those of today's code."""
    notebook = nbformat.read(str(path), as_version=4)
    return recorded(notebook) == fingerprint(notebook)


def refresh(path: Path) -> None:
    """Execute `path` in place, clean it and record its fingerprint.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails; the file is then as it was.
    """
    notebook = nbformat.read(str(path), as_version=4)
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_SECONDS,
        kernel_name="python3",
        config=lessons.KERNEL,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    seconds = _seconds(notebook)
    clean(notebook)
    notebook.metadata["workshop"] = {"fingerprint": fingerprint(notebook), "seconds": seconds}
    nbformat.write(notebook, str(path))


def clean(notebook: Any) -> None:
    """Remove what differs from run to run and says nothing: timings, widgets and their state, papermill's notes.

    A widget without its kernel is dead; what stays is the static form beside it. Solutions are folded.
    """
    notebook.metadata = nbformat.NotebookNode({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.NotebookNode({"tags": tags} if tags else {})
        if SOLUTION in (tags or ()):
            cell.metadata["jupyter"] = {"source_hidden": True}
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET_VIEW, None)


def _seconds(notebook: Any) -> list[float]:
    """How long each code cell took, in order, from the times that its execution noted."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            noted = cell.metadata.get("execution", {})
            begun, ended = noted.get("iopub.execute_input"), noted.get("shell.execute_reply")
            known = datetime.fromisoformat(ended) - datetime.fromisoformat(begun) if begun and ended else None
            found.append(round(known.total_seconds(), 1) if known is not None else 0.0)
    return found


def _normal(source: str) -> str:
    """`source` without comments and layout; as it is where it is not plain Python (a magic, a syntax error)."""
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return source


def _dependencies(source: str) -> Iterator[Path]:
    """The files of this project that `source` imports or names."""
    modules = set(re.findall(r"^\s*(?:from|import)\s+(workshop_utils(?:\.\w+)*)", source, flags=re.MULTILINE))
    for package, names in re.findall(
        r"^\s*from\s+(workshop_utils(?:\.\w+)*)\s+import\s+([\w, ]+)", source, flags=re.MULTILINE
    ):
        modules |= {f"{package}.{name.split(' as ')[0].strip()}" for name in names.split(",")}
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            continue  # a name inside a module, not a module
        if found is not None and found.origin is not None:
            yield Path(found.origin)
    for description in (ROOT / "jobs").glob("*/job.yaml"):
        job = description.parent
        if re.search(rf"""[/"']{job.name}\b""", source):  # "../jobs/NAME", or folder / "NAME"
            # Not the manifests beside them, which are rendered from these.
            yield from (path for path in job.iterdir() if path.suffix == ".py" or path == description)
