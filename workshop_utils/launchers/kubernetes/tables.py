"""Which fields an object of a kind may have, and of what type: read from the official clients' own tables.

| kind | table |
| --- | --- |
| Job, ConfigMap, and every pod | `kubernetes` |
| TFJob, PyTorchJob | `kubeflow-training` |
| TrainJob, TrainingRuntime | `kubeflow-trainer-api` |
| what no client knows: MPIJob v2beta1, Volcano, ClusterConfig | `kinds` |
"""

from __future__ import annotations

import functools
import re
import types
import typing
from dataclasses import dataclass
from typing import Any

import kubeflow.training as training
import kubernetes.client as core
import pydantic


@dataclass(frozen=True)
class Type:
    """A type of a field: `form` is text, integer, number, boolean, quantity, anything, object, list or map.

    `of` is the type of the elements of a list or a map; `kind` is the class whose table an object follows.
    """

    form: str
    of: Type | None = None
    kind: type | None = None


ANYTHING = Type("anything")
_PLAIN = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "datetime": "text",
    "object": "anything",
}
_BY_NAME = {
    "IoK8sApimachineryPkgApiResourceQuantity": "quantity",
    "IoK8sApimachineryPkgUtilIntstrIntOrString": "anything",
}
_QUANTITIES = {"limits", "requests", "size_limit", "min_resources"}  # which the clients call texts


@functools.cache
def fields_of(kind: type) -> dict[str, Type]:
    """The fields of an object of `kind`, by the names that stand in YAML."""
    if issubclass(kind, pydantic.BaseModel):
        return {
            field.alias or name: _of_annotation(field.annotation) for name, field in kind.model_fields.items()
        }
    table: Any = kind
    return {
        table.attribute_map[name]: _with_quantities(name, _of_text(written))
        for name, written in table.openapi_types.items()
    }


@functools.cache
def required_of(kind: type) -> tuple[str, ...]:
    """The fields that an object of `kind` must have."""
    if issubclass(kind, pydantic.BaseModel):
        return tuple(field.alias or name for name, field in kind.model_fields.items() if field.is_required())
    names: dict[str, str] = vars(kind)["attribute_map"]
    return tuple(names[name] for name in _asked_for(kind))


def _asked_for(kind: type) -> list[str]:
    """What the client's own class refuses to be made without; it names one at a time."""
    given: dict[str, Any] = {}
    while True:
        try:
            kind(**given)
        except ValueError as error:
            found = re.search(r"Invalid value for `(\w+)`, must not be `None`", str(error))
            if found is None:  # it did not like what it was given
                return list(given)
            given[found[1]] = object()
        else:
            return list(given)


def _with_quantities(name: str, found: Type) -> Type:
    if name not in _QUANTITIES:
        return found
    quantity = Type("quantity")
    return Type("map", quantity) if found.form == "map" else quantity


def _of_text(written: str) -> Type:
    """A type as the clients write it: `str`, `list[V1Container]`, `dict(str, V1Foo)`."""
    if written in _PLAIN:
        return Type(_PLAIN[written])
    if listed := re.fullmatch(r"list\[(.*)\]", written):
        return Type("list", _of_text(listed[1]))
    if mapped := re.fullmatch(r"dict\(str, (.*)\)", written):
        return Type("map", _of_text(mapped[1]))
    for place in (vars(core), vars(training)):
        if isinstance(place.get(written), type):
            return Type("object", kind=place[written])
    return ANYTHING


def _of_annotation(annotation: Any) -> Type:
    """A type as pydantic's models have it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _of_annotation(next(each for each in arguments if each is not type(None)))
    if origin is typing.Annotated:
        return _of_annotation(arguments[0])
    if origin is list:
        return Type("list", _of_annotation(arguments[0]))
    if origin is dict:
        return Type("map", _of_annotation(arguments[1]))
    if not isinstance(annotation, type):
        return ANYTHING
    if annotation.__name__ in _BY_NAME:
        return Type(_BY_NAME[annotation.__name__])
    if issubclass(annotation, pydantic.BaseModel):
        return Type("object", kind=annotation)
    return Type(_PLAIN.get(annotation.__name__, "anything"))
