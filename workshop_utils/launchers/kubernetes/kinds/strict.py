"""A model of a kind that refuses unknown fields, wrong types and empty values, and says so by path, in sentences.

Fields are written in Python's manner and read in YAML's: `slots_per_worker` is `slotsPerWorker`. What an object shares
with core kinds, such as a pod's template, is compared with the table of the cluster's own client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import kubernetes.client as core
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from workshop_utils.launchers.kubernetes.compare import NO_VALUE, WORDS, below, problems_in, unknown
from workshop_utils.launchers.kubernetes.quantity import is_quantity
from workshop_utils.launchers.kubernetes.tables import Type, fields_of

_FORMS = {
    "string_type": "text",
    "int_type": "integer",
    "float_type": "number",
    "bool_type": "boolean",
    "list_type": "list",
    "dict_type": "map",
    "model_type": "object",
    "quantity": "quantity",
}


class Strict(BaseModel):
    """An object, or a part of one, of a kind that no client knows."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, alias_generator=to_camel)

    @field_validator("*", mode="before")
    @classmethod
    def _has_a_value(cls, value: Any) -> Any:
        if value is None:  # a cluster takes it for a field that is not there, and its writer meant something
            raise PydanticCustomError("no_value", NO_VALUE)
        return value

    @classmethod
    def problems_of(cls, described: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong with `described`, a sentence each; nothing where it is an object of this kind."""
        try:
            cls.model_validate(described)
        except ValidationError as error:
            for detail in error.errors():
                yield from _sentences(detail, cls)


def _sentences(detail: Any, model: type[Strict]) -> Iterator[str]:
    path, reason, context = "", detail["type"], detail.get("ctx", {})
    for part in detail["loc"]:
        path = below(path, part)
    if reason == "extra_forbidden":
        yield f"{path}: {unknown(str(detail['loc'][-1]), _fields_at(detail['loc'][:-1], model))}"
    elif reason == "missing":
        yield f"{path} is missing"
    elif reason == "no_value":
        yield f"{path} {NO_VALUE}"
    elif reason == "core":
        for problem in context["problems"]:
            yield below(path, problem)
    else:
        yield f"{path} is {detail['input']!r}; it must {_what_would_be_right(reason, context, detail['msg'])}"


def _what_would_be_right(reason: str, context: Mapping[str, Any], message: str) -> str:
    if reason in _FORMS:
        return f"be {WORDS[_FORMS[reason]]}"
    match reason:
        case "literal_error":
            return f"be one of {context['expected'].replace(' or ', ', ')}"
        case "string_pattern_mismatch":
            return f"match {context['pattern']}"
        case "greater_than_equal":
            return f"be at least {context['ge']}"
        case "less_than_equal":
            return f"be at most {context['le']}"
        case "string_too_long":
            return f"have at most {context['max_length']} characters"
        case "string_too_short" | "too_short":
            return "not be empty"
        case _:
            return f"be right: {message}"


def _fields_at(loc: tuple[str | int, ...], model: type[Strict]) -> list[str]:
    """The fields of the object that stands at `loc` in an object of `model`."""
    at = Type("object", kind=model)
    for part in loc:
        found = fields_of(at.kind)[str(part)] if at.kind is not None else at.of
        assert found is not None, "a location leads through objects, lists and maps alone"
        at = found
    assert at.kind is not None
    return list(fields_of(at.kind))


def _follows(kind: type) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def check(values: dict[str, Any]) -> dict[str, Any]:
        problems = list(problems_in(values, kind))
        if problems:
            raise PydanticCustomError("core", "not such an object", {"problems": problems})
        return values

    return check


def _is_amount(value: Any) -> Any:
    if not is_quantity(value):
        raise PydanticCustomError("quantity", "not an amount")
    return value


# `Any`, and only then the check, for an amount may be a number as well as a text.
Quantity = Annotated[Any, BeforeValidator(_is_amount)]
ObjectMeta = Annotated[dict[str, Any], AfterValidator(_follows(core.V1ObjectMeta))]
PodTemplate = Annotated[dict[str, Any], AfterValidator(_follows(core.V1PodTemplateSpec))]
ClaimSpec = Annotated[dict[str, Any], AfterValidator(_follows(core.V1PersistentVolumeClaimSpec))]
# A name with dots, and a name without, as Kubernetes and its operators write them in their resource definitions.
Subdomain = Annotated[
    str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
]
DnsLabel = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
