"""Are a committed notebook's outputs those of the code that stands beside them?

Notebooks are committed executed, so their outputs can go stale when a cell is edited. `refresh` executes a notebook in
place, cleans it, and writes a fingerprint of its code cells into its metadata; a test compares it with that of the
cells that are there now. Code is compared by its syntax tree, so a comment or a line break makes nothing stale.

The package behind the cells is not part of it: that cells still work, and still give the marked outputs, is shown by
running them (`make notebooks`).
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
MOST_NBYTES = 395_000  # of a notebook, so that GitHub and a browser open it at once
COLOURS = (128, 64, 32)  # of a figure


def fingerprint(notebook: Any) -> str:
    """A hash of `notebook`'s own code cells."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            digest.update(_normal(cell.source).encode())
    return digest.hexdigest()[:16]


def is_fresh(path: Path) -> bool:
    """Whether the outputs in `path` are those of its cells as they are now."""
    notebook = nbformat.read(str(path), as_version=4)
    return bool(notebook.metadata.get("workshop", {}).get("fingerprint") == fingerprint(notebook))


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
        config=selection.KERNEL,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    seconds = _seconds(notebook)
    clean(notebook)
    notebook.metadata["workshop"] = {"fingerprint": fingerprint(notebook), "seconds": seconds}
    nbformat.write(notebook, str(path))


def clean(notebook: Any) -> None:
    """Remove what differs from run to run and says nothing: timings, widgets and their state, papermill's notes.

    A widget without its kernel is dead; what stays is the static form beside it. Figures are made light, and solutions
    are folded.
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
    """Give every figure of `notebook` a palette: the largest with which the notebook has at most MOST_NBYTES."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output.data for output in outputs if "image/png" in output.get("data", {})]
    originals = [base64.b64decode(data["image/png"]) for data in pictures]
    for colours in COLOURS:
        for data, png in zip(pictures, originals, strict=True):
            data["image/png"] = base64.b64encode(light(png, colours)).decode()
        if len(nbformat.writes(notebook).encode()) <= MOST_NBYTES:
            return


def light(png: bytes, colours: int = COLOURS[0]) -> bytes:
    """The picture `png` with a palette, a third of the size. One that has a palette already stays as it is."""
    with Image.open(io.BytesIO(png)) as opened:
        if opened.mode == "P":
            return png
        picture = Image.new("RGBA", opened.size, "white")
        picture.alpha_composite(opened.convert("RGBA"))
    # Of Pillow's methods the one with the smallest error at its worst pixel: a thin line keeps its colour.
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
    """`source` without comments and layout; as it is where it is not plain Python (a magic, a syntax error)."""
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return source
