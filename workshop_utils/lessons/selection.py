"""The lessons as notebooks: which of them a command is about, how they are read and executed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from traitlets.config import Config

from workshop_utils.jobs import JobError

NOTEBOOKS = Path("notebooks")
LESSONS = "[0-9][0-9]_*.ipynb"
SOLUTION = "solution"  # the tag of a cell that holds an exercise's solution

# Encrypt a kernel's sockets, against other users of the machine. Otherwise each kernel prints a warning.
KERNEL = Config({"KernelManager": {"transport_encryption": "auto"}})


def read_notebook(path: Path) -> Any:
    """The notebook in the file `path`. Raises JobError if it holds none."""
    try:
        return nbformat.read(str(path), as_version=4)
    except (ValueError, TypeError, AttributeError, nbformat.ValidationError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise JobError(f"{path} is not a notebook: {reason}") from None


def has_lessons(folder: Path) -> bool:
    """Whether `folder` has a folder `notebooks` that is not somebody else's."""
    return any((folder / NOTEBOOKS).glob(LESSONS))


def lessons_folder() -> Path:
    """The folder that has `notebooks/` and what they name by a path: this one, the checkout, or one in the package."""
    package = Path(__file__).parents[1]
    return next((each for each in (Path(), package.parent) if has_lessons(each)), package / "share")


def notebook_paths(named: Sequence[Path] = ()) -> list[Path]:
    """The notebooks that were named, or all lessons in their order. Raises JobError if one, or all, are missing."""
    paths = list(named) or sorted(NOTEBOOKS.glob(LESSONS))
    missing = ", ".join(str(path) for path in paths if not path.is_file())
    if missing or not paths:
        raise JobError(f"there is no notebook {missing or f'in {NOTEBOOKS}/'}; run this in its parent folder")
    return paths
