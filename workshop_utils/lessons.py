"""The lessons as notebooks: which of them a command was given, and how one is executed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traitlets.config import Config

from workshop_utils.jobs import JobError

NOTEBOOKS = Path("notebooks")

# A kernel's sockets are encrypted, as they are in no other way on a machine that others use too; without it, each
# kernel warns of that in the middle of what a command prints.
KERNEL = Config({"KernelManager": {"transport_encryption": "auto"}})


def chosen(notebooks: Sequence[Path] = ()) -> list[Path]:
    """The notebooks that were named, or all lessons in their order. Raises JobError where there are none."""
    found = list(notebooks) or sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    missing = [str(path) for path in found if not path.is_file()]
    if missing or not found:
        raise JobError(
            f"there is no notebook {', '.join(missing) or f'in {NOTEBOOKS}/'}; run this in the project's folder"
        )
    return found
