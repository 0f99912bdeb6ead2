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
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
import oxipng
from nbconvert.preprocessors.coalescestreams import CoalesceStreamsPreprocessor
from PIL import Image

from workshop_utils.jobs import JobError
from workshop_utils.lessons import batch, selection
from workshop_utils.lessons.checks.choice import WIDGET_VIEW

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
PROGRESS = re.compile(r"(\r[^\r\n]*)+\n?")  # of tqdm: the states of a bar, and the end of its line
COLOURS = 64  # of a figure: few enough that GitHub and a browser open a notebook quickly


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
        JobError: if a cell fails; the file is not changed then.
    """
    with TemporaryDirectory() as scratch:
        lesson = batch.execute(path, Path(scratch, path.name), {})
    if lesson.error:
        raise JobError(f"{path}: {lesson.error}")
    notebook = lesson.executed
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    seconds = [round(cell.metadata["papermill"]["duration"], 1) for cell in code]
    clean(notebook)
    notebook.metadata["workshop"] = {"fingerprint": fingerprint(notebook), "seconds": seconds}
    nbformat.write(notebook, str(path))


def clean(notebook: Any) -> None:
    """Remove what differs between runs without meaning: timings, progress, widgets and their state, papermill's notes.

    Widgets don't work without a kernel; the static form beside them stays. Compress figures, and fold solutions.
    """
    notebook.metadata = nbformat.NotebookNode({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.NotebookNode({"tags": tags} if tags else {})
        if selection.SOLUTION in (tags or ()):
            cell.metadata["jupyter"] = {"source_hidden": True}
        if cell.cell_type == "code":
            for output in cell.outputs:
                if output.output_type == "stream":
                    output.text = PROGRESS.sub("", output.text)
            cell.outputs = [each for each in cell.outputs if each.get("text", "x").strip()]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            data.pop(WIDGET_VIEW, None)
            if png := data.get("image/png"):
                data["image/png"] = base64.b64encode(light(base64.b64decode(png))).decode()
    CoalesceStreamsPreprocessor().preprocess(notebook, {})  # what was printed in turns is one output


def light(png: bytes) -> bytes:
    """The picture `png` with a palette, a third of the size. A picture that has a palette stays as it is."""
    with Image.open(io.BytesIO(png)) as opened:
        if opened.mode == "P":
            return png
        picture = Image.new("RGBA", opened.size, "white")
        picture.alpha_composite(opened.convert("RGBA"))
    # Of Pillow's methods this has the smallest error at its worst pixel: a thin line keeps its colour.
    reduced = picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1)
    file = io.BytesIO()
    reduced.save(file, "PNG")
    return bytes(oxipng.optimize_from_memory(file.getvalue(), level=5))


def _normal(source: str) -> str:
    """`source` without comments and layout; unchanged if it is not plain Python (a magic, a syntax error)."""
    empty: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}  # as 3.11 does
    try:
        return ast.dump(ast.parse(source), **empty).replace(
            ", type_params=[]", ""
        )  # which 3.11 does not have
    except SyntaxError:
        return source
