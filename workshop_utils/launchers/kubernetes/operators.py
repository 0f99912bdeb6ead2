"""What an operator makes of a manifest: its pods, and the variables by which they find each other.

Sources: training-operator v1.9.4, pkg/controller.v1/pytorch/envvar.go and elastic.go, pkg/controller.v1/tensorflow;
mpi-operator v0.8, pkg/controller/mpi_job_controller.go; trainer v2.3.0, pkg/runtime/framework/plugins/torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes import kinds
from workshop_utils.launchers.kubernetes.manifest import Manifest

POD_COLUMNS = ("pod", "worker", "phase")  # of the tables of pods that runs give

# Where a service called so, with this port, can be reached: on a cluster by its own name.
Reach = Callable[[str, int], tuple[str, int]]


@dataclass(frozen=True)
class Pod:
    """One pod: `worker` is how its lines are called, `spec` is that of the manifest.

    `variables` are those that the operator adds; the job has succeeded once every `awaited` pod has. An MPI launcher
    has `slots`: how many ranks its hostfile has room for.
    """

    name: str
    worker: str
    spec: Mapping[str, Any]
    container: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)
    awaited: bool = True
    slots: int = 0


def pods_of(manifest: Manifest, reach: Reach = lambda host, port: (host, port)) -> tuple[Pod, ...]:
    """The pods of `manifest`, which has been checked; those that only run sshd for mpirun are left out.

    Raises:
        JobError: if its last object is none that an operator known here makes pods of.
    """
    version, kind = manifest.resource["apiVersion"], manifest.resource["kind"]
    if (version, kind) not in _PODS:
        known = ", ".join(kind for _, kind in _PODS)
        raise JobError(f"the manifest's last object is a {kind} of {version}; it must be a job: {known}")
    return _PODS[version, kind](manifest, reach)


def _tfjob(manifest: Manifest, reach: Reach) -> tuple[Pod, ...]:
    name, space, specs = _replicas(manifest, "tfReplicaSpecs")
    places = [(role, index) for role in specs for index in range(specs[role].get("replicas", 1))]
    cluster: dict[str, list[str]] = {}
    for role, index in places:
        host, port = reach(f"{name}-{role.lower()}-{index}.{space}.svc", kinds.TENSORFLOW_PORT)
        cluster.setdefault(role.lower(), []).append(f"{host}:{port}")
    has_chief = bool({"Chief", "Master"} & specs.keys())
    by_all = manifest.resource["spec"].get("successPolicy") == "AllWorkers"
    found = []
    for role, index in places:
        task = {"type": role.lower(), "index": index}
        config = {"cluster": cluster, "task": task, "environment": "cloud"}
        decides = role in ("Chief", "Master") or (role == "Worker" and (by_all or not (has_chief or index)))
        # A job of one replica is told of no cluster.
        variables = {"TF_CONFIG": json.dumps(config)} if len(places) > 1 else {}
        spec = specs[role]["template"]["spec"]
        pod, worker = f"{name}-{role.lower()}-{index}", f"{role.lower()}-{index}"
        found.append(Pod(pod, worker, spec, _container(spec, kinds.TENSORFLOW), variables, decides))
    return tuple(found)


def _pytorchjob(manifest: Manifest, reach: Reach) -> tuple[Pod, ...]:
    name, _, specs = _replicas(manifest, "pytorchReplicaSpecs")
    elastic = manifest.resource["spec"].get("elasticPolicy")
    size = sum(replica.get("replicas", 1) for replica in specs.values())
    first = "master" if "Master" in specs else "worker"
    host, port = reach(f"{name}-{first}-0", kinds.PYTORCH_PORT)
    shared = {} if elastic is None else _elastic_variables(elastic, f"{host}:{port}")
    found = []
    for role, replica in specs.items():
        for index in range(replica.get("replicas", 1)):
            rank = index + (1 if role == "Worker" and "Master" in specs else 0)
            variables = {"PYTHONUNBUFFERED": "1", **shared}
            if "Master" in specs:
                variables |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
                variables |= {"WORLD_SIZE": str(size), "RANK": str(rank)}
            spec = replica["template"]["spec"]
            container = _container(spec, kinds.PYTORCH)
            # The master alone decides, where there is one.
            awaited = role == "Master" or "Master" not in specs
            pod = f"{name}-{role.lower()}-{index}"
            found.append(Pod(pod, f"worker-{rank}", spec, container, variables, awaited))
    return tuple(found)


def _elastic_variables(policy: Mapping[str, Any], endpoint: str) -> dict[str, str]:
    return {
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }


def _mpijob(manifest: Manifest, _reach: Reach) -> tuple[Pod, ...]:
    name, _, specs = _replicas(manifest, "mpiReplicaSpecs")
    slots = manifest.resource["spec"].get("slotsPerWorker", 1)
    hosts = specs.get("Worker", {}).get("replicas", 0)
    variables = {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }
    spec = specs["Launcher"]["template"]["spec"]
    container = spec["containers"][0]
    launcher = f"{name}-{kinds.LAUNCHER}"
    return (Pod(launcher, "mpirun", spec, container, variables, slots=hosts * slots),)


def _trainjob(manifest: Manifest, reach: Reach) -> tuple[Pod, ...]:
    name = manifest.resource["metadata"]["name"]
    trainer = manifest.resource["spec"]["trainer"]
    (runtime,) = manifest.before
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]["template"]["spec"]
    nodes = trainer["numNodes"]
    host, port = reach(f"{name}-{kinds.NODE}-0-0.{name}", kinds.NODE_PORT)
    own = {key: trainer[key] for key in ("command", "args") if key in trainer}
    container = {**_container(spec, kinds.NODE), **own}
    shared = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": host,
        "PET_MASTER_PORT": str(port),
    }
    pods = []
    for node in range(nodes):
        variables = {**shared, "PET_NODE_RANK": str(node)}
        pods.append(Pod(f"{name}-{kinds.NODE}-0-{node}", f"worker-{node}", spec, container, variables))
    return tuple(pods)


def _job(manifest: Manifest, _reach: Reach) -> tuple[Pod, ...]:
    name, wanted = manifest.resource["metadata"]["name"], manifest.resource["spec"]
    spec = wanted["template"]["spec"]
    pods = []
    for index in range(wanted.get("completions", 1)):
        variables = {"JOB_COMPLETION_INDEX": str(index)}
        pods.append(Pod(f"{name}-{index}", f"{kinds.WORKER}-{index}", spec, spec["containers"][0], variables))
    return tuple(pods)


_PODS: dict[tuple[str, str], Callable[[Manifest, Reach], tuple[Pod, ...]]] = {
    ("kubeflow.org/v1", "TFJob"): _tfjob,
    ("kubeflow.org/v1", "PyTorchJob"): _pytorchjob,
    ("kubeflow.org/v2beta1", "MPIJob"): _mpijob,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): _trainjob,
    ("batch/v1", "Job"): _job,
}


def _replicas(manifest: Manifest, field: str) -> tuple[str, str, Mapping[str, Any]]:
    metadata = manifest.resource["metadata"]
    return metadata["name"], metadata.get("namespace", "default"), manifest.resource["spec"][field]


def _container(spec: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(each for each in spec["containers"] if each["name"] == name)
    return found
