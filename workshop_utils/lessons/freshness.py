"""Do a committed notebook's outputs belong to the code beside them?

Notebooks are committed executed, so their outputs go stale when a cell is edited. `refresh_notebook` executes a
notebook in place, cleans it, and writes a fingerprint of its code cells into its metadata; a test compares that with
the present cells. It is taken from the syntax tree, so comments and line breaks don't matter.

The fingerprint does not include the package behind the cells: running them (`make notebooks`) shows that they still
work and still give the marked outputs.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
import oxipng
from nbclient import NotebookClient
from PIL import Image

from workshop_utils.lessons import selection
from workshop_utils.lessons.checks.choice import WIDGET_VIEW

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
CELL_TIMEOUT_SECONDS = 600
MOST_NBYTES = 395_000  # of a notebook, so that GitHub and a browser open it quickly
COLOURS = (128, 64, 32)  # of a figure


def fingerprint(notebook: Any) -> str:
    """A hash of `notebook`'s own code cells."""
    code = "".join(_normal(cell.source) for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def is_fresh(path: Path) -> bool:
    """Whether the outputs in `path` belong to its present cells."""
    notebook = selection.read_notebook(path)
    return bool(notebook.metadata.get("workshop", {}).get("fingerprint") == fingerprint(notebook))


def refresh_notebook(path: Path) -> None:
    """Execute `path` in place, clean it and record its fingerprint.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails; the file is not changed then.
    """
    notebook = selection.read_notebook(path)
    settings = {"timeout": CELL_TIMEOUT_SECONDS, "kernel_name": "python3", "config": selection.KERNEL}
    NotebookClient(notebook, resources={"metadata": {"path": str(path.parent)}}, **settings).execute()
    seconds = _seconds(notebook)
    clean(notebook)
    notebook.metadata["workshop"] = {"fingerprint": fingerprint(notebook), "seconds": seconds}
    nbformat.write(notebook, str(path))


def clean(notebook: Any) -> None:
    """Remove what differs between runs without meaning: timings, widgets and their state, papermill's notes.

    Widgets don't work without a kernel; the static form beside them stays. Compress figures, and fold solutions.
    """
    notebook.metadata = nbformat.NotebookNode({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.NotebookNode({"tags": tags} if tags else {})
        if selection.SOLUTION in (tags or ()):
            cell.metadata["jupyter"] = {"source_hidden": True}
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET_VIEW, None)
    make_light(notebook)


def make_light(notebook: Any) -> None:
    """Give every figure of `notebook` the largest palette with which the notebook has at most MOST_NBYTES."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output.data for output in outputs if "image/png" in output.get("data", {})]
    originals = [base64.b64decode(data["image/png"]) for data in pictures]
    for colours in COLOURS:
        for data, png in zip(pictures, originals, strict=True):
            data["image/png"] = base64.b64encode(light(png, colours)).decode()
        if len(nbformat.writes(notebook).encode()) <= MOST_NBYTES:
            return


def light(png: bytes, colours: int = COLOURS[0]) -> bytes:
    """The picture `png` with a palette, a third of the size. A picture that has a palette stays as it is."""
    with Image.open(io.BytesIO(png)) as opened:
        if opened.mode == "P":
            return png
        picture = Image.new("RGBA", opened.size, "white")
        picture.alpha_composite(opened.convert("RGBA"))
    # Of Pillow's methods this has the smallest error at its worst pixel: a thin line keeps its colour.
    reduced = picture.convert("RGB").quantize(colours, Image.Quantize.MAXCOVERAGE, kmeans=1)
    file = io.BytesIO()
    reduced.save(file, "PNG")
    return bytes(oxipng.optimize_from_memory(file.getvalue(), level=5))


def _seconds(notebook: Any) -> list[float]:
    """How long each code cell took, in order, from the times noted during its execution."""
    seconds = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            noted = cell.metadata.get("execution", {})
            moments = ("iopub.execute_input", "shell.execute_reply")
            times = [datetime.fromisoformat(noted[name]) for name in moments if name in noted]
            seconds.append(round((times[-1] - times[0]).total_seconds(), 1) if times else 0.0)
    return seconds


def _normal(source: str) -> str:
    """`source` without comments and layout; unchanged if it is not plain Python (a magic, a syntax error)."""
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return source
