"""Redraw every picture in images/: `python -m workshop_utils.plots.draw [FOLDER]`.

A module of this package names its pictures in `DRAWINGS`: the file's name and a function that returns the
figure. A new module needs no entry here.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from workshop_utils import plots
from workshop_utils.plots import style


def drawings() -> dict[str, Callable[[], Figure]]:
    """All pictures by file name.

    Raises:
        ValueError: if two modules claim the same name.
    """
    found: dict[str, Callable[[], Figure]] = {}
    for module in pkgutil.iter_modules(plots.__path__):
        if module.name == "draw":
            continue
        pictures = getattr(importlib.import_module(f"{plots.__name__}.{module.name}"), "DRAWINGS", {})
        if twice := found.keys() & pictures.keys():
            raise ValueError(f"two modules of {plots.__name__} draw {', '.join(sorted(twice))}")
        found |= pictures
    return found


def drawn(name: str) -> Figure:
    """The picture `name`, drawn in the house's style whatever was set before."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        style.use()
        return drawings()[name]()


def draw_all(folder: Path) -> list[Path]:
    """Write every picture into `folder` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in sorted(drawings()):
        paths.append(folder / name)
        style.save(drawn(name), paths[-1])
    return paths


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "images"
    for path in draw_all(target):
        print(path.name)
