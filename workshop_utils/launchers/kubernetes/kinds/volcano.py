"""Job and Queue of Volcano: pods that start together or not at all, and whose turn it is.

Source: volcano v1.15, config/crd (batch.volcano.sh/v1alpha1 Job, scheduling.volcano.sh/v1beta1 Queue).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from workshop_utils.launchers.kubernetes.kinds.strict import (
    ClaimSpec,
    DnsLabel,
    NotNegative,
    ObjectMeta,
    PodTemplate,
    Positive,
    Quantity,
    Strict,
    Subdomain,
)

Event = Literal[
    "*",
    "PodPending",
    "PodRunning",
    "PodFailed",
    "PodEvicted",
    "Unknown",
    "TaskCompleted",
    "OutOfSync",
    "CommandIssued",
    "JobUpdated",
    "TaskFailed",
]
ShortName = Annotated[str, Field(max_length=253)]
Amounts = dict[str, Quantity]


class NetworkTopology(Strict):
    """How close to each other, in tiers of switches, the pods must stand."""

    highest_tier_allowed: NotNegative | None = None
    highest_tier_name: ShortName | None = None
    mode: Literal["hard", "soft"] | None = None


class Policy(Strict):
    """What is done when something happens."""

    action: str | None = None
    event: Event | None = None
    events: list[Event] | None = None
    exit_code: int | None = None
    timeout: str | None = None


class DependsOn(Strict):
    """The tasks that come before."""

    iteration: str | None = None
    name: list[str] | None = None


class PartitionPolicy(Strict):
    """How the pods of a task fall into groups."""

    partition_size: Positive
    total_partitions: Positive
    min_partitions: NotNegative | None = None
    network_topology: NetworkTopology | None = None


class Task(Strict):
    """Pods that are alike."""

    depends_on: DependsOn | None = None
    max_retry: NotNegative | None = None
    min_available: NotNegative | None = None
    name: DnsLabel | None = None
    partition_policy: PartitionPolicy | None = None
    policies: list[Policy] | None = None
    replicas: NotNegative | None = None
    template: PodTemplate | None = None
    topology_policy: Literal["none", "best-effort", "restricted", "single-numa-node"] | None = None


class Volume(Strict):
    """A volume that every pod mounts."""

    mount_path: Annotated[str, Field(min_length=1, pattern="^[^:]+$")]
    volume_claim: ClaimSpec | None = None
    volume_claim_name: ShortName | None = None


class JobSpec(Strict):
    """What a Job asks for."""

    max_retry: NotNegative | None = None
    min_available: NotNegative | None = None
    min_success: Positive | None = None
    network_topology: NetworkTopology | None = None
    plugins: dict[str, list[str]] | None = None
    policies: list[Policy] | None = None
    priority_class_name: Subdomain | None = None
    queue: Subdomain | None = None
    running_estimate: str | None = None
    scheduler_name: Annotated[str, Field(max_length=63)] | None = None
    tasks: Annotated[list[Task], Field(min_length=1)] | None = None
    ttl_seconds_after_finished: NotNegative | None = None
    volumes: list[Volume] | None = None


class Job(Strict):
    """A Job of Volcano."""

    api_version: Literal["batch.volcano.sh/v1alpha1"]
    kind: Literal["Job"]
    metadata: ObjectMeta
    spec: JobSpec
    status: dict[str, Any] | None = None


class NodeGroupTerms(Strict):
    """The groups of nodes that a queue prefers, or insists on."""

    preferred: list[str] | None = Field(default=None, alias="preferredDuringSchedulingIgnoredDuringExecution")
    required: list[str] | None = Field(default=None, alias="requiredDuringSchedulingIgnoredDuringExecution")


class QueueAffinity(Strict):
    """Where the pods of a queue may stand."""

    node_group_affinity: NodeGroupTerms | None = None
    node_group_anti_affinity: NodeGroupTerms | None = None


class ExtendCluster(Strict):
    """Another cluster that the queue may reach into."""

    capacity: Amounts | None = None
    name: str | None = None
    weight: int | None = None


class Guarantee(Strict):
    """What is kept for the queue, whoever else waits."""

    resource: Amounts | None = None


class QueueSpec(Strict):
    """What a Queue is given."""

    affinity: QueueAffinity | None = None
    capability: Amounts | None = None
    dequeue_strategy: Literal["fifo", "traverse"] | None = None
    deserved: Amounts | None = None
    extend_clusters: list[ExtendCluster] | None = None
    guarantee: Guarantee | None = None
    parent: Subdomain | None = None
    priority: NotNegative | None = None
    reclaimable: bool | None = None
    type: ShortName | None = None
    weight: Annotated[int, Field(ge=1, le=65535)] | None = None


class Queue(Strict):
    """A Queue of Volcano."""

    api_version: Literal["scheduling.volcano.sh/v1beta1"]
    kind: Literal["Queue"]
    metadata: ObjectMeta
    spec: QueueSpec
    status: dict[str, Any] | None = None
