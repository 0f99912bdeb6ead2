"""The plan of the house, and whether the code keeps to it: which room of the package imports from which.

    kept, broken = keeps_to_plan(imports())

A room is a module or a sub-package directly below `workshop_utils`. Rooms stand in one order, and each imports only
from those before it; the few that look back the other way are named in EXCEPTIONS, with the reason. A test compares
the plan with the code, and the figure in docs/architecture.md is drawn from both.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent

# From what needs nothing to what people call. A floor imports from the floors above it, and a room from those to its
# left on the same floor.
FLOORS: dict[str, tuple[str, ...]] = {
    "ground": (
        "quantities",
        "place",
        "timeline",
        "models",
        "adasum",
        "checkpoints",
        "logged_command",
        "machine",
        "packages",
        "horovod_build",
    ),
    "what to run": ("jobs", "strategies", "data", "lessons"),
    "processes and links": (
        "runs",
        "processes",
        "network",
        "wiring",
        "environments",
        "bootstrap",
        "doctor",
        "lab",
    ),
    "messages": ("comm",),
    "where": ("launchers", "live", "horovod_tuning"),
    "models and laws": ("parallel", "scaling", "eks"),
    "what is seen": ("architecture", "plots", "lesson_page", "report", "batch"),
    "lessons": ("exercises", "freshness", "editions", "grading", "book"),
    "doors": ("cli",),
}

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("report", "batch"): "for a type annotation alone: a report is about executed lessons",
    (
        "scaling",
        "report",
    ): "inside the command `workshop scaling report`, so that scaling itself draws nothing",
}


def order() -> list[str]:
    """All rooms, each after those that it may import from."""
    return [room for rooms in FLOORS.values() for room in rooms]


def imports(package: Path = PACKAGE) -> set[tuple[str, str]]:
    """Which room imports from which, read from the text of every module: pairs of importer and imported.

    Imports inside functions count, and so do those for type annotations alone.
    """
    found = set()
    for file in package.rglob("*.py"):
        importer = file.relative_to(package).parts[0].removesuffix(".py")
        for statement in _statements(ast.parse(file.read_text(encoding="utf-8"), str(file))):
            found |= {(importer, imported) for imported in _rooms(statement, package) if imported != importer}
    return found


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements below `node`. Expressions hold none, so they are not looked into: most of a module is them."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, block, ()):
            if isinstance(inner, ast.stmt):
                yield inner
            yield from _statements(inner)


def _rooms(node: ast.stmt, package: Path) -> set[str]:
    """The rooms of `package` that one statement names; empty for a statement that is no import of them."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return set()
    parts = [name.split(".") for name in names]
    return {words[1] for words in parts if words[0] == package.name and len(words) > 1}


def rooms(package: Path = PACKAGE) -> set[str]:
    """The modules and sub-packages directly below `package`."""
    modules = {file.stem for file in package.glob("*.py") if not file.stem.startswith("__")}
    return modules | {file.parent.name for file in package.glob("*/__init__.py")}


def keeps_to_plan(edges: set[tuple[str, str]]) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """The imports that follow the order, and those that go against it, named as exceptions or not.

    Raises:
        ValueError: if a room has no place in the plan.
    """
    places = {room: index for index, room in enumerate(order())}
    if strangers := sorted({room for edge in edges for room in edge} - places.keys()):
        raise ValueError(f"{', '.join(strangers)}: no floor of architecture.FLOORS has a room of that name")
    against = {edge for edge in edges if places[edge[0]] < places[edge[1]]}
    return edges - against, against
