"""A plain Job of Kubernetes itself (batch/v1), for one worker on its own; no operator is needed."""

from __future__ import annotations

from typing import Any

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import pods
from workshop_utils.launchers.kubernetes.settings import Settings

CONTAINER = "worker"


def render(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """The Job of `job`: indexed, so that its pod is called worker 0 like everywhere else."""
    command = ("python", pods.script(job))
    only = pods.container(job, settings, CONTAINER, command, args=job.command_line_arguments)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pods.metadata(job, settings),
        "spec": {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 0,
            "activeDeadlineSeconds": round(job.timeout_seconds),
            "ttlSecondsAfterFinished": settings.keep_seconds,
            "template": pods.template(job, settings, only, restartPolicy="Never"),
        },
    }
