"""What SageMaker would refuse, or accept and do differently, although botocore sends it.

Botocore compares a request with the service model that it carries: names, types, and what is required. Here the rest of
that model is checked (patterns, enumerations, greatest lengths and numbers), and rules that it does not hold: a job
that breaks them fails, or does something else, once the instances are paid for.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from botocore.loaders import Loader
from botocore.model import ServiceModel

from workshop_utils.jobs import JobError
from workshop_utils.launchers.sagemaker.toolkit import STARTER, SWITCHES

OPERATION = "CreateTrainingJob"
LONGEST_JOB_SECONDS = 5 * 86_400  # unless the account's quota was raised


@functools.cache
def service_model() -> ServiceModel:
    """SageMaker's interface as botocore describes it."""
    # Not through a session, which reads the learner's AWS profile: none is needed to look at a request.
    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")


def instance_type(name: str) -> None:
    """Raise JobError if SageMaker has no instances of the type `name`."""
    shape = service_model().shape_for("TrainingInstanceType")
    _refuse(_problems(name, shape, f"{OPERATION}.ResourceConfig.InstanceType"))


def body(request: Mapping[str, Any]) -> None:
    """Raise JobError if SageMaker would refuse `request`; one line for each problem."""
    _refuse(_problems(request, service_model().operation_model(OPERATION).input_shape, OPERATION))


def rules(request: Mapping[str, Any]) -> None:
    """Raise JobError if SageMaker would accept `request` and do something else, or fail later."""
    known = dict.fromkeys(filter(None, SWITCHES.values()))
    switches = [name for name in known if request["HyperParameters"].get(name) == "true"]
    if len(switches) > 1:
        obeyed = "the toolkit obeys one of them and says nothing of the other: a job has one strategy"
        raise JobError(f"{' and '.join(switches)} are both set; {obeyed}")
    module, image = (
        request["Environment"].get(STARTER, ""),
        request["AlgorithmSpecification"]["TrainingImage"],
    )
    if "tensorflow" in module and re.search(r"/workshop-\w+[:@]", image):
        lacks = "an image of jobs/images/, which have no toolkit for TensorFlow's strategies"
        raise JobError(
            f"image is {image!r}, {lacks}: leave it out, and AWS's is taken, which has TensorFlow 2.21"
        )
    stopping = request["StoppingCondition"]
    limit, wait = stopping["MaxRuntimeInSeconds"], stopping.get("MaxWaitTimeInSeconds")
    if limit > LONGEST_JOB_SECONDS:
        raise JobError(f"MaxRuntimeInSeconds is {limit}; at most {LONGEST_JOB_SECONDS} (5 days) is allowed")
    if wait is not None and wait < limit:
        least = f"with spot instances it must be at least MaxRuntimeInSeconds, {limit}"
        raise JobError(f"MaxWaitTimeInSeconds is {wait}; {least}")


def _refuse(problems: Iterable[str]) -> None:
    if text := "\n".join(problems):
        raise JobError(text)


def _problems(value: Any, shape: Any, path: str) -> Iterator[str]:
    """Where `value`, which has the right type, breaks the service model."""
    if shape.type_name == "structure":
        for name, member in value.items():
            yield from _problems(member, shape.members[name], f"{path}.{name}")
    elif shape.type_name == "list":
        for position, item in enumerate(value):
            yield from _problems(item, shape.member, f"{path}[{position}]")
    elif shape.type_name == "map":
        for key, item in value.items():
            yield from _problems(key, shape.key, f"{path} (the name {key!r})")
            yield from _problems(item, shape.value, f"{path}.{key}")
    allowed = getattr(shape, "enum", None)
    if allowed and value not in allowed:
        close = difflib.get_close_matches(value, allowed, n=1)
        advice = f"did you mean {close[0]}?" if close else f"{allowed[0]} is one"
        yield f"{path} is {value!r}; it must be one that SageMaker has: {advice}"
    most, pattern = shape.metadata.get("max"), shape.metadata.get("pattern")
    size = len(value) if isinstance(value, (str, list, dict)) else value
    if most is not None and size > most:
        yield f"{path} {'is' if size is value else 'has a length of'} {size}; at most {most} is allowed"
    elif pattern and not re.fullmatch(_python_pattern(pattern), value, re.DOTALL):
        yield f"{path} is {value!r}; it must match {pattern}"


def _python_pattern(pattern: str) -> str:
    """The service model writes Java's patterns; Python has no Unicode categories, and these come close."""
    for category, ours in ((r"\p{L}", r"\w"), (r"\p{Z}", r"\s"), (r"\p{N}", r"\d")):
        pattern = pattern.replace(category, ours)
    return pattern
