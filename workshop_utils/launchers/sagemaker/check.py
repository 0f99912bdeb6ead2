"""Would SageMaker take this request? Asked without an account.

`body` compares a request with the service model that botocore carries: names, types, what is required, lengths,
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
def request_shape() -> Any:
    """The form of a request, as botocore describes SageMaker's interface; nothing is sent."""
    # Not through a session, which reads the learner's AWS profile: none is needed to look at a request.
    model = ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
    return model.operation_model(OPERATION).input_shape


def body(request: Mapping[str, Any]) -> None:
    """Raise JobError where `request` is not a CreateTrainingJob request; one line for each thing that is wrong."""
    report = ParamValidator().validate(request, request_shape())
    _refuse(
        report.generate_report().splitlines()
        if report.has_errors()
        else _problems(request, request_shape(), OPERATION)
    )


def instance_type(name: str) -> None:
    """Raise JobError where SageMaker has no instances of the type `name`."""
    shape = request_shape().members["ResourceConfig"].members["InstanceType"]
    _refuse(_problems(name, shape, f"{OPERATION}.ResourceConfig.InstanceType"))


def _refuse(problems: Iterator[str] | list[str]) -> None:
    if text := "\n".join(problems):
        raise JobError(text)


def _problems(value: Any, shape: Any, path: str) -> Iterator[str]:
    """What botocore's own validator leaves out of a value of the right form."""
    if shape.type_name == "structure":
        for name, member in value.items():
            yield from _problems(member, shape.members[name], f"{path}.{name}")
    elif shape.type_name == "map":
        for key, item in value.items():
            yield from _problems(key, shape.key, f"{path} (the name {key!r})")
            yield from _problems(item, shape.value, f"{path}.{key}")
    elif shape.type_name == "list":
        for position, item in enumerate(value):
            yield from _problems(item, shape.member, f"{path}[{position}]")
    most, pattern = shape.metadata.get("max"), shape.metadata.get("pattern")
    allowed = getattr(shape, "enum", None)
    is_number = isinstance(value, int)
    if allowed and value not in allowed:
        close = difflib.get_close_matches(value, allowed, n=1)
        advice = f"did you mean {close[0]}?" if close else f"one of {len(allowed)}, such as {allowed[0]}"
        yield f"{path} is {value!r}; it must be one that SageMaker has: {advice}"
    elif most is not None and (value if is_number else len(value)) > most:
        size = f"is {value}" if is_number else f"has a length of {len(value)}"
        yield f"{path} {size}; at most {most} is allowed"
    elif pattern and not re.fullmatch(_python_pattern(pattern), value, re.DOTALL):
        yield f"{path} is {value!r}; it must match {pattern}"


def _python_pattern(pattern: str) -> str:
    """The service model writes Java's patterns; Python has no Unicode categories, and these come close."""
    for category, ours in ((r"\p{L}", r"\w"), (r"\p{Z}", r"\s"), (r"\p{N}", r"\d")):
        pattern = pattern.replace(category, ours)
    return pattern


def rules(request: Mapping[str, Any]) -> None:
    """Raise JobError where SageMaker would take `request` and not do what was meant."""
    _refuse(_broken_rules(request))


def _broken_rules(request: Mapping[str, Any]) -> Iterator[str]:
    parameters = request["HyperParameters"]
    known = dict.fromkeys(switch for switch in toolkit.SWITCHES.values() if switch)
    switches = [switch for switch in known if parameters.get(switch) == "true"]
    if len(switches) > 1:
        yield (
            f"{' and '.join(switches)} are both set; the toolkit obeys one of them and says nothing of the "
            "other: a job has one strategy"
        )
    image = request["AlgorithmSpecification"]["TrainingImage"]
    if toolkit.MPI in switches and "tensorflow" in image and lacks_horovod(image):
        yield (
            f"TrainingImage is {image}, which has neither Horovod nor mpirun in it: use TensorFlow 2.12, or an image "
            "of your own (jobs/images/)"
        )
    stopping = request["StoppingCondition"]
    limit = stopping["MaxRuntimeInSeconds"]
    if limit > LONGEST_JOB_SECONDS:
        yield f"MaxRuntimeInSeconds is {limit}; at most {LONGEST_JOB_SECONDS} (5 days) is allowed"
    wait = stopping.get("MaxWaitTimeInSeconds")
    if wait is not None and wait < limit:
        yield f"MaxWaitTimeInSeconds is {wait}; with spot instances it must be at least MaxRuntimeInSeconds, {limit}"
