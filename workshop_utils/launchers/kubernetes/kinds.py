"""What the resource of each kind looks like: TFJob, PyTorchJob, MPIJob, TrainJob with its runtime, and Job."""

from __future__ import annotations

import copy
from typing import Any

from workshop_utils.jobs import Resources, TrainingJob
from workshop_utils.launchers.kubernetes import pods
from workshop_utils.launchers.kubernetes.settings import Settings
from workshop_utils.strategies import TORCHRUN_RESTARTS

TRAINER = "trainer.kubeflow.org/v1alpha1"

# The names of containers. Each operator looks for its own, and tells it alone of the others; of MPI's and a plain Job's
# the name does not matter.
TENSORFLOW, PYTORCH, NODE, MPI, WORKER = "tensorflow", "pytorch", "node", "mpi", "worker"
# Where the first replica listens, if its container names no other port.
TENSORFLOW_PORT, PYTORCH_PORT, NODE_PORT = 2222, 23456, 29400
# By this label the trainer knows which of a runtime's replicated jobs trains.
ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
LAUNCHER = "launcher"  # how the MPI operator ends the name of the Job that runs mpirun
# The key comes from a Secret, whose files' owner sshd would otherwise not trust.
SSHD = ("/usr/sbin/sshd", "-De", "-o", "StrictModes=no")
# Pods do not know each other's keys; and a worker's name may not be known to the DNS in its first seconds.
SSH = "-o StrictHostKeyChecking=no -o ConnectionAttempts=10"


def tfjob(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """TensorFlow's strategies, by the training operator."""
    counts = {"Worker": job.workers}
    if job.strategy == "parameter_server":
        counts = {"Chief": 1, "PS": job.parameter_servers, **counts}
    spec: dict[str, Any] = {"runPolicy": _run_policy(job, settings)}
    if "Chief" not in counts:
        spec["successPolicy"] = "AllWorkers"  # by default worker 0 would decide
    container = _script_container(job, settings, TENSORFLOW)
    spec["tfReplicaSpecs"] = {
        role: _replica(job, settings, count, container) for role, count in counts.items()
    }
    return _resource("kubeflow.org/v1", "TFJob", job, settings, spec)


def pytorchjob(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """PyTorch's process group, by the training operator.

    A Master, which is rank 0, and Workers; an elastic job has Workers alone.
    """
    spec: dict[str, Any] = {"runPolicy": _run_policy(job, settings)}
    if settings.elastic is None:
        container = _script_container(job, settings, PYTORCH)
        replicas = {"Master": _replica(job, settings, 1, container)}
        if job.workers > 1:
            replicas["Worker"] = _replica(job, settings, job.workers - 1, container)
    else:
        spec["elasticPolicy"] = {
            "rdzvBackend": "c10d",
            "minReplicas": settings.elastic.min_workers,
            "maxReplicas": settings.elastic.max_workers,
            "maxRestarts": settings.elastic.max_restarts,
        }
        job = job.replace(environment={**TORCHRUN_RESTARTS, **job.environment})
        # torchrun starts the script, and starts it again among those who are left.
        container = _script_container(job, settings, PYTORCH, "torchrun")
        replicas = {"Worker": _replica(job, settings, job.workers, container, restart="OnFailure")}
    spec["pytorchReplicaSpecs"] = replicas
    return _resource("kubeflow.org/v1", "PyTorchJob", job, settings, spec)


def mpijob(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """Horovod and mpi4py, by the MPI operator, one rank a worker.

    A launcher runs mpirun; the workers run sshd and nothing else, and mpirun starts the ranks there through ssh. The
    operator writes the hostfile and the key.
    """
    launcher = pods.container(job, settings, MPI, _mpirun(job), args=_rank(job))
    launcher["resources"] = pods.resources(Resources(cpu=1, memory="512Mi"))
    worker = pods.container(job, settings, MPI, SSHD)
    del worker["env"]  # mpirun hands over the launcher's
    policy = _run_policy(job, settings)
    spec = {
        "slotsPerWorker": 1,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": policy.pop("cleanPodPolicy"), "backoffLimit": 0, **policy},
        "mpiReplicaSpecs": {
            "Launcher": _replica(job, settings, 1, launcher),
            "Worker": _replica(job, settings, job.workers, worker),
        },
    }
    return _resource("kubeflow.org/v2beta1", "MPIJob", job, settings, spec)


def trainjob(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """PyTorch's process group, by Kubeflow Trainer v2: what to run. `runtime` says how."""
    trainer: dict[str, Any] = {
        "numNodes": job.workers,
        "numProcPerNode": 1,  # otherwise as many as there are processors
        "command": ["torchrun", pods.script(job)],
    }
    if job.command_line_arguments:
        trainer["args"] = job.command_line_arguments
    spec = {
        "runtimeRef": {"kind": "TrainingRuntime", "name": job.name},
        "activeDeadlineSeconds": round(job.timeout_seconds),
        "trainer": trainer,
    }
    return _resource(TRAINER, "TrainJob", job, settings, spec)


def runtime(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """The TrainingRuntime to which the TrainJob refers; a platform team would keep one for many jobs."""
    container = pods.container(job, settings, NODE, ("torchrun", pods.script(job)))
    replicated = {
        "name": NODE,
        "template": {
            "metadata": {"labels": dict(ANCESTOR)},
            "spec": {
                "backoffLimit": 0,
                "template": pods.template(job, settings, container, restartPolicy="Never"),
            },
        },
    }
    spec = {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {
            "spec": {"ttlSecondsAfterFinished": settings.keep_seconds, "replicatedJobs": [replicated]}
        },
    }
    return _resource(TRAINER, "TrainingRuntime", job, settings, spec)


def plain_job(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    """A Job of Kubernetes itself, for one worker on its own; no operator is needed.

    It is indexed, so that its pod is called worker 0 like everywhere else.
    """
    container = _script_container(job, settings, WORKER)
    spec = {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        "activeDeadlineSeconds": round(job.timeout_seconds),
        "ttlSecondsAfterFinished": settings.keep_seconds,
        "template": pods.template(job, settings, container, restartPolicy="Never"),
    }
    return _resource("batch/v1", "Job", job, settings, spec)


def _resource(
    api: str, kind: str, job: TrainingJob, settings: Settings, spec: dict[str, Any]
) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": pods.metadata(job, settings), "spec": spec}


def _run_policy(job: TrainingJob, settings: Settings) -> dict[str, Any]:
    return {
        "cleanPodPolicy": "Running",  # parameter servers and sshd never end by themselves
        "activeDeadlineSeconds": round(job.timeout_seconds),
        "ttlSecondsAfterFinished": settings.keep_seconds,
    }


def _script_container(
    job: TrainingJob, settings: Settings, name: str, program: str = "python"
) -> dict[str, Any]:
    """A container that runs the job's script, by `program`."""
    command = (program, pods.script(job))
    return pods.container(job, settings, name, command, args=job.command_line_arguments)


def _replica(
    job: TrainingJob, settings: Settings, count: int, container: dict[str, Any], restart: str = "Never"
) -> dict[str, Any]:
    # A copy, so that whoever changes one role of a manifest does not change the others.
    template = pods.template(job, settings, copy.deepcopy(container))
    return {"replicas": count, "restartPolicy": restart, "template": template}


def _mpirun(job: TrainingJob) -> list[str]:
    """The launcher's command; what each rank runs follows as its arguments."""
    handed_over = [word for name in ("PATH", *pods.variables(job)) for word in ("-x", name)]
    return [
        *("mpirun", "-n", str(job.workers), "--allow-run-as-root", "--tag-output", "--bind-to", "none"),
        *("--mca", "plm_rsh_args", SSH),
        *handed_over,
    ]


def _rank(job: TrainingJob) -> list[str]:
    """What mpirun starts as each rank."""
    # `-m mpi4py` makes an exception in one rank abort all; otherwise the others would wait for it in MPI_Finalize.
    python = ["python", "-m", "mpi4py"] if job.strategy == "mpi" else ["python"]
    return [*python, pods.script(job), *job.command_line_arguments]
