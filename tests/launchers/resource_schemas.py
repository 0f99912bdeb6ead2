"""The resources' own schemas, where there are some: WORKSHOP_SCHEMAS names their folder."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

SCHEMAS = os.environ.get("WORKSHOP_SCHEMAS")
needs_schemas = pytest.mark.skipif(
    not SCHEMAS, reason="WORKSHOP_SCHEMAS names no folder with the resources' schemas"
)


def closed(schema: dict[str, Any], is_root: bool = True) -> dict[str, Any]:
    """`schema` without room for unknown fields, and with Kubernetes's own keywords turned into JSON Schema's."""
    made = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "number", "string"], **_only("pattern", schema)}
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return {}
    if "properties" in schema:
        made["properties"] = {name: closed(each, False) for name, each in schema["properties"].items()}
        if is_root:  # of it a resource's schema says nothing: core does
            made["properties"]["metadata"] = {"type": "object"}
        made["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = closed(schema["additionalProperties"], False)
    if "items" in schema:
        made["items"] = closed(schema["items"], False)
    return made


def inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """eksctl's `schema`, which is closed already, with its definitions in place, and typed where eksctl is silent."""
    if isinstance(schema, list):
        return [inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/definitions/")
        return {"type": "string"} if name.endswith("arn.ARN") else inlined(definitions[name], definitions)
    typed = {"type": "object"} if isinstance(schema.get("properties"), dict) else {}
    return {**{key: inlined(each, definitions) for key, each in schema.items()}, **typed}


def _only(key: str, values: dict[str, Any]) -> dict[str, Any]:
    return {key: values[key]} if key in values else {}


@functools.cache
def schema(version: str, kind: str) -> dict[str, Any] | None:
    """The closed schema of a kind; None for Kubernetes's own, for which there is no resource definition."""
    assert SCHEMAS is not None
    if kind == "ClusterConfig":
        whole = json.loads((Path(SCHEMAS) / "eksctl_v1alpha5_ClusterConfig.json").read_text())
        made: dict[str, Any] = inlined(whole["definitions"]["ClusterConfig"], whole["definitions"])
        return made
    name = Path(SCHEMAS) / f"{version.replace('/', '_')}_{kind}.json"
    if "." not in version or version.split("/")[0].endswith("k8s.io"):
        return None
    return closed(json.loads(name.read_text())["openAPIV3Schema"])


def schema_of(described: dict[str, Any]) -> dict[str, Any] | None:
    """The closed schema of the kind of `described`."""
    return schema(described["apiVersion"], described["kind"])


@functools.cache
def validator(version: str, kind: str) -> jsonschema.Draft202012Validator | jsonschema.Draft7Validator:
    """What checks an object against the schema of its kind."""
    found = schema(version, kind)
    assert found is not None, f"there is no schema of {kind} of {version}"
    return (jsonschema.Draft7Validator if kind == "ClusterConfig" else jsonschema.Draft202012Validator)(found)


def places(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    below: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, each in below:
        yield (*path, key), each
        yield from places(each, (*path, key))


def replaced(value: Any, path: tuple[str | int, ...], other: Any) -> Any:
    """A copy of `value` with `other` at `path`."""
    if not path:
        return other
    key, *rest = path
    made = value.copy()
    made[key] = replaced(value[key], tuple(rest), other)
    return made
