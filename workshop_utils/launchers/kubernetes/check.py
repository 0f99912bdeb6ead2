"""Would a cluster take this object? Asked without one, and of every field; what is wrong is named by its path.

    spec.tfReplicaSpecs.Worker.template.spec.containers[0].imagee: unknown field; did you mean image?

A cluster drops a field that it does not know, in silence, unless it is asked to be strict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import kubeflow.training as training
import kubeflow_trainer_api.models as trainer
import kubernetes.client as core

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes.compare import problems_in
from workshop_utils.launchers.kubernetes.kinds import cluster_config, mpijob, volcano
from workshop_utils.launchers.kubernetes.kinds.strict import Strict

KINDS: dict[tuple[str, str], type] = {
    # What jobs are made of.
    ("batch/v1", "Job"): core.V1Job,
    ("v1", "ConfigMap"): core.V1ConfigMap,
    ("kubeflow.org/v1", "TFJob"): training.KubeflowOrgV1TFJob,
    ("kubeflow.org/v1", "PyTorchJob"): training.KubeflowOrgV1PyTorchJob,
    ("kubeflow.org/v2beta1", "MPIJob"): mpijob.MPIJob,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): trainer.TrainerV1alpha1TrainJob,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): trainer.TrainerV1alpha1TrainingRuntime,
    ("batch.volcano.sh/v1alpha1", "Job"): volcano.Job,
    # What a cluster is made of.
    ("eksctl.io/v1alpha5", "ClusterConfig"): cluster_config.ClusterConfig,
    ("scheduling.volcano.sh/v1beta1", "Queue"): volcano.Queue,
    ("v1", "Namespace"): core.V1Namespace,
    ("v1", "PersistentVolumeClaim"): core.V1PersistentVolumeClaim,
    ("v1", "Service"): core.V1Service,
    ("v1", "ServiceAccount"): core.V1ServiceAccount,
    ("apps/v1", "DaemonSet"): core.V1DaemonSet,
    ("apps/v1", "Deployment"): core.V1Deployment,
    ("storage.k8s.io/v1", "StorageClass"): core.V1StorageClass,
    ("rbac.authorization.k8s.io/v1", "ClusterRole"): core.V1ClusterRole,
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"): core.V1ClusterRoleBinding,
    ("rbac.authorization.k8s.io/v1", "Role"): core.V1Role,
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): core.V1RoleBinding,
}


def body(described: Mapping[str, Any]) -> None:
    """Raise JobError where `described` is not an object of its kind; one line for each thing that is wrong."""
    problems = list(problems_of(described))
    if problems:
        raise JobError("\n".join(problems))


def problems_of(described: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with `described`, a sentence each; nothing where it is an object of its kind."""
    version, kind = described.get("apiVersion"), described.get("kind")
    found = KINDS.get((str(version), str(kind)))
    if found is None:
        known = ", ".join(f"{kind} of {version}" for version, kind in KINDS)
        yield f"apiVersion and kind are {version!r} and {kind!r}; they must be one of: {known}"
    elif issubclass(found, Strict):
        yield from found.problems_of(described)
    else:
        yield from problems_in(described, found)
