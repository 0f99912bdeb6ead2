"""What a pod of a job looks like, whatever kind of resource it belongs to.

| in the container | what it is |
| --- | --- |
| `/workshop/job` | a ConfigMap: the script, and `workshop_utils/` with what it may import |
| `/workshop/data` | the data: a ConfigMap, or a claim |
| `/workshop/model` | an empty folder, which goes with the pod |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from workshop_utils.jobs import Resources, TrainingJob
from workshop_utils.launchers.kubernetes import files
from workshop_utils.launchers.kubernetes.check import is_quantity
from workshop_utils.launchers.kubernetes.settings import Settings

JOB_FOLDER = "/workshop/job"
DATA_FOLDER = "/workshop/data"
MODEL_FOLDER = "/workshop/model"
LABELS = {"app.kubernetes.io/part-of": "distributed-training-workshop"}


def metadata(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """Name, namespace and labels of the objects of `job`."""
    return {"name": job.name, "namespace": settings.namespace, "labels": dict(LABELS)}


def script(job: TrainingJob) -> str:
    """Where the script is inside a container."""
    return f"{JOB_FOLDER}/{job.script}"


def variables(job: TrainingJob) -> dict[str, str]:
    """The variables that every worker has, wherever it runs; the operators add those of its place."""
    threads = str(max(1, int(job.resources.cpu)))
    return {
        "PYTHONPATH": JOB_FOLDER,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,  # not INTEROP: with one, a parameter server's steps deadlock
        "WORKSHOP_DATA": DATA_FOLDER,
        "WORKSHOP_MODEL": MODEL_FOLDER,
        **job.environment,
    }


def resources(wanted: Resources) -> dict[str, Any]:
    """Limits, which are the requests too, where none are given."""
    cpu: int | str = int(wanted.cpu) if float(wanted.cpu).is_integer() else f"{math.ceil(wanted.cpu * 1000)}m"
    memory = wanted.memory if is_quantity(wanted.memory) else str(wanted.memory_nbytes)
    gpu = {"nvidia.com/gpu": wanted.gpu} if wanted.gpu else {}
    return {"limits": {"cpu": cpu, "memory": memory, **gpu}}


def container(
    job: TrainingJob, settings: Settings, name: str, command: Sequence[str], **further: Any
) -> dict[str, Any]:
    """A container called `name` that runs `command`; `further` are fields such as `args`."""
    return {
        "name": name,
        "image": settings.image_for(job),
        "command": list(command),
        **{key: value for key, value in further.items() if value},
        "env": [{"name": key, "value": value} for key, value in variables(job).items()],
        "resources": resources(job.resources),
        "volumeMounts": [
            {"name": "job", "mountPath": JOB_FOLDER},
            {"name": "data", "mountPath": DATA_FOLDER},
            {"name": "model", "mountPath": MODEL_FOLDER},
        ],
    }


def volumes(job: TrainingJob, data_claim: str | None) -> list[dict[str, Any]]:
    """What the pods of `job` mount: its files, its data, and an empty folder for the model."""
    if data_claim is not None:
        data: dict[str, Any] = {"persistentVolumeClaim": {"claimName": data_claim, "readOnly": True}}
    else:
        data = {"configMap": {"name": files.data_name(job)}}
    items = [{"key": key, "path": path} for key, path in files.paths(job).items()]
    return [
        {"name": "job", "configMap": {"name": job.name, "items": items}},
        {"name": "data", **data},
        {"name": "model", "emptyDir": {}},
    ]


def template(job: TrainingJob, settings: Settings, only: dict[str, Any], **further: Any) -> dict[str, Any]:
    """A pod's template with `only` this container; `further` are fields of its spec."""
    selector = {"nodeSelector": dict(settings.node_selector)} if settings.node_selector else {}
    return {
        "metadata": {"labels": dict(LABELS)},
        "spec": {
            **further,
            **selector,
            "containers": [only],
            "volumes": volumes(job, settings.data_claim),
        },
    }
