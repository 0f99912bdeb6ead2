"""Would a cluster take this object? Asked without one, of every field; what is wrong is named by its path.

    spec.tfReplicaSpecs.Worker.template.spec.containers[0].imagee: unknown field; did you mean image?

A server drops a field that it does not know unless it is asked to be strict, as kubectl and the launcher ask from
Kubernetes 1.27 on; so strict is this check. The fields of Kubernetes's own kinds are those of its client,
`kubernetes`, and what that lacks is in `crds/core.yaml`; those of the others stand in `crds/`, which is made from the
operators' resource definitions. What an operator asks for in its own code stands in `crds/operators.yaml` if it
concerns a single field, and below if it concerns several. Schemas are written in the words of JSON Schema, and one
check walks over them.

Sources: training-operator v1.9.4, pkg/webhooks; mpi-operator v0.8.0, pkg/apis/kubeflow/validation; trainer v2.3.0, the
rules of the TrainJob's resource definition; volcano v1.15.1, pkg/webhooks/admission/jobs/validate. The cluster of
jobs/clusters/eks has the operators of these versions.
"""

from __future__ import annotations

import difflib
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes.client as core
import yaml

from workshop_utils.jobs import JobError

Schema = Mapping[str, Any]

CRDS = Path(__file__).parent / "crds"
CORE: Mapping[str, Any] = yaml.safe_load((CRDS / "core.yaml").read_text(encoding="utf-8"))
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS-1035
# How Kubernetes writes an amount: 500m, 2Gi, 1e3. Source: apimachinery, pkg/api/resource, `Quantity`.
QUANTITY = re.compile(r"\+?(\d+(\.\d*)?|\.\d+)(([KMGTPE]i|[numkMGTPE])|[eE][+-]?\d+)?")
# By type: what it is in Python, and the words for it in a message.
TYPES: dict[str, tuple[Any, str]] = {
    "string": (str, "a text; put it in quotes"),
    "integer": (int, "a whole number"),
    "number": (int | float, "a number"),
    "boolean": (bool, "true or false"),
    "array": (list, "a list"),
    "object": (dict, "an object with fields of its own"),
}
# By the word of JSON Schema: what a value must be or have, and whether it does.
RULES: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "enum": ("be {}", lambda value, allowed: value in allowed),
    # In the server's language, "$" is the text's end alone, and not also what stands before a last new line.
    "pattern": ("match {}", lambda value, wanted: bool(re.search(re.sub(r"\$$", r"\\Z", wanted), value))),
    "minimum": ("be at least {}", operator.ge),
    "maximum": ("be at most {}", operator.le),
    "maxLength": ("have at most {} characters", lambda value, most: len(value) <= most),
    **dict.fromkeys(
        ("minLength", "minItems", "minProperties"), ("not be empty", lambda value, _: bool(value))
    ),
}


def require(described: Mapping[str, Any]) -> None:
    """Raise JobError where a cluster or an operator would refuse `described`, with a line for each reason."""
    if problems := problems_of(described):
        raise JobError("\n".join(problems))


def problems_of(described: Mapping[str, Any]) -> list[str]:
    """What is wrong with `described`, a sentence each: with single fields, or else with several together."""
    version, kind = str(described.get("apiVersion")), str(described.get("kind"))
    schema = _schema_of_kind(version, kind)
    if schema is None:
        names = [f"{kind} of {version}" for version, kinds in CORE["kinds"].items() for kind in kinds]
        tables = [path.stem.rsplit("_", 1) for path in sorted(CRDS.glob("*_*.yaml"))]
        names += [f"{kind} of {version.replace('_', '/')}" for version, kind in tables]
        return [f"apiVersion and kind are {version} and {kind}; they must be one of: {', '.join(names)}"]
    # An init container may lack the same as its pod's container.
    return [*_problems(dict(described), schema, "")] or [*dict.fromkeys(_problems_together(described))]


def is_quantity(value: object) -> bool:
    """Whether `value` is an amount that Kubernetes can read."""
    if isinstance(value, str):
        return QUANTITY.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


# Schemas


@functools.cache
def _schema_of_kind(version: str, kind: str) -> Schema | None:
    if kind in CORE["kinds"].get(version, ()):
        return {"model": f"V1{kind}"}
    path = CRDS / f"{version.replace('/', '_')}_{kind}.yaml"
    if not path.is_file():
        return None
    asked = yaml.safe_load((CRDS / "operators.yaml").read_text(encoding="utf-8"))
    return _merged(yaml.safe_load(path.read_text(encoding="utf-8")), asked.get(path.stem, {}))


def _merged(schema: Any, further: Any) -> Any:
    """`schema` with what `further` adds at any depth."""
    if not (isinstance(schema, dict) and isinstance(further, dict)):
        return further
    return {**schema, **{name: _merged(schema.get(name), each) for name, each in further.items()}}


@functools.cache
def _schema_of_model(name: str) -> Schema:
    """The schema of one of the client's classes."""
    model: Any = vars(core)[name]
    blank = model.__new__(model)
    blank.local_vars_configuration = core.Configuration()
    required = []
    for attribute, field in model.attribute_map.items():
        try:
            setattr(blank, attribute, None)
        except ValueError:  # how the client refuses to do without a field
            required.append(field)
    types = {name: _schema_of_type(written) for name, written in model.openapi_types.items()}
    rules = {**CORE["fields"]["*"], **CORE["fields"].get(name, {})}
    lists = {name for name, schema in types.items() if schema.get("type") == "array"}  # a LimitRange's limits
    types |= {name: schema for name, schema in rules.items() if name not in lists}
    properties = {field: types[attribute] for attribute, field in model.attribute_map.items()}
    return {"type": "object", "required": required, "properties": properties}


def _schema_of_type(written: str) -> Schema:
    """The schema of a type as the client writes it: `str`, `list[V1Container]`, `dict(str, V1Foo)`."""
    if written in CORE["types"]:
        return {"type": CORE["types"][written]}
    if listed := re.fullmatch(r"list\[(.*)\]", written):
        return {"type": "array", "items": _schema_of_type(listed[1])}
    if mapped := re.fullmatch(r"dict\(str, (.*)\)", written):
        return {"type": "object", "additionalProperties": _schema_of_type(mapped[1])}
    return {"model": written} if written in vars(core) else {}


# One field


def _problems(value: Any, schema: Schema, path: str) -> Iterator[str]:
    """What is wrong with `value`, which stands at `path`."""
    if value is None:
        yield f"{path} has no value; give it one, or leave the field out"
        return
    if "model" in schema:
        schema = _merged(_schema_of_model(schema["model"]), schema)
    if advice := _advice(value, schema):
        yield f"{path} is {value!r}; it must {advice}"
    elif "properties" in schema:
        fields, prefix = schema["properties"], f"{path}." if path else ""
        unknown = value.keys() - fields.keys()
        close = {name: difflib.get_close_matches(str(name), fields, n=1) for name in unknown}
        misspelled = {match for matches in close.values() for match in matches}
        for name in schema.get("required", ()):
            if name not in value.keys() | misspelled:
                yield f"{prefix}{name} is missing"
        for name, each in value.items():
            if name in fields:
                yield from _problems(each, fields[name], f"{prefix}{name}")
            elif close[name]:
                yield f"{prefix}{name}: unknown field; did you mean {close[name][0]}?"
            else:
                yield f"{prefix}{name}: unknown field; the fields are {', '.join(sorted(fields))}"
    elif "additionalProperties" in schema:
        for name, each in value.items():
            if advice := _advice(name, schema.get("propertyNames", {})):
                yield f"{path}: {name!r} is no name for a field; it must {advice}"
            of_value = schema["additionalProperties"]
            if "/" in str(name) and of_value.get("type") == "quantity":  # such as vpc.amazonaws.com/efa
                of_value = {"type": "count"}
            yield from _problems(each, of_value, f"{path}.{name}")
    elif "items" in schema:
        names = [each.get("name") for each in value if isinstance(each, dict)]
        if schema.get("named", "") not in ["", *names]:
            yield f"{path}: none is named {schema['named']!r}; the operator would not know which one trains"
        for index, each in enumerate(value):
            yield from _problems(each, schema["items"], f"{path}[{index}]")


def _advice(value: Any, schema: Schema) -> str | None:
    """What `value` must be or have; None if it is and has all that."""
    wanted = schema.get("type")
    if wanted == "quantity":
        return None if is_quantity(value) else "be an amount such as 500m, 2 or 2Gi"
    if wanted == "count":
        return None if re.fullmatch(r"\d+", str(value)) else "be a whole number: devices cannot be halved"
    if wanted is not None:
        kind, words = TYPES[wanted]
        if not isinstance(value, kind) or (isinstance(value, bool) and wanted != "boolean"):
            is_map = wanted == "object" and "properties" not in schema
            return f"be {'a map of names to values' if is_map else words}"
    for word, (advice, holds) in RULES.items():
        if word in schema and not holds(value, schema[word]):
            limit = schema[word]
            return advice.format(" or ".join(map(str, limit)) if isinstance(limit, list) else limit)
    return None


# Several fields


def _problems_together(described: Mapping[str, Any]) -> Iterator[str]:
    """What an operator would refuse of an object each of whose fields is right."""
    name, spec = described.get("metadata", {}).get("name", ""), described.get("spec", {})
    if not LABEL.fullmatch(name):
        yield (
            f"metadata.name is {name!r}; it must be lower-case letters, digits and '-', start with a letter, and be "
            "at most 63 long"
        )
    # A TrainJob only patches the pods of its runtime, which may have the volume.
    for pod in _pods_in(described) if described["kind"] != "TrainJob" else ():
        volumes = {each["name"] for each in pod.get("volumes", ())}
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            for mount in container.get("volumeMounts", ()):
                if mount["name"] not in volumes:
                    yield f"{mount['mountPath']} mounts volume {mount['name']!r}, which the pod does not have"
    if described["kind"] == "MPIJob":
        workers = spec["mpiReplicaSpecs"].get("Worker", {}).get("replicas", 1)
        if len(last := f"{name}-worker-{workers - 1}") > 63:
            yield f"metadata.name is too long: {last}, a pod's name, would have more than 63 characters"


def _pods_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """The specs of all pods in an object."""
    if isinstance(value, dict) and "containers" in value:
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _pods_in(each)
