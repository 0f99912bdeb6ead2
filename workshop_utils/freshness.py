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
from typing import Any, NamedTuple

import nbformat
import numpy as np
import oxipng
from nbclient import NotebookClient
from PIL import Image

from workshop_utils import lessons
from workshop_utils.exercises.choice import WIDGET_VIEW

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
CELL_TIMEOUT_SECONDS = 600
MOST_NBYTES = 395_000  # of a notebook, so that GitHub and a browser open it at once


class Tolerance(NamedTuple):
    """How far a light picture may be from the original, of 255: in brightness, and in either colour difference.

    Colours that have more than `exact_share` of a picture's pixels stay as they are.
    """

    brightness: int
    colour: int
    exact_share: float


TOLERANCES = (Tolerance(32, 10, 1 / 5000), Tolerance(40, 12, 1 / 2000), Tolerance(64, 20, 1 / 1000))
# Brightness and colour differences of red, green and blue: ITU-R BT.601, as JPEG has them.
TO_YCBCR = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])


def fingerprint(notebook: Any) -> str:
    """A hash of `notebook`'s own code cells."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            digest.update(_normal(cell.source).encode())
    return digest.hexdigest()[:16]


def recorded(notebook: Any) -> str | None:
    """The fingerprint that was written when `notebook` was last executed by `refresh`."""
    value: str | None = notebook.metadata.get("workshop", {}).get("fingerprint")
    return value


def is_fresh(path: Path) -> bool:
    """Whether the outputs in `path` are those of its cells as they are now."""
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

    A widget without its kernel is dead; what stays is the static form beside it. Figures are made light, and solutions
    are folded.
    """
    notebook.metadata = nbformat.NotebookNode({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.NotebookNode({"tags": tags} if tags else {})
        if lessons.SOLUTION in (tags or ()):
            cell.metadata["jupyter"] = {"source_hidden": True}
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET_VIEW, None)
    make_light(notebook)


def make_light(notebook: Any) -> None:
    """Give every figure of `notebook` a palette: the finest with which the notebook has at most MOST_NBYTES."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output.data for output in outputs if "image/png" in output.get("data", {})]
    originals = [base64.b64decode(data["image/png"]) for data in pictures]
    for tolerance in TOLERANCES:
        for data, png in zip(pictures, originals, strict=True):
            data["image/png"] = base64.b64encode(light(png, tolerance)).decode()
        if len(nbformat.writes(notebook).encode()) <= MOST_NBYTES:
            return


def light(png: bytes, tolerance: Tolerance = TOLERANCES[0]) -> bytes:
    """The picture `png` with a palette, a third of the size. One that has a palette already stays as it is.

    Areas and lines keep their exact colours; at edges, brightness may differ somewhat, and colour hardly. The palette
    takes the colour next for which most pixels are furthest from what it has (greedy weighted k-centres, T. F. Gonzalez
    1985, "Clustering to minimize the maximum intercluster distance").
    """
    with Image.open(io.BytesIO(png)) as opened:
        if opened.mode == "P":
            return png
        picture = Image.new("RGBA", opened.size, "white")
        picture.alpha_composite(opened.convert("RGBA"))
    red, green, blue, _ = np.moveaxis(np.asarray(picture, dtype=np.int64), 2, 0)
    packed, place, counts = np.unique(
        (red << 16) | (green << 8) | blue, return_inverse=True, return_counts=True
    )
    colours = np.stack([packed >> 16, packed >> 8 & 255, packed & 255], axis=1)
    scaled = colours @ TO_YCBCR.T / (tolerance.brightness, tolerance.colour, tolerance.colour)
    is_exact = counts > tolerance.exact_share * place.size
    # Of each colour from the nearest of the palette; 1 is tolerable.
    difference = np.full(len(colours), 255.0)
    nearest = np.zeros(len(colours), dtype=np.uint8)
    palette: list[int] = []
    while len(palette) < 256 and (difference.max() > 1 or difference[is_exact].any()):
        wanted = is_exact if difference[is_exact].any() else ~is_exact
        chosen = int(np.argmax(wanted * counts * difference**2))
        from_chosen = np.abs(scaled - scaled[chosen]).max(axis=1)
        nearest[from_chosen < difference] = len(palette)
        difference = np.minimum(difference, from_chosen)
        palette.append(chosen)
    reduced = Image.fromarray(nearest[place].reshape(red.shape))
    reduced.putpalette(colours[palette].astype(np.uint8).tobytes())
    file = io.BytesIO()
    reduced.save(file, "PNG")
    return bytes(oxipng.optimize_from_memory(file.getvalue(), level=5))


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
