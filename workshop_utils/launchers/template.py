"""Fills in a YAML template of what a target is sent, or gives."""

from __future__ import annotations

import copy
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
