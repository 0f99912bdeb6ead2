"""Would SageMaker take this request? Asked without an account.

`body` holds a request against the service model that botocore carries: names, types, what is required, lengths,
patterns and enumerations. `rules` knows what the model does not: requests that the service takes, and that then fail
or do something else than was meant, when the instances are paid for already.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

from workshop_utils.jobs import JobError
from workshop_utils.launchers.sagemaker import toolkit
from workshop_utils.launchers.sagemaker.images import lacks_horovod

OPERATION = "CreateTrainingJob"
LONGEST_JOB_SECONDS = 5 * 86_400  # without an increase of the quota "longest run time for a training job"


@functools.cache
def service_model() -> ServiceModel:
    """SageMaker's interface as botocore describes it; nothing is sent."""
    # Not through a session, which reads the learner's AWS profile: none is needed to look at a request.
    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")


def body(request: Mapping[str, Any]) -> None:
    """Raise JobError where `request` is not a CreateTrainingJob request; one line for each thing that is wrong."""
    shape: Any = service_model().operation_model(OPERATION).input_shape
    report = ParamValidator().validate(request, shape)
    problems = report.generate_report().splitlines() if report.has_errors() else []
    if not problems:  # a walk through what has the right form
        problems = list(_problems(request, shape, OPERATION))
    if problems:
        raise JobError("\n".join(problems))


def _problems(value: Any, shape: Any, path: str) -> Iterator[str]:
    """What botocore's own validator leaves out: patterns, enumerations and greatest lengths."""
    if shape.type_name == "structure":
        for name, member in value.items():
            yield from _problems(member, shape.members[name], f"{path}.{name}")
    elif shape.type_name == "list":
        yield from _too_many(len(value), shape, path)
        for position, item in enumerate(value):
            yield from _problems(item, shape.member, f"{path}[{position}]")
    elif shape.type_name == "map":
        yield from _too_many(len(value), shape, path)
        for key, item in value.items():
            yield from _problems(key, shape.key, f"{path} (the name {key!r})")
            yield from _problems(item, shape.value, f"{path}.{key}")
    elif shape.type_name == "string":
        yield from _wrong_text(value, shape, path)
    elif shape.type_name in ("integer", "long"):
        yield from _too_many(value, shape, path)


def _wrong_text(value: str, shape: Any, path: str) -> Iterator[str]:
    allowed = getattr(shape, "enum", None)
    if allowed and value not in allowed:
        close = difflib.get_close_matches(value, allowed, n=1)
        advice = f"did you mean {close[0]}?" if close else f"one of {len(allowed)}, such as {allowed[0]}"
        yield f"{path} is {value!r}; it must be one that SageMaker has: {advice}"
        return
    yield from _too_many(len(value), shape, path)
    pattern = shape.metadata.get("pattern")
    if pattern and not re.fullmatch(_python_pattern(pattern), value, re.DOTALL):
        yield f"{path} is {value!r}; it must match {pattern}"


def _python_pattern(pattern: str) -> str:
    """The service model writes Java's patterns; Python has no Unicode categories, and these come close."""
    for category, ours in ((r"\p{L}", r"\w"), (r"\p{Z}", r"\s"), (r"\p{N}", r"\d")):
        pattern = pattern.replace(category, ours)
    return pattern


def _too_many(size: int, shape: Any, path: str) -> Iterator[str]:
    most = shape.metadata.get("max")
    if most is not None and size > most:
        what = "is" if shape.type_name in ("integer", "long") else "has a length of"
        yield f"{path} {what} {size}; at most {most} is allowed"


def rules(request: Mapping[str, Any]) -> None:
    """Raise JobError where SageMaker would take `request` and not do what was meant."""
    problems = [*_strategy_rules(request), *_limit_rules(request)]
    if problems:
        raise JobError("\n".join(problems))


def _strategy_rules(request: Mapping[str, Any]) -> Iterator[str]:
    parameters = request.get("HyperParameters", {})
    hosts = request["ResourceConfig"].get("InstanceCount", 1)
    on = [name for name in toolkit.SWITCHES.values() if parameters.get(name, "").strip('"') == "true"]
    on = list(dict.fromkeys(on))
    if len(on) > 1:
        yield (
            f"{' and '.join(on)} are both set; the toolkit obeys one of them and says nothing of the other: "
            "a job has one strategy"
        )
    if toolkit.PARAMETER_SERVER in on and hosts < 2:
        yield (
            f"InstanceCount is {hosts}; a parameter server needs at least 2 hosts: with one the toolkit runs the "
            "script alone, without any cluster"
        )
    image = request["AlgorithmSpecification"].get("TrainingImage", "")
    if toolkit.MPI in on and "tensorflow" in image and lacks_horovod(image):
        yield (
            f"TrainingImage is {image}, which has neither Horovod nor mpirun in it: use TensorFlow 2.12, or an image "
            "of your own (jobs/images/)"
        )


def _limit_rules(request: Mapping[str, Any]) -> Iterator[str]:
    stopping = request.get("StoppingCondition", {})
    limit = stopping.get("MaxRuntimeInSeconds")
    if limit is None:
        yield "StoppingCondition.MaxRuntimeInSeconds is missing; without it a hanging job is paid for a whole day"
        return
    if limit > LONGEST_JOB_SECONDS:
        yield f"MaxRuntimeInSeconds is {limit}; at most {LONGEST_JOB_SECONDS} (5 days) is allowed"
    wait = stopping.get("MaxWaitTimeInSeconds")
    if request.get("EnableManagedSpotTraining") and (wait is None or wait < limit):
        yield f"MaxWaitTimeInSeconds is {wait}; with spot instances it must be at least MaxRuntimeInSeconds, {limit}"
    if request.get("EnableManagedSpotTraining") and "CheckpointConfig" not in request:
        yield "CheckpointConfig is missing; a spot instance that is taken away would begin anew"
    retained = request["ResourceConfig"].get("KeepAlivePeriodInSeconds", 0)
    if retained and request.get("EnableManagedSpotTraining"):
        yield "KeepAlivePeriodInSeconds and EnableManagedSpotTraining exclude each other"
