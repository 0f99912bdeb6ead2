"""MPIJob, kubeflow.org/v2beta1. Source: mpi-operator v0.8, pkg/apis/kubeflow/v2beta1/types.go."""

from __future__ import annotations

from typing import Any, Literal

from workshop_utils.launchers.kubernetes.kinds.strict import ObjectMeta, PodTemplate, Quantity, Strict


class SchedulingPolicy(Strict):
    """How the pods of an MPIJob are scheduled together, by Volcano or another that knows gangs."""

    min_available: int | None = None
    min_resources: dict[str, Quantity] | None = None
    priority_class: str | None = None
    queue: str | None = None
    schedule_timeout_seconds: int | None = None


class RunPolicy(Strict):
    """When an MPIJob ends, and what stays."""

    active_deadline_seconds: int | None = None
    backoff_limit: int | None = None
    clean_pod_policy: str | None = None
    managed_by: str | None = None
    scheduling_policy: SchedulingPolicy | None = None
    suspend: bool | None = None
    ttl_seconds_after_finished: int | None = None


class ReplicaSpec(Strict):
    """The launcher, or the workers."""

    # The resource definition asks for neither; an operator without them starts nothing that is of use.
    replicas: int
    template: PodTemplate
    restart_policy: str | None = None


class Spec(Strict):
    """What an MPIJob asks for."""

    mpi_replica_specs: dict[str, ReplicaSpec]
    launcher_creation_policy: str | None = None
    mpi_implementation: Literal["OpenMPI", "Intel", "MPICH"] | None = None
    run_launcher_as_worker: bool | None = None
    run_policy: RunPolicy | None = None
    slots_per_worker: int | None = None
    ssh_auth_mount_path: str | None = None


class MPIJob(Strict):
    """An MPIJob v2beta1."""

    api_version: Literal["kubeflow.org/v2beta1"]
    kind: Literal["MPIJob"]
    metadata: ObjectMeta
    spec: Spec
    status: dict[str, Any] | None = None
