"""MPIJob: Horovod and mpi4py, by the MPI operator (kubeflow.org/v2beta1).

A launcher runs mpirun; the workers run sshd and nothing else, and mpirun starts the ranks there through ssh. The
operator writes the hostfile and the key.
"""

from __future__ import annotations

from typing import Any

from workshop_utils.jobs import Resources, TrainingJob
from workshop_utils.launchers.kubernetes import pods
from workshop_utils.launchers.kubernetes.settings import Settings

CONTAINER = "mpi"
LAUNCHER = "launcher"  # how the operator ends the name of the Job that runs mpirun
# The key comes from a Secret, whose files' owner sshd would otherwise not trust.
SSHD = ("/usr/sbin/sshd", "-De", "-o", "StrictModes=no")
# Pods are strangers to each other; and a worker's name may not be known to the DNS in its first seconds.
SSH = "-o StrictHostKeyChecking=no -o ConnectionAttempts=10"


def render(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """The MPIJob of `job`, one rank a worker."""
    launcher = pods.container(job, settings, CONTAINER, mpirun(job), args=rank(job))
    launcher["resources"] = pods.resources(Resources(cpu=1, memory="512Mi"))
    worker = pods.container(job, settings, CONTAINER, SSHD)
    del worker["env"]  # mpirun hands over the launcher's
    replicas = {"Launcher": (1, launcher), "Worker": (job.workers, worker)}
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": pods.metadata(job, settings),
        "spec": {
            "slotsPerWorker": 1,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {
                "cleanPodPolicy": "Running",  # sshd never ends by itself
                "backoffLimit": 0,
                "activeDeadlineSeconds": round(job.timeout_seconds),
                "ttlSecondsAfterFinished": settings.keep_seconds,
            },
            "mpiReplicaSpecs": {
                role: {
                    "replicas": count,
                    "restartPolicy": "Never",
                    "template": pods.template(job, settings, only),
                }
                for role, (count, only) in replicas.items()
            },
        },
    }


def mpirun(job: TrainingJob) -> list[str]:
    """The launcher's command; what each rank runs follows as its arguments."""
    handed_over = [word for name in ("PATH", *pods.variables(job)) for word in ("-x", name)]
    return [
        *("mpirun", "-n", str(job.workers), "--allow-run-as-root", "--tag-output", "--bind-to", "none"),
        *("--mca", "plm_rsh_args", SSH),
        *handed_over,
    ]


def rank(job: TrainingJob) -> list[str]:
    """What mpirun starts as each rank."""
    # `-m mpi4py` makes an exception in one rank abort all; otherwise the others would wait for it in MPI_Finalize.
    python = ["python", "-m", "mpi4py"] if job.strategy == "mpi" else ["python"]
    return [*python, pods.script(job), *job.command_line_arguments]
