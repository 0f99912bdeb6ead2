"""TFJob: TensorFlow's strategies, by the training operator (kubeflow.org/v1)."""

from __future__ import annotations

from typing import Any

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import pods
from workshop_utils.launchers.kubernetes.settings import Settings

CONTAINER = "tensorflow"  # the operator sets TF_CONFIG in the container of this name alone
PORT = 2222  # where a replica listens, if its container names no other port


def render(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """The TFJob of `job`."""
    counts = {"Worker": job.workers}
    if job.strategy == "parameter_server":
        counts = {"Chief": 1, "PS": job.parameter_servers, **counts}
    spec: dict[str, Any] = {
        "runPolicy": {
            "cleanPodPolicy": "Running",  # parameter servers never end by themselves
            "activeDeadlineSeconds": round(job.timeout_seconds),
            "ttlSecondsAfterFinished": settings.keep_seconds,
        },
    }
    if "Chief" not in counts:
        spec["successPolicy"] = "AllWorkers"  # by default worker 0 would decide
    command = ("python", pods.script(job))
    only = pods.container(job, settings, CONTAINER, command, args=job.command_line_arguments)
    spec["tfReplicaSpecs"] = {
        role: {
            "replicas": count,
            "restartPolicy": "Never",
            "template": pods.template(job, settings, only),
        }
        for role, count in counts.items()
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": pods.metadata(job, settings),
        "spec": spec,
    }
