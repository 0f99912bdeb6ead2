"""Plants a row of `bugs.yaml`, `variants.yaml` or `fresh.yaml` in a function, for the length of a block.

for row in rows("bugs"):
    with planted(row):
        ...                # every alias of the function, imported wherever, now runs the changed source
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Literal

import yaml


@dataclass(frozen=True)
class Change:
    """One text for another in the source of a function.

    Attributes:
        where: `module:qualified name` of a function or method.
        old: what occurs exactly once in its source. Of several lines, the first may begin anywhere in a line; the
            others are indented as they are beside it.
        new: what takes its place, indented likewise.
    """

    where: str
    old: str
    new: str


@dataclass(frozen=True)
class Row:
    """A bug, or a variant.

    Attributes:
        name: unique.
        kind: `class` in the file.
        layout: arguments of `mesh.mesh_of`.
        options: of `trainer.Options`.
        says: what it does, and how a person comes to write it.
        changes: that of the row, then those in its list `also`; none if only options make the row.
        like: where it was reported, if it was.
    """

    name: str
    kind: str
    layout: dict[str, int]
    options: dict[str, Any]
    says: str
    changes: tuple[Change, ...] = ()
    like: str = ""

    @property
    def ranks(self) -> int:
        """How many the layout needs."""
        return math.prod(size for direction, size in self.layout.items() if direction != "experts")


def rows(name: Literal["bugs", "variants", "fresh"]) -> list[Row]:
    """The rows of `bugs.yaml`, `variants.yaml` or `fresh.yaml`."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return [row_of(each) for each in yaml.safe_load(text)]


def row_of(written: Mapping[str, Any]) -> Row:
    """A row as it is written in the file; TypeError for a key that it does not know or lacks."""
    fields = dict(written)
    own = [{key: fields.pop(key) for key in ("where", "old", "new")}] if "where" in fields else []
    changes = tuple(Change(**each) for each in (*own, *fields.pop("also", ())))
    return Row(kind=fields.pop("class"), changes=changes, **fields)


@contextmanager
def planted(row: Row) -> Iterator[None]:
    """Run what is in the block with the changes of `row`.

    Raises:
        ValueError: if `old` does not occur exactly once in the function's source, or the changed function uses other
            variables of the functions around it; then nothing is changed.
    """
    with ExitStack() as stack:
        for change in row.changes:
            stack.enter_context(swapped(change))
        yield


@contextmanager
def swapped(change: Change) -> Iterator[None]:
    """The function of `change` with its new source."""
    function, caches = function_at(change.where)
    before, changed = function.__code__, compiled(function, change)
    try:
        function.__code__ = changed
        clear(caches)
        yield
    finally:
        function.__code__ = before
        clear(caches)


def clear(caches: list[Any]) -> None:
    """Forget what `functools.cache` has kept."""
    for each in caches:
        each.cache_clear()


def function_at(where: str) -> tuple[FunctionType, list[Any]]:
    """The function under all of its decorators, and those of these that keep results."""
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    caches = []
    while True:
        if hasattr(found, "cache_clear"):
            caches.append(found)
        if not hasattr(found, "__wrapped__"):
            break
        found = found.__wrapped__
    if not isinstance(found, FunctionType):
        raise ValueError(f"{where} is a {type(found).__name__}; name a function or a method")
    return found, caches


def compiled(function: FunctionType, change: Change) -> CodeType:
    """The code of `function` with the change, under its own file name and line numbers."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(replaced(textwrap.dedent("".join(lines)), change))
    ast.increment_lineno(tree, first - 1)
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    # Names of the functions around it, and `__class__` for super(), are free only inside another function.
    around = ast.parse("def around():\n    pass").body[0]
    assert isinstance(around, ast.FunctionDef)
    free = function.__code__.co_freevars
    around.body = [*ast.parse("".join(f"{name} = None\n" for name in free)).body, definition]
    tree.body = [around]
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    outer = compile(tree, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    inner = code_in(code_in(outer, "around"), function.__name__)
    if inner.co_freevars != free:
        used = f"it uses {', '.join(inner.co_freevars) or 'none'}, before it was {', '.join(free) or 'none'}"
        raise ValueError(f"new of {change.where} changes which variables around the function it uses: {used}")
    return inner.replace(co_qualname=function.__code__.co_qualname)


def code_in(code: CodeType, name: str) -> CodeType:
    """The code of the function `name` that is defined in `code`."""
    return next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)


def replaced(source: str, change: Change) -> str:
    """`source` with the change; lines after the first are indented as the line where it begins."""
    old, new = change.old.strip("\n"), change.new.strip("\n")
    places, start = [], 0
    for line in source.splitlines(keepends=True):
        depth = len(line) - len(line.lstrip())
        text = textwrap.indent(old, " " * depth).lstrip(" ") if "\n" in old else old
        place = source.find(text, start, start + len(line) + len(text))
        while start <= place < start + len(line):
            places.append((place, depth, len(text)))
            place = source.find(text, place + 1, start + len(line) + len(text))
        start += len(line)
    if len(places) != 1:
        found = f"{old!r} occurs {len(places)} times in {change.where}"
        raise ValueError(f"{found}; old must occur exactly once")
    place, depth, length = places[0]
    return source[:place] + textwrap.indent(new, " " * depth).lstrip(" ") + source[place + length :]
