"""Fills in a YAML template of what a target is sent, or gives."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any


def filled(template: Any, values: Mapping[str, Any]) -> Any:
    """A copy of `template` with `values` in the place of `$names`, and without the fields that have none."""
    if isinstance(template, str) and template.startswith("$"):
        return copy.deepcopy(values.get(template[1:]))
    if isinstance(template, list):
        return [filled(each, values) for each in template]
    if isinstance(template, dict):
        fields = {name: filled(each, values) for name, each in template.items()}
        return {name: each for name, each in fields.items() if each is not None}
    return template


def relocated(text: str, folders: Mapping[str, str]) -> str:
    """`text` with each path of `folders` replaced by its folder, and not `/opt/mlflow` or `s3://mine/opt/ml`."""
    paths = "|".join(map(re.escape, sorted(folders, key=len, reverse=True)))
    return (
        re.sub(rf"(?<![\w.-])(?:{paths})(?![\w.-])", lambda path: folders[path[0]], text) if folders else text
    )


def expanded(text: str, known: Mapping[str, str]) -> str:
    """What Kubernetes makes of a command's word or a variable's value. Source: `Expand` of its third_party/forked."""
    words = {"$$": "$"} | {f"$({name})": value for name, value in known.items()}
    return re.sub(r"\$(\$|\([^)]*\))", lambda found: words.get(found[0], found[0]), text)
