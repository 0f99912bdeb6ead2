"""What differs between an object and the table of its kind, a sentence each, with the path of the field."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from workshop_utils.launchers.kubernetes.quantity import is_quantity
from workshop_utils.launchers.kubernetes.tables import Type, fields_of, required_of

WORDS = {
    "text": "a text; put it in quotes",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "list": "a list",
    "map": "a map of names to values",
    "object": "an object with fields of its own",
    "quantity": "an amount such as 500m, 2 or 2Gi",
}
_PYTHON: dict[str, Any] = {
    "text": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "list": list,
    "map": dict,
    "object": dict,
}
NO_VALUE = "has no value; give it one, or leave the field out"


def problems_in(values: Mapping[str, Any], kind: type, path: str = "") -> Iterator[str]:
    """What is wrong with `values` as an object of `kind`, which stands at `path`."""
    fields = fields_of(kind)
    for name in required_of(kind):
        if name not in values:
            yield f"{below(path, name)} is missing"
    for name, value in values.items():
        here = below(path, str(name))
        if name in fields:
            yield from _value(value, fields[name], here)
        else:
            yield f"{here}: {unknown(str(name), fields)}"


def below(path: str, name: str | int) -> str:
    """The path of what is called `name`, or is the element with that number, in what stands at `path`."""
    if isinstance(name, int):
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else name


def unknown(name: str, fields: Iterable[str]) -> str:
    """What is said of a field that is none of `fields`."""
    close = difflib.get_close_matches(name, list(fields), n=1)
    known = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(sorted(fields))}"
    return f"unknown field; {known}"


def _value(value: Any, wanted: Type, path: str) -> Iterator[str]:
    if value is None:
        yield f"{path} {NO_VALUE}"
        return
    if wanted.form == "anything":
        return
    if wanted.form == "quantity":
        if not is_quantity(value):
            yield f"{path} is {value!r}; it must be {WORDS['quantity']}"
        return
    if not isinstance(value, _PYTHON[wanted.form]) or (isinstance(value, bool) and wanted.form != "boolean"):
        yield f"{path} is {value!r}; it must be {WORDS[wanted.form]}"
    elif wanted.form == "list" and wanted.of is not None:
        for index, element in enumerate(value):
            yield from _value(element, wanted.of, below(path, index))
    elif wanted.form == "map" and wanted.of is not None:
        for name, element in value.items():
            yield from _value(element, wanted.of, below(path, str(name)))
    elif wanted.kind is not None:
        yield from problems_in(value, wanted.kind, path)
