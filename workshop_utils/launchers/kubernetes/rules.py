"""What the operators ask for in their own code, so that no schema says it.

Sources: training-operator v1.9.4, pkg/webhooks; mpi-operator v0.8, pkg/apis/kubeflow/validation; trainer v2.3.0, the
rules of the TrainJob's resource definition; volcano, pkg/webhooks/admission/jobs/validate; eksctl,
pkg/apis/eksctl.io/v1alpha5/validation.go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes import check, kinds

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS-1035
RESTART = ("Always", "OnFailure", "Never", "ExitCode")
CLEAN = ("None", "Running", "All")
# What prepares the pods of Volcano's jobs.
PLUGINS = ("env", "hcclrank", "mpi", "pytorch", "ray", "ssh", "svc", "tensorflow")


def body(described: Mapping[str, Any]) -> None:
    """Raise JobError where `described` is not an object of its kind, or else where its operator would refuse it.

    The message has a line for each thing that is wrong.
    """
    problems = [*check.problems_of(described)] or [*problems_of(described)]
    if problems:
        raise JobError("\n".join(problems))


def problems_of(described: Mapping[str, Any]) -> Iterator[str]:
    """What its operator would refuse of an object that `check` has nothing against, a sentence each."""
    name = described.get("metadata", {}).get("name", "")
    if not LABEL.fullmatch(name):
        yield (
            f"metadata.name is {name!r}; it must be lower-case letters, digits and '-', start with a letter, and be "
            "at most 63 long"
        )
    rule = _RULES.get((described["apiVersion"], described["kind"]))
    if rule is not None:
        yield from rule(described)


def _tfjob(described: Mapping[str, Any]) -> Iterator[str]:
    roles = ("Chief", "Master", "PS", "Worker", "Evaluator")
    specs = yield from _replicas(described, "tfReplicaSpecs", roles, kinds.TENSORFLOW)
    if sum(specs[role].get("replicas", 1) for role in ("Chief", "Master") if role in specs) > 1:
        yield "spec.tfReplicaSpecs: there is more than one Chief or Master; at most one may be"


def _pytorchjob(described: Mapping[str, Any]) -> Iterator[str]:
    specs = yield from _replicas(described, "pytorchReplicaSpecs", ("Master", "Worker"), kinds.PYTORCH)
    if (masters := specs.get("Master", {}).get("replicas", 1)) != 1:
        yield f"spec.pytorchReplicaSpecs.Master.replicas is {masters}; there must be 1"
    yield from _at_least(1, specs.get("Worker", {}), "replicas", "spec.pytorchReplicaSpecs.Worker")
    if "elasticPolicy" in described["spec"] and "Worker" not in specs:
        yield "spec.pytorchReplicaSpecs.Worker is missing; an elasticPolicy needs it"


def _mpijob(described: Mapping[str, Any]) -> Iterator[str]:
    roles, restart = ("Launcher", "Worker"), ("OnFailure", "Never")
    specs = yield from _replicas(described, "mpiReplicaSpecs", roles, None, restart)
    if "Launcher" not in specs:
        yield "spec.mpiReplicaSpecs.Launcher is missing"
    elif (launchers := specs["Launcher"].get("replicas", 1)) != 1:
        yield f"spec.mpiReplicaSpecs.Launcher.replicas is {launchers}; there must be 1"
    yield from _at_least(1, specs.get("Worker", {}), "replicas", "spec.mpiReplicaSpecs.Worker")
    workers = specs.get("Worker", {}).get("replicas", 1)
    last = f"{described['metadata']['name']}-worker-{workers - 1}"
    if len(last) > 63:
        yield f"metadata.name is too long: {last}, a pod's name, would have more than 63 characters"
    created = ("AtStartup", "WaitForWorkersReady")
    yield from _one_of(created, described["spec"], "launcherCreationPolicy", "spec")


def _trainjob(described: Mapping[str, Any]) -> Iterator[str]:
    yield from _at_least(1, described["spec"].get("trainer", {}), "numNodes", "spec.trainer")


def _volcano_job(described: Mapping[str, Any]) -> Iterator[str]:
    spec = described["spec"]
    tasks = spec.get("tasks", [])
    if not tasks:
        yield "spec.tasks is missing or empty; there must be at least one task"
    for index, task in enumerate(tasks):
        yield from _containers(task, f"spec.tasks[{index}]")
    total = sum(task.get("replicas", 0) for task in tasks)
    if spec.get("minAvailable", 0) > total:
        yield f"spec.minAvailable is {spec['minAvailable']}; it may be at most {total}, the replicas of all tasks"
    for name in spec.get("plugins", {}):
        if name not in PLUGINS:
            yield f"spec.plugins.{name}: unknown plugin; the plugins are {', '.join(PLUGINS)}"


def _cluster_config(described: Mapping[str, Any]) -> Iterator[str]:
    groups = described.get("managedNodeGroups", [])
    names = [group["name"] for group in groups]
    for index, group in enumerate(groups):
        path = f"managedNodeGroups[{index}]"
        if group["name"] in names[:index]:
            yield f"{path}.name is {group['name']!r}; another node group is called so already"
        sizes = [group[size] for size in ("minSize", "desiredCapacity", "maxSize") if size in group]
        if sizes != sorted(sizes):
            yield f"{path}: minSize, desiredCapacity and maxSize must be in that order, but are {sizes}"
        zones = group.get("availabilityZones", [])
        if group.get("efaEnabled") and len(zones) != 1:
            yield f"{path}.efaEnabled needs one zone: availabilityZones must hold exactly one"
        known = described.get("availabilityZones", [])
        for zone in zones:
            if known and zone not in known:
                yield f"{path}.availabilityZones holds {zone!r}; the cluster's are {', '.join(known)}"
    iam = described.get("iam", {})
    if iam.get("serviceAccounts") and not iam.get("withOIDC"):
        yield "iam.withOIDC must be true; service accounts get their roles through it"
    zones = described.get("availabilityZones", [])
    if len(zones) == 1:
        yield f"availabilityZones is {zones}; the control plane of a cluster stands in at least two"


_RULES: dict[tuple[str, str], Callable[[Mapping[str, Any]], Iterator[str]]] = {
    ("kubeflow.org/v1", "TFJob"): _tfjob,
    ("kubeflow.org/v1", "PyTorchJob"): _pytorchjob,
    ("kubeflow.org/v2beta1", "MPIJob"): _mpijob,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): _trainjob,
    ("batch.volcano.sh/v1alpha1", "Job"): _volcano_job,
    ("eksctl.io/v1alpha5", "ClusterConfig"): _cluster_config,
}


def _replicas(
    described: Mapping[str, Any],
    field: str,
    roles: tuple[str, ...],
    container: str | None,
    restart: tuple[str, ...] = RESTART,
) -> Generator[str, None, Mapping[str, Any]]:
    """What holds for all jobs with replicas; returns these, by role."""
    specs: Mapping[str, Any] = described["spec"][field]
    policy = described["spec"].get("runPolicy", {})
    if not specs:
        yield f"spec.{field} is empty; it must have one of {', '.join(roles)}"
    for role, replica in specs.items():
        path = f"spec.{field}.{role}"
        if role not in roles:
            yield f"{path}: unknown role; the roles are {', '.join(roles)}"
        yield from _one_of(restart, replica, "restartPolicy", path)
        yield from _containers(replica, path, container)
    yield from _one_of(CLEAN, policy, "cleanPodPolicy", "spec.runPolicy")
    for limit in ("activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"):
        yield from _at_least(0, policy, limit, "spec.runPolicy")
    return specs


def _containers(replica: Mapping[str, Any], path: str, wanted: str | None = None) -> Iterator[str]:
    containers = replica.get("template", {}).get("spec", {}).get("containers", [])
    below = f"{path}.template.spec.containers"
    if not containers:
        yield f"{below} is missing or empty"
    elif wanted is not None and wanted not in [each["name"] for each in containers]:
        yield f"{below}: none is named {wanted!r}; the operator would not know which one trains"
    for index, each in enumerate(containers):
        if not each.get("image"):
            yield f"{below}[{index}].image is missing"


def _one_of(allowed: tuple[str, ...], values: Mapping[str, Any], field: str, path: str) -> Iterator[str]:
    if field in values and values[field] not in allowed:
        yield f"{path}.{field} is {values[field]!r}; it must be one of {', '.join(allowed)}"


def _at_least(least: int, values: Mapping[str, Any], field: str, path: str) -> Iterator[str]:
    if values.get(field, least) < least:
        yield f"{path}.{field} is {values[field]}; there must be at least {least}"
