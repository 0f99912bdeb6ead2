"""What an operator does: which pods a manifest wants, what they are told, and one pass of the loop that keeps them.

Sources: training-operator v1.9.4, pkg/controller.v1/common/job.go and pod.go, pytorch/envvar.go and elastic.go,
tensorflow; mpi-operator v0.8.0, pkg/controller/mpi_job_controller.go; trainer v2.3.0, pkg/runtime/framework/plugins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes.manifest import NODE, PYTORCH, TENSORFLOW, WORKER, Manifest

if TYPE_CHECKING:
    import pandas as pd

# Where the first replica listens, if its container names no other port.
TENSORFLOW_PORT, PYTORCH_PORT, NODE_PORT = 2222, 23456, 29400

# The address of a service with this name and port: on a cluster the same.
Resolve = Callable[[str, int], tuple[str, int]]
# ("create", pod, labels, variables), ("delete", pod) or ("condition", "Succeeded" or "Failed")
Action = tuple[Any, ...]


@dataclass(frozen=True)
class Pod:
    """One pod of a job.

    Attributes:
        worker: what logs and tables call it.
        spec: that of the manifest.
        container: that in which the job runs.
        variables: those that the operator adds.
        required: whether the job succeeds only once this pod has.
        children: the workers that mpirun or torchrun starts from here; without them the pod is a worker itself.
    """

    name: str
    worker: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    container: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    required: bool = True
    children: tuple[str, ...] = ()
    restart_policy: str = "Never"


def workers_in(pods: Iterable[Pod]) -> tuple[str, ...]:
    """The workers of `pods`, in order."""
    return tuple(worker for pod in pods for worker in pod.children or (pod.worker,))


def table_of(rows: Iterable[tuple[str, str, str]]) -> pd.DataFrame:
    """The table of pods that runs give: pod, worker, phase."""
    import pandas as pd  # here, since it takes longer to import than a launch may take

    return pd.DataFrame(list(rows), columns=["pod", "worker", "phase"])


def pods_of(manifest: Manifest, resolve: Resolve = lambda host, port: (host, port)) -> tuple[Pod, ...]:
    """The pods of `manifest`, which has been checked; those that only run sshd for mpirun are left out.

    Raises:
        JobError: if its last object is none that an operator known here makes pods of.
    """
    version, kind = manifest.resource["apiVersion"], manifest.resource["kind"]
    if (version, kind) not in _PODS:
        kinds = ", ".join(kind for _, kind in _PODS)
        raise JobError(f"the manifest's last object is a {kind} of {version}; it must be a job: {kinds}")
    name, spec = manifest.resource["metadata"]["name"], manifest.resource["spec"]
    return tuple(_PODS[version, kind](manifest, name, spec, resolve))


def reconcile(job: Mapping[str, Any], pods: Mapping[str, str], wanted: Iterable[Pod]) -> list[Action]:
    """One pass of an operator's loop: what brings `pods`, phases by name, nearer to those that `job` wants.

    It sees states, not events, so it may run again at any time. `job` is the resource; its `status` has a `condition`
    once it has ended.
    """
    spec = job["spec"]
    if job["status"].get("condition"):
        policy, active = spec.get("runPolicy", {}).get("cleanPodPolicy", "Running"), ("Pending", "Running")
        remove = {"All": lambda _: True, "Running": active.__contains__, "None": lambda _: False}[policy]
        return [("delete", name) for name, phase in pods.items() if remove(phase)]
    phases = [(pod, pods.get(pod.name)) for pod in wanted]
    enough = any if "elasticPolicy" in spec else all
    if enough(phase == "Succeeded" for pod, phase in phases if pod.required):
        return [("condition", "Succeeded")]
    failed = [pod for pod, phase in phases if phase == "Failed"]
    if any(pod.restart_policy == "Never" for pod in failed):
        return [("condition", "Failed")]
    # What failed is deleted, and the next pass makes it again, as it does any pod that is missing.
    labels = {"training.kubeflow.org/job-name": job["metadata"]["name"]}
    missing = [pod for pod, phase in phases if phase is None]
    created = [("create", pod.name, labels, dict(pod.variables)) for pod in missing]
    return [*(("delete", pod.name) for pod in failed), *created]


def _tfjob(manifest: Manifest, name: str, spec: Any, resolve: Resolve) -> Iterator[Pod]:
    replicas, namespace = spec["tfReplicaSpecs"], manifest.resource["metadata"].get("namespace", "default")
    tasks = [(role, index) for role in replicas for index in range(replicas[role].get("replicas", 1))]
    cluster: dict[str, list[str]] = {}
    for role, index in tasks:
        host, port = resolve(f"{name}-{role.lower()}-{index}.{namespace}.svc", TENSORFLOW_PORT)
        cluster.setdefault(role.lower(), []).append(f"{host}:{port}")
    has_chief = bool({"Chief", "Master"} & replicas.keys())
    by_all = spec.get("successPolicy") == "AllWorkers"
    for role, index in tasks:
        task = {"type": role.lower(), "index": index}
        config = {"cluster": cluster, "task": task, "environment": "cloud"}
        decides = role in ("Chief", "Master") or (role == "Worker" and (by_all or not (has_chief or index)))
        # A job of one replica gets no cluster.
        variables = {"TF_CONFIG": json.dumps(config)} if len(tasks) > 1 else {}
        worker, pod = f"{role.lower()}-{index}", replicas[role]["template"]["spec"]
        restart = replicas[role].get("restartPolicy", "Never")
        container = _container(pod, TENSORFLOW)
        yield Pod(f"{name}-{worker}", worker, pod, container, variables, decides, restart_policy=restart)


def _pytorchjob(_manifest: Manifest, name: str, spec: Any, resolve: Resolve) -> Iterator[Pod]:
    replicas, elastic = spec["pytorchReplicaSpecs"], spec.get("elasticPolicy")
    has_master, processes = "Master" in replicas, int(spec.get("nprocPerNode", 1))
    nodes = sum(replica.get("replicas", 1) for replica in replicas.values())
    host, port = resolve(f"{name}-{'master' if has_master else 'worker'}-0", PYTORCH_PORT)
    roles = [(role, index) for role in replicas for index in range(replicas[role].get("replicas", 1))]
    for role, index in roles:
        node = index + (role == "Worker" and has_master)
        variables = {"PYTHONUNBUFFERED": "1"}
        if has_master:
            master = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
            variables |= {**master, "WORLD_SIZE": str(nodes * processes), "RANK": str(node)}
            variables |= {f"PET_{key}": value for key, value in master.items()} | {"PET_NODE_RANK": str(node)}
        variables |= {"PET_NPROC_PER_NODE": str(processes), "PET_NNODES": str(nodes)}
        if elastic is not None:
            variables |= {
                "PET_RDZV_ENDPOINT": f"{host}:{port}",
                "PET_RDZV_BACKEND": elastic["rdzvBackend"],
                "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
                "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
            }
        if "nprocPerNode" not in spec:  # the operator sets torchrun's all the same; nothing reads them
            variables = {key: value for key, value in variables.items() if not key.startswith("PET_")}
        pod, worker = replicas[role]["template"]["spec"], _node(node, processes)
        decides = role == "Master" or not has_master  # the master alone, where there is one
        told = {"variables": variables, "restart_policy": replicas[role].get("restartPolicy", "Never")}
        told |= {"spec": pod, "container": _container(pod, PYTORCH), "required": decides}
        yield Pod(f"{name}-{role.lower()}-{index}", **worker, **told)


def _mpijob(_manifest: Manifest, name: str, spec: Any, _resolve: Resolve) -> Iterator[Pod]:
    ranks = spec["mpiReplicaSpecs"].get("Worker", {}).get("replicas", 0) * spec.get("slotsPerWorker", 1)
    variables = {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }
    pod = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    workers = tuple(f"worker-{rank}" for rank in range(ranks))
    yield Pod(f"{name}-launcher", "mpirun", pod, pod["containers"][0], variables, children=workers)


def _trainjob(manifest: Manifest, name: str, spec: Any, resolve: Resolve) -> Iterator[Pod]:
    trainer = spec["trainer"]
    (replicated,) = manifest.before[0]["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    own = {key: trainer[key] for key in ("command", "args") if key in trainer}
    host, port = resolve(f"{name}-{NODE}-0-0.{name}", NODE_PORT)
    for node in range(trainer["numNodes"]):
        variables = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_MASTER_ADDR": host,
            "PET_MASTER_PORT": str(port),
            "PET_NODE_RANK": str(node),
        }
        worker, container = _node(node, trainer["numProcPerNode"]), {**_container(pod, NODE), **own}
        yield Pod(f"{name}-{NODE}-0-{node}", **worker, spec=pod, container=container, variables=variables)


def _job(_manifest: Manifest, name: str, spec: Any, _resolve: Resolve) -> Iterator[Pod]:
    pod = spec["template"]["spec"]
    for index in range(spec.get("completions", 1)):
        variables = {"JOB_COMPLETION_INDEX": str(index)}
        yield Pod(f"{name}-{index}", f"{WORKER}-{index}", pod, pod["containers"][0], variables)


_PODS: dict[tuple[str, str], Callable[[Manifest, str, Any, Resolve], Iterator[Pod]]] = {
    ("kubeflow.org/v1", "TFJob"): _tfjob,
    ("kubeflow.org/v1", "PyTorchJob"): _pytorchjob,
    ("kubeflow.org/v2beta1", "MPIJob"): _mpijob,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): _trainjob,
    ("batch/v1", "Job"): _job,
}


def _node(node: int, processes: int) -> dict[str, Any]:
    """What a pod is called in which torchrun starts so many `processes`: one is the worker itself."""
    if processes == 1:
        return {"worker": f"worker-{node}"}
    ranks = range(node * processes, (node + 1) * processes)
    return {"worker": f"node-{node}", "children": tuple(f"worker-{rank}" for rank in ranks)}


def _container(spec: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    container: Mapping[str, Any] = next(each for each in spec["containers"] if each["name"] == name)
    return container
