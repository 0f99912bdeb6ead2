"""Writes the tables of workshop_utils/launchers/kubernetes/crds from resource definitions and eksctl's schema.

    python tests/launchers/update_crds.py SOURCE FILE...

FILE is a CustomResourceDefinition in YAML, or what `eksctl utils schema` prints; SOURCE says of which version it is.
A table is the schema without descriptions. Where it repeats a type of Kubernetes's own, such as a pod's template, it
names the class of the client `kubernetes` instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kubernetes.client as core
import yaml

CRDS = Path(__file__).parents[2] / "workshop_utils" / "launchers" / "kubernetes" / "crds"
KEPT = (
    "enum", "maximum", "maxLength", "minimum", "minItems", "minLength", "minProperties", "pattern", "required", "type",
)  # fmt: skip
REPEATED = (
    "V1EnvVar", "V1LabelSelector", "V1PersistentVolumeClaimSpec", "V1ResourceRequirements", "V2MetricSpec",
)  # fmt: skip


def table(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """What `schema` asks for, in as few words as the check needs."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/definitions/")
        return {"type": "string"} if name.endswith("arn.ARN") else table(definitions[name], definitions)
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": "quantity"} if "pattern" in schema else {}
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return {}
    properties = schema.get("properties") or {}
    if properties.keys() == {"metadata", "spec"}:
        inner = properties["spec"].get("properties", {})
        if "containers" in inner or "template" in inner:
            return {"model": "V1PodTemplateSpec" if "containers" in inner else "V1JobTemplateSpec"}
    for name in REPEATED:
        if properties.keys() == set(vars(core)[name].attribute_map.values()):
            return {"model": name}
    made: dict[str, Any] = {key: schema[key] for key in KEPT if schema.get(key) not in (None, [])}
    if properties:
        made["type"] = "object"  # of which eksctl's schema says nothing
        made["properties"] = {name: table(each, definitions) for name, each in properties.items()}
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            made[inner] = table(schema[inner], definitions)
    return made


def write(source: str, version: str, kind: str, made: dict[str, Any]) -> None:
    """Keep a table in its file."""
    path = CRDS / f"{version.replace('/', '_')}_{kind}.yaml"
    text = yaml.safe_dump(made, default_flow_style=None, width=110)
    head = f"# {kind} of {version}, from {source}. Written by tests/launchers/update_crds.py.\n"
    path.write_text(head + text, encoding="utf-8")


def main() -> None:
    """Write a table for each kind and version in the files."""
    source, *files = sys.argv[1:]
    for described in (each for file in files for each in yaml.safe_load_all(Path(file).read_text())):
        if definitions := described.get("definitions"):
            made = table(definitions["ClusterConfig"], definitions)
            write(source, "eksctl.io/v1alpha5", "ClusterConfig", made)
            continue
        group, kind = described["spec"]["group"], described["spec"]["names"]["kind"]
        for version in described["spec"]["versions"]:
            made = table(version["schema"]["openAPIV3Schema"], {})
            # An object without these two is of no use, whatever its definition says.
            made |= {"type": "object", "required": ["metadata", "spec"]}
            made["properties"] |= {"metadata": {"model": "V1ObjectMeta"}, "status": {}}
            write(source, f"{group}/{version['name']}", kind, made)


if __name__ == "__main__":
    main()
