"""Would a cluster take this object? Asked without one, and of every field; what is wrong is named by its path.

    spec.tfReplicaSpecs.Worker.template.spec.containers[0].imagee: unknown field; did you mean image?

A cluster drops a field that it does not know, in silence, unless it is asked to be strict.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes.quantity import is_quantity
from workshop_utils.launchers.kubernetes.tables import KINDS, Type, fields_of, required_of

_WANTED: dict[str, tuple[Any, str]] = {
    "text": (str, "a text; put it in quotes"),
    "integer": (int, "a whole number"),
    "number": (int | float, "a number"),
    "boolean": (bool, "true or false"),
    "list": (list, "a list"),
    "map": (dict, "a map of names to values"),
    "object": (dict, "an object with fields of its own"),
}


def body(described: Mapping[str, Any]) -> None:
    """Raise JobError where `described` is not an object of its kind; one line for each thing that is wrong."""
    problems = list(problems_of(described))
    if problems:
        raise JobError("\n".join(problems))


def problems_of(described: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with `described`, a sentence each; nothing where it is an object of its kind."""
    version, kind = described.get("apiVersion"), described.get("kind")
    found = KINDS.get((str(version), str(kind)))
    if found is None:
        known = ", ".join(f"{kind} of {version}" for version, kind in KINDS)
        yield f"apiVersion and kind are {version!r} and {kind!r}; they must be one of: {known}"
        return
    yield from _object(described, found, "")


def _object(values: Mapping[str, Any], kind: type, path: str) -> Iterator[str]:
    fields = fields_of(kind)
    for name in required_of(kind):
        if name not in values:
            yield f"{_below(path, name)} is missing"
    for name, value in values.items():
        here = _below(path, str(name))
        if name in fields:
            yield from _value(value, fields[name], here)
            continue
        close = difflib.get_close_matches(str(name), fields, n=1)
        known = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(sorted(fields))}"
        yield f"{here}: unknown field; {known}"


def _value(value: Any, wanted: Type, path: str) -> Iterator[str]:
    if value is None:
        yield f"{path} has no value; give it one, or leave the field out"
        return
    if wanted.form == "anything":
        return
    if wanted.form == "quantity":
        if not is_quantity(value):
            yield f"{path} is {value!r}; it must be an amount such as 500m, 2 or 2Gi"
        return
    right, words = _WANTED[wanted.form]
    if not isinstance(value, right) or (isinstance(value, bool) and wanted.form != "boolean"):
        yield f"{path} is {value!r}; it must be {words}"
    elif wanted.form == "list" and wanted.of is not None:
        for index, element in enumerate(value):
            yield from _value(element, wanted.of, f"{path}[{index}]")
    elif wanted.form == "map" and wanted.of is not None:
        for name, element in value.items():
            yield from _value(element, wanted.of, _below(path, str(name)))
    elif wanted.kind is not None:
        yield from _object(value, wanted.kind, path)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
