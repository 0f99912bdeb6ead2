"""Which fields an object of a kind may have, and of what type: read from the official clients' own tables.

| kind | table |
| --- | --- |
| Job, ConfigMap, and every pod | `kubernetes` |
| TFJob, PyTorchJob | `kubeflow-training` |
| TrainJob, TrainingRuntime | `kubeflow-trainer-api` |
| MPIJob | here, since no client has v2beta1 |
"""

from __future__ import annotations

import functools
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar

import kubeflow.training as training
import kubeflow_trainer_api.models as trainer
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


class MPIReplicaSpec:
    """A replica of an MPIJob, in the notation of the clients' tables. Source: mpi-operator v0.8, v2beta1."""

    openapi_types: ClassVar = {"replicas": "int", "restartPolicy": "str", "template": "V1PodTemplateSpec"}
    required: ClassVar = ("replicas", "template")


class MPISchedulingPolicy:
    """How the pods of an MPIJob are scheduled together."""

    openapi_types: ClassVar = {
        "minAvailable": "int",
        "minResources": "object",
        "priorityClass": "str",
        "queue": "str",
        "scheduleTimeoutSeconds": "int",
    }


class MPIRunPolicy:
    """When an MPIJob ends, and what stays."""

    openapi_types: ClassVar = {
        "activeDeadlineSeconds": "int",
        "backoffLimit": "int",
        "cleanPodPolicy": "str",
        "managedBy": "str",
        "schedulingPolicy": "MPISchedulingPolicy",
        "suspend": "bool",
        "ttlSecondsAfterFinished": "int",
    }


class MPIJobSpec:
    """What an MPIJob asks for."""

    openapi_types: ClassVar = {
        "launcherCreationPolicy": "str",
        "mpiImplementation": "str",
        "mpiReplicaSpecs": "dict(str, MPIReplicaSpec)",
        "runLauncherAsWorker": "bool",
        "runPolicy": "MPIRunPolicy",
        "slotsPerWorker": "int",
        "sshAuthMountPath": "str",
    }
    required: ClassVar = ("mpiReplicaSpecs",)


class MPIJob:
    """An MPIJob v2beta1."""

    openapi_types: ClassVar = {
        "apiVersion": "str",
        "kind": "str",
        "metadata": "V1ObjectMeta",
        "spec": "MPIJobSpec",
        "status": "object",
    }
    required: ClassVar = ("spec",)


KINDS: dict[tuple[str, str], type] = {
    ("batch/v1", "Job"): core.V1Job,
    ("v1", "ConfigMap"): core.V1ConfigMap,
    ("kubeflow.org/v1", "TFJob"): training.KubeflowOrgV1TFJob,
    ("kubeflow.org/v1", "PyTorchJob"): training.KubeflowOrgV1PyTorchJob,
    ("kubeflow.org/v2beta1", "MPIJob"): MPIJob,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): trainer.TrainerV1alpha1TrainJob,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): trainer.TrainerV1alpha1TrainingRuntime,
}


@functools.cache
def fields_of(kind: type) -> dict[str, Type]:
    """The fields of an object of `kind`, by the names that stand in YAML."""
    if issubclass(kind, pydantic.BaseModel):
        return {
            field.alias or name: _of_annotation(field.annotation) for name, field in kind.model_fields.items()
        }
    table: Any = kind
    names = getattr(kind, "attribute_map", {})
    return {
        names.get(name, name): _with_quantities(name, _of_text(written))
        for name, written in table.openapi_types.items()
    }


@functools.cache
def required_of(kind: type) -> tuple[str, ...]:
    """The fields that an object of `kind` must have."""
    if issubclass(kind, pydantic.BaseModel):
        return tuple(field.alias or name for name, field in kind.model_fields.items() if field.is_required())
    if "attribute_map" not in vars(kind):
        return tuple(getattr(kind, "required", ()))
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
    for place in (globals(), vars(core), vars(training)):
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
