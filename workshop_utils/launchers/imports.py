"""What a training script imports, read from its text: it is not run."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def imported(script: Path) -> dict[str, set[str]]:
    """The modules that `script` imports anywhere, each with the names that are taken from it.

    A script that cannot be read or parsed imports none: where it runs, Python shows its own message.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError):
        return {}
    found: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.name] |= set()
        elif isinstance(node, ast.ImportFrom) and node.module:
            found[node.module] |= {alias.name for alias in node.names}
    return dict(found)


def packages(modules: Iterable[str]) -> set[str]:
    """The packages, or modules outside packages, to which `modules` belong."""
    return {module.partition(".")[0] for module in modules}
