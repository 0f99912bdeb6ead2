"""The lessons as notebooks: which of them a command was given, and how one is executed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from traitlets.config import Config

from workshop_utils.jobs import JobError

NOTEBOOKS = Path("notebooks")
SOLUTION = "solution"  # the tag of a cell that holds an exercise's solution

# A kernel's sockets are encrypted, as they are in no other way on a machine that others use too; without it, each
# kernel warns of that in the middle of what a command prints.
KERNEL = Config({"KernelManager": {"transport_encryption": "auto"}})


def read(path: Path) -> Any:
    """The notebook in the file `path`. Raises JobError where it holds none."""
    try:
        return nbformat.read(str(path), as_version=4)
    except (ValueError, TypeError, AttributeError, nbformat.ValidationError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise JobError(f"{path} is not a notebook: {reason}") from None


def chosen(notebooks: Sequence[Path] = ()) -> list[Path]:
    """The notebooks that were named, or all lessons in their order. Raises JobError where there are none."""
    found = list(notebooks) or sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    missing = [str(path) for path in found if not path.is_file()]
    if missing or not found:
        raise JobError(
            f"there is no notebook {', '.join(missing) or f'in {NOTEBOOKS}/'}; run this in the project's folder"
        )
    return found


def headed_cells(notebook: Any, level: int | None = None) -> Iterator[tuple[str, Any]]:
    """The code cells of `notebook`, each with the last heading above it, of this `level` or of any."""
    hashes = "#" * level if level else "#+"
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield heading, cell
        elif headings := re.findall(rf"^{hashes}\s+(.+)$", cell.source, flags=re.MULTILINE):
            heading = headings[-1]
