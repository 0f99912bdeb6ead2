"""What the operators ask for in their own code, so that no schema says it.

Sources: training-operator v1.9.4, pkg/webhooks; mpi-operator v0.8, pkg/apis/kubeflow/validation; trainer v2.3.0, the
rules of the TrainJob's resource definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes import pytorchjob, tfjob, trainjob

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS-1035
RESTART = ("Always", "OnFailure", "Never", "ExitCode")
CLEAN = ("None", "Running", "All")
TORCHRUN_SETS = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


def body(described: Mapping[str, Any]) -> None:
    """Raise JobError where the operator of `described`, which has passed `check.body`, would refuse it."""
    problems = list(problems_of(described))
    if problems:
        raise JobError("\n".join(problems))


def problems_of(described: Mapping[str, Any]) -> Iterator[str]:
    """What the operator would refuse, a sentence each."""
    name = described.get("metadata", {}).get("name", "")
    if not LABEL.fullmatch(name):
        yield (
            f"metadata.name is {name!r}; it must be lower-case letters, digits and '-', start with a letter, and be "
            "at most 63 long"
        )
    rule = _RULES.get(described["kind"])
    if rule is not None:
        yield from rule(described)


def _tfjob(described: Mapping[str, Any]) -> Iterator[str]:
    specs = described["spec"]["tfReplicaSpecs"]
    path = "spec.tfReplicaSpecs"
    yield from _replicas(specs, path, ("Chief", "Master", "PS", "Worker", "Evaluator"), tfjob.CONTAINER)
    yield from _policy(described)
    if sum(specs.get(role, {}).get("replicas", 1) for role in ("Chief", "Master") if role in specs) > 1:
        yield f"{path}: there is more than one Chief or Master; at most one may be"


def _pytorchjob(described: Mapping[str, Any]) -> Iterator[str]:
    specs = described["spec"]["pytorchReplicaSpecs"]
    path = "spec.pytorchReplicaSpecs"
    yield from _replicas(specs, path, ("Master", "Worker"), pytorchjob.CONTAINER)
    yield from _policy(described)
    if specs.get("Master", {}).get("replicas", 1) != 1:
        yield f"{path}.Master.replicas is {specs['Master']['replicas']}; there must be 1"
    if specs.get("Worker", {}).get("replicas", 1) < 1:
        yield f"{path}.Worker.replicas is {specs['Worker']['replicas']}; there must be at least 1"
    if "elasticPolicy" in described["spec"] and "Worker" not in specs:
        yield f"{path}.Worker is missing; an elasticPolicy needs it"


def _mpijob(described: Mapping[str, Any]) -> Iterator[str]:
    specs = described["spec"]["mpiReplicaSpecs"]
    path = "spec.mpiReplicaSpecs"
    yield from _replicas(specs, path, ("Launcher", "Worker"), None, ("OnFailure", "Never"))
    yield from _policy(described)
    if "Launcher" not in specs:
        yield f"{path}.Launcher is missing"
    elif specs["Launcher"]["replicas"] != 1:
        yield f"{path}.Launcher.replicas is {specs['Launcher']['replicas']}; there must be 1"
    workers = specs.get("Worker", {}).get("replicas", 1)
    if workers < 1:
        yield f"{path}.Worker.replicas is {workers}; there must be at least 1"
    last = f"{described['metadata']['name']}-worker-{workers - 1}"
    if len(last) > 63:
        yield f"metadata.name is too long: {last}, the last worker's, would have more than 63 characters"
    for field, values in (
        ("mpiImplementation", ("OpenMPI", "Intel", "MPICH")),
        ("launcherCreationPolicy", ("AtStartup", "WaitForWorkersReady")),
    ):
        yield from _one_of(described["spec"], field, values, "spec")


def _trainjob(described: Mapping[str, Any]) -> Iterator[str]:
    trainer = described["spec"].get("trainer", {})
    for index, variable in enumerate(trainer.get("env", [])):
        if variable["name"] in TORCHRUN_SETS:
            yield f"spec.trainer.env[{index}].name is {variable['name']!r}; the trainer sets it itself"
    if trainer.get("numNodes", 1) < 1:
        yield f"spec.trainer.numNodes is {trainer['numNodes']}; there must be at least 1"


def _runtime(described: Mapping[str, Any]) -> Iterator[str]:
    path = "spec.template.spec.replicatedJobs"
    jobs = described["spec"].get("template", {}).get("spec", {}).get("replicatedJobs", [])
    steps = [each["template"].get("metadata", {}).get("labels", {}) for each in jobs]
    if not any(trainjob.ANCESTOR.items() <= labels.items() for labels in steps):
        label = "".join(f"{name}: {value}" for name, value in trainjob.ANCESTOR.items())
        yield f"{path}: none has the label {label}; without it the trainer starts nothing"
    for index, each in enumerate(jobs):
        spec = each["template"]["spec"]["template"].get("spec", {})
        names = [container["name"] for container in spec.get("containers", [])]
        if trainjob.CONTAINER not in names:
            yield f"{path}[{index}]: no container is named {trainjob.CONTAINER!r}"


_RULES: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "TFJob": _tfjob,
    "PyTorchJob": _pytorchjob,
    "MPIJob": _mpijob,
    "TrainJob": _trainjob,
    "TrainingRuntime": _runtime,
}


def _replicas(
    specs: Mapping[str, Any],
    path: str,
    roles: tuple[str, ...],
    container: str | None,
    restart: tuple[str, ...] = RESTART,
) -> Iterator[str]:
    if not specs:
        yield f"{path} is empty; it must have one of {', '.join(roles)}"
    for role, replica in specs.items():
        here = f"{path}.{role}"
        if role not in roles:
            yield f"{here}: unknown role; the roles are {', '.join(roles)}"
        yield from _one_of(replica, "restartPolicy", restart, here)
        containers = replica.get("template", {}).get("spec", {}).get("containers", [])
        below = f"{here}.template.spec.containers"
        if not containers:
            yield f"{below} is missing or empty"
        elif container is not None and container not in [each["name"] for each in containers]:
            yield f"{below}: none is named {container!r}; the operator would not know which one trains"
        for index, each in enumerate(containers):
            if not each.get("image"):
                yield f"{below}[{index}].image is missing"


def _policy(described: Mapping[str, Any]) -> Iterator[str]:
    policy = described["spec"].get("runPolicy", {})
    yield from _one_of(policy, "cleanPodPolicy", CLEAN, "spec.runPolicy")
    for field in ("activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"):
        if policy.get(field, 0) < 0:
            yield f"spec.runPolicy.{field} is {policy[field]}; it must not be less than 0"


def _one_of(values: Mapping[str, Any], field: str, allowed: tuple[str, ...], path: str) -> Iterator[str]:
    if field in values and values[field] not in allowed:
        yield f"{path}.{field} is {values[field]!r}; it must be one of {', '.join(allowed)}"
