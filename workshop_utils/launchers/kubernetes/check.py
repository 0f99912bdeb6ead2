"""Would a cluster take this object? Asked without one, of every field; what is wrong is named by its path.

    spec.tfReplicaSpecs.Worker.template.spec.containers[0].imagee: unknown field; did you mean image?

A cluster drops a field that it does not know, in silence, unless it is asked to be strict. The fields of Kubernetes's
own kinds are those of its client, `kubernetes`; those of the others stand in `crds/`, which is made from the operators'
resource definitions. Both are read as schemas, in the words of JSON Schema, and one check walks over them.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes.client as core
import yaml

Schema = Mapping[str, Any]

CRDS = {tuple(path.stem.rsplit("_", 1)): path for path in (Path(__file__).parent / "crds").glob("*.yaml")}
CORE = {
    "v1": ("ConfigMap", "Namespace", "PersistentVolumeClaim", "Service", "ServiceAccount"),
    "apps/v1": ("DaemonSet", "Deployment"),
    "batch/v1": ("Job",),
    "rbac.authorization.k8s.io/v1": ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
    "storage.k8s.io/v1": ("StorageClass",),
}
# How Kubernetes writes an amount: 500m, 2Gi, 1e3. Source: apimachinery, pkg/api/resource, `Quantity`.
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(([KMGTPE]i|[numkMGTPE])|[eE][+-]?\d+)?")
# By type: what it is in Python, and what is said to whoever wrote something else.
TYPES: dict[str, tuple[Any, str]] = {
    "string": (str, "a text; put it in quotes"),
    "integer": (int, "a whole number"),
    "number": (int | float, "a number"),
    "boolean": (bool, "true or false"),
    "array": (list, "a list"),
    "object": (dict, "an object with fields of its own"),
}
A_MAP = "a map of names to values"
AN_AMOUNT = "an amount such as 500m, 2 or 2Gi"
# What the client calls the types of its fields, and those that it calls texts though they are amounts.
CLIENT_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "datetime": "string"}
AMOUNT: Schema = {"type": "quantity"}
AMOUNTS = {
    "limits": {"type": "object", "additionalProperties": AMOUNT},
    "requests": {"type": "object", "additionalProperties": AMOUNT},
    "size_limit": AMOUNT,
}


def problems_of(described: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with `described`, a sentence each; nothing where it is an object of its kind."""
    version, kind = described.get("apiVersion"), described.get("kind")
    schema = _schema_of_kind(str(version), str(kind))
    if schema is None:
        known = [f"{kind} of {version}" for version, kinds in CORE.items() for kind in kinds]
        known += sorted(f"{kind} of {version.replace('_', '/')}" for version, kind in CRDS)
        yield f"apiVersion and kind are {version!r} and {kind!r}; they must be one of: {', '.join(known)}"
    else:
        yield from _problems(dict(described), schema, "")


def is_quantity(value: object) -> bool:
    """Whether `value` is an amount that Kubernetes can read."""
    if isinstance(value, str):
        return QUANTITY.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


@functools.cache
def _schema_of_kind(version: str, kind: str) -> Schema | None:
    if kind in CORE.get(version, ()):
        return {"model": f"V1{kind}"}
    path = CRDS.get((version.replace("/", "_"), kind))
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path else None


@functools.cache
def _schema_of_model(name: str) -> Schema:
    """The schema of one of the client's classes."""
    model: Any = vars(core)[name]
    return {
        "type": "object",
        "required": [model.attribute_map[each] for each in _required(model)],
        "properties": {
            model.attribute_map[each]: AMOUNTS.get(each) or _schema_of_type(written)
            for each, written in model.openapi_types.items()
        },
    }


def _required(model: type) -> list[str]:
    """What the client's class refuses to be made without; it names one at a time."""
    given: dict[str, Any] = {}
    while True:
        try:
            model(**given)
        except ValueError as error:
            missing = re.search(r"Invalid value for `(\w+)`, must not be `None`", str(error))
            if missing is None:  # it did not like what it was given
                return list(given)
            given[missing[1]] = object()
        else:
            return list(given)


def _schema_of_type(written: str) -> Schema:
    """The schema of a type as the client writes it: `str`, `list[V1Container]`, `dict(str, V1Foo)`."""
    if written in CLIENT_TYPES:
        return {"type": CLIENT_TYPES[written]}
    if listed := re.fullmatch(r"list\[(.*)\]", written):
        return {"type": "array", "items": _schema_of_type(listed[1])}
    if mapped := re.fullmatch(r"dict\(str, (.*)\)", written):
        return {"type": "object", "additionalProperties": _schema_of_type(mapped[1])}
    return {"model": written} if written in vars(core) else {}


def _problems(value: Any, schema: Schema, path: str) -> Iterator[str]:
    """What is wrong with `value`, which stands at `path`."""
    if value is None:
        yield f"{path} has no value; give it one, or leave the field out"
        return
    if "model" in schema:
        schema = _schema_of_model(schema["model"])
    if wanted := _what_would_be_right(value, schema):
        yield f"{path} is {value!r}; it must {wanted}"
    elif "properties" in schema:
        yield from _problems_of_fields(value, schema, f"{path}." if path else "")
    elif "additionalProperties" in schema:
        for name, each in value.items():
            yield from _problems(each, schema["additionalProperties"], f"{path}.{name}")
    elif "items" in schema:
        for index, each in enumerate(value):
            yield from _problems(each, schema["items"], f"{path}[{index}]")


def _problems_of_fields(values: Mapping[str, Any], schema: Schema, path: str) -> Iterator[str]:
    fields = schema["properties"]
    for name in schema.get("required", ()):
        if name not in values:
            yield f"{path}{name} is missing"
    for name, value in values.items():
        if name in fields:
            yield from _problems(value, fields[name], f"{path}{name}")
        else:
            close = difflib.get_close_matches(str(name), fields, n=1)
            known = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(sorted(fields))}"
            yield f"{path}{name}: unknown field; {known}"


def _what_would_be_right(value: Any, schema: Schema) -> str | None:
    """What `value` must be or have, if it is or has not."""
    wanted = schema.get("type")
    if wanted == "quantity":
        return None if is_quantity(value) else f"be {AN_AMOUNT}"
    if wanted is not None:
        kind, words = TYPES[wanted]
        if not isinstance(value, kind) or (isinstance(value, bool) and wanted != "boolean"):
            return f"be {A_MAP if wanted == 'object' and 'properties' not in schema else words}"
    if "enum" in schema and value not in schema["enum"]:
        return f"be one of {', '.join(map(repr, schema['enum']))}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return f"match {schema['pattern']}"
    if "minimum" in schema and value < schema["minimum"]:
        return f"be at least {schema['minimum']}"
    if "maximum" in schema and value > schema["maximum"]:
        return f"be at most {schema['maximum']}"
    if not value and {"minLength", "minItems", "minProperties"} & schema.keys():
        return "not be empty"
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        return f"have at most {schema['maxLength']} characters"
    return None
