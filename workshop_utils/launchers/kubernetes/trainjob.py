"""TrainJob: PyTorch's process group, by Kubeflow Trainer v2 (trainer.kubeflow.org/v1alpha1), with its runtime.

The runtime says how such jobs run, and a platform team would keep it; the job says what to run.
"""

from __future__ import annotations

from typing import Any

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import pods
from workshop_utils.launchers.kubernetes.settings import Settings

API = "trainer.kubeflow.org/v1alpha1"
CONTAINER = "node"  # the name of the replicated job and of its container, which the trainer looks for
PORT = 29400
ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def runtime(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """The TrainingRuntime to which the job refers."""
    only = pods.container(job, settings, CONTAINER, ("torchrun", pods.script(job)))
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": pods.metadata(job, settings),
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {
                "spec": {
                    "ttlSecondsAfterFinished": settings.keep_seconds,
                    "replicatedJobs": [
                        {
                            "name": CONTAINER,
                            "template": {
                                "metadata": {"labels": dict(ANCESTOR)},
                                "spec": {
                                    "backoffLimit": 0,
                                    "template": pods.template(job, settings, only, restartPolicy="Never"),
                                },
                            },
                        }
                    ],
                }
            },
        },
    }


def render(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """The TrainJob of `job`."""
    trainer: dict[str, Any] = {
        "numNodes": job.workers,
        "numProcPerNode": 1,  # otherwise as many as there are processors
        "command": ["torchrun", pods.script(job)],
    }
    if job.command_line_arguments:
        trainer["args"] = job.command_line_arguments
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": pods.metadata(job, settings),
        "spec": {
            "runtimeRef": {"kind": "TrainingRuntime", "name": job.name},
            "activeDeadlineSeconds": round(job.timeout_seconds),
            "trainer": trainer,
        },
    }
