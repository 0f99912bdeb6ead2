"""What SageMaker would refuse, or take and not do as meant, though botocore has nothing against the request.

Botocore compares every request that ModelTrainer makes with the service model that it carries: names, types, and what
is required. Here are its enumeration of instance types, which it does not look at, and rules that it does not know:
without them a job fails, or does something else, when the instances are paid for already.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from botocore.loaders import Loader
from botocore.model import ServiceModel

from workshop_utils.jobs import JobError
from workshop_utils.launchers.sagemaker import toolkit
from workshop_utils.launchers.sagemaker.images import lacks_horovod


@functools.cache
def instance_types() -> list[str]:
    """The types of instances that SageMaker has for training."""
    # Not through a session, which reads the learner's AWS profile: none is needed to look at a request.
    model = ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
    return list(model.shape_for("TrainingInstanceType").enum)  # type: ignore[attr-defined]


def instance_type(name: str) -> None:
    """Raise JobError where SageMaker has no instances of the type `name`."""
    if name not in instance_types():
        close = difflib.get_close_matches(name, instance_types(), n=1) or ["ml.c5.xlarge"]
        raise JobError(
            f"CreateTrainingJob.ResourceConfig.InstanceType is {name!r}; it must be one that SageMaker has: "
            f"did you mean {close[0]}?"
        )


def rules(request: Mapping[str, Any]) -> None:
    """Raise JobError where SageMaker would take `request` and not do what was meant."""
    if problems := "\n".join(_broken_rules(request)):
        raise JobError(problems)


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
    wait = stopping.get("MaxWaitTimeInSeconds")
    if wait is not None and wait < limit:
        yield f"MaxWaitTimeInSeconds is {wait}; with spot instances it must be at least MaxRuntimeInSeconds, {limit}"
