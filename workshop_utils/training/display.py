"""What a rank shows below its notebook's cell: `display`, and figures of Matplotlib, whose backend this module is.

Each is a bundle of MIME types, in a file of the run's own folder; a line of the output names it, and `ranks` reads it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from workshop_utils.training.settings import after_import


def _have_canvas(_: Any) -> None:
    """Be a backend of Matplotlib, once that is imported, which takes a second."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    globals()["FigureCanvas"] = FigureCanvasAgg


after_import("matplotlib.pyplot", _have_canvas)

_count = itertools.count()
_TYPES = {
    "html": "text/html",
    "markdown": "text/markdown",
    "latex": "text/latex",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpeg": "image/jpeg",
}


def display(*values: Any, raw: bool = False, display_id: Any = None, **_: Any) -> Any:
    """Show values as IPython's function does; those that have a text alone are printed, and a handle shows anew."""
    for value in values:
        bundle = value if raw else _bundle(value)
        if bundle.keys() <= {"text/plain"}:
            print(*bundle.values())
        else:
            file = Path(f"{os.environ['WORKSHOP_DISPLAY']}-{os.getpid()}-{next(_count)}.display")
            file.write_text(json.dumps(bundle))
            print(json.dumps({"workshop": "display", "file": file.name}), flush=True)
    return None if display_id is None else SimpleNamespace(display=display, update=display)


def _bundle(value: Any) -> dict[str, Any]:
    bundle: dict[str, Any] = {"text/plain": repr(value)}
    kind: Any = getattr(sys.modules.get("matplotlib.figure"), "Figure", ())
    if isinstance(value, kind):
        value.savefig(file := io.BytesIO(), format="png", bbox_inches="tight")
        bundle["image/png"] = file.getvalue()
    for name, kind in {"mimebundle": "", **_TYPES}.items() if not isinstance(value, type) else ():
        with contextlib.suppress(Exception):  # it has none, or cannot be shown so
            options = {} if kind else {"include": None, "exclude": None}
            part = getattr(value, f"_repr_{name}_")(**options)
            part = part[0] if isinstance(part, tuple) else part  # without the metadata
            bundle |= {kind: part} if kind and part is not None else part or {}
    return {
        kind: base64.b64encode(part).decode() if isinstance(part, bytes) else part
        for kind, part in bundle.items()
    }


def show(*_: Any, **__: Any) -> None:
    """Show all figures, and close them, as at the end of a cell."""
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        for number in pyplot.get_fignums():
            display(pyplot.figure(number))
            pyplot.close(number)
