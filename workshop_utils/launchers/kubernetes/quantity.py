"""Kubernetes's own way to write an amount: `500m`, `2Gi`, `1e3`.

Source: Kubernetes, apimachinery, pkg/api/resource, `Quantity`.
"""

from __future__ import annotations

import re

_FORM = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(([KMGTPE]i|[numkMGTPE])|[eE][+-]?\d+)?")


def is_quantity(value: object) -> bool:
    """Whether `value` is an amount that Kubernetes can read."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) or (isinstance(value, str) and _FORM.fullmatch(value) is not None)
