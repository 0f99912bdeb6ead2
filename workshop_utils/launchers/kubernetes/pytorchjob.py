"""PyTorchJob: PyTorch's process group, by the training operator (kubeflow.org/v1); elastic too."""

from __future__ import annotations

from typing import Any

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import pods
from workshop_utils.launchers.kubernetes.settings import Settings
from workshop_utils.strategies import TORCHRUN_RESTARTS

CONTAINER = (
    "pytorch"  # the operator sets MASTER_ADDR and RANK in all containers, and looks for the port in this one
)
PORT = 23456


def render(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """The PyTorchJob of `job`: a Master, which is rank 0, and Workers; an elastic one has Workers alone."""
    policy = {
        "cleanPodPolicy": "Running",
        "activeDeadlineSeconds": round(job.timeout_seconds),
        "ttlSecondsAfterFinished": settings.keep_seconds,
    }
    spec: dict[str, Any] = {"runPolicy": policy}
    if settings.elastic is None:
        command = ("python", pods.script(job))
        replicas = {"Master": _replica(job, settings, 1, command)}
        if job.workers > 1:
            replicas["Worker"] = _replica(job, settings, job.workers - 1, command)
    else:
        spec["elasticPolicy"] = {
            "rdzvBackend": "c10d",
            "minReplicas": settings.elastic.min_workers,
            "maxReplicas": settings.elastic.max_workers,
            "maxRestarts": settings.elastic.max_restarts,
        }
        job = job.replace(environment={**TORCHRUN_RESTARTS, **job.environment})
        # torchrun starts the script, and starts it anew among those who are left.
        replicas = {
            "Worker": _replica(job, settings, job.workers, ("torchrun", pods.script(job)), "OnFailure")
        }
    spec["pytorchReplicaSpecs"] = replicas
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": pods.metadata(job, settings),
        "spec": spec,
    }


def _replica(
    job: TrainingJob, settings: Settings, count: int, command: tuple[str, ...], restart: str = "Never"
) -> dict[str, Any]:
    only = pods.container(job, settings, CONTAINER, command, args=job.command_line_arguments)
    return {"replicas": count, "restartPolicy": restart, "template": pods.template(job, settings, only)}
