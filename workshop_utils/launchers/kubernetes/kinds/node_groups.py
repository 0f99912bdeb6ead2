"""The nodes of a ClusterConfig: what they are, how many, and how they reach each other.

Source: eksctl, schema of eksctl.io/v1alpha5, ManagedNodeGroup and NodeGroup.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from workshop_utils.launchers.kubernetes.kinds.strict import Strict

Labels = dict[str, str]
AmiFamily = Literal[
    "AmazonLinux2023",
    "AmazonLinux2",
    "UbuntuPro2604",
    "Ubuntu2604",
    "UbuntuPro2404",
    "Ubuntu2404",
    "UbuntuPro2204",
    "Ubuntu2204",
    "UbuntuPro2004",
    "Ubuntu2004",
    "Bottlerocket",
    "BottlerocketFips",
    "WindowsServer2019CoreContainer",
    "WindowsServer2019FullContainer",
    "WindowsServer2022CoreContainer",
    "WindowsServer2022FullContainer",
    "WindowsServer2025CoreContainer",
    "WindowsServer2025FullContainer",
]


class _Disk(Strict):
    """A disk of a node."""

    volume_encrypted: bool | None = None
    volume_iops: int | None = Field(default=None, alias="volumeIOPS")
    volume_kms_key_id: str | None = Field(default=None, alias="volumeKmsKeyID")
    volume_name: str | None = None
    volume_size: int | None = None
    volume_throughput: int | None = None
    volume_type: Literal["gp2", "gp3", "io1", "io2", "sc1", "st1"] | None = None


class VolumeMapping(_Disk):
    """A disk beside the first."""

    snapshot_id: str | None = Field(default=None, alias="snapshotID")


class AddonPolicies(Strict):
    """What pods of well-known add-ons may do, by the rights of their node."""

    alb_ingress: bool | None = None
    app_mesh: bool | None = None
    app_mesh_preview: bool | None = None
    auto_scaler: bool | None = None
    aws_load_balancer_controller: bool | None = None
    cert_manager: bool | None = None
    cloud_watch: bool | None = None
    ebs: bool | None = None
    efs: bool | None = None
    external_dns: bool | None = Field(default=None, alias="externalDNS")
    fsx: bool | None = None
    image_builder: bool | None = None
    x_ray: bool | None = None


class NodeRole(Strict):
    """What a node may do in the account."""

    attach_policy: dict[str, Any] | None = None
    attach_policy_arns: list[str] | None = Field(default=None, alias="attachPolicyARNs")
    instance_profile_arn: str | None = Field(default=None, alias="instanceProfileARN")
    instance_role_arn: str | None = Field(default=None, alias="instanceRoleARN")
    instance_role_name: str | None = None
    instance_role_permissions_boundary: str | None = None
    with_addon_policies: AddonPolicies | None = None


class ReservationTarget(Strict):
    """Which reservation."""

    capacity_reservation_id: str | None = Field(default=None, alias="capacityReservationID")
    capacity_reservation_resource_group_arn: str | None = Field(
        default=None, alias="capacityReservationResourceGroupARN"
    )


class CapacityReservation(Strict):
    """Instances that were reserved beforehand, as large accelerators have to be."""

    capacity_reservation_preference: str | None = None
    capacity_reservation_target: ReservationTarget | None = None


class InstanceMarketOptions(Strict):
    """How instances are bought: on demand, spot, or as a capacity block."""

    market_type: str | None = None


class InstanceSelector(Strict):
    """What an instance must have, where its type is left to eksctl."""

    allow: str | None = None
    cpu_architecture: Literal["x86_64", "amd64", "arm64"] | None = None
    deny: str | None = None
    gpus: int | None = None
    memory: str | None = None
    neuron_devices: int | None = Field(default=None, alias="neuron_devices")
    v_cpus: int | None = Field(default=None, alias="vCPUs")


class Placement(Strict):
    """The placement group that the nodes stand in."""

    group_name: str | None = None
    spread_level: str | None = None


class SecurityGroups(Strict):
    """The security groups that the nodes are in."""

    attach_ids: list[str] | None = Field(default=None, alias="attachIDs")
    with_local: bool | None = None
    with_shared: bool | None = None


class Ssh(Strict):
    """Who may log in to a node."""

    allow: bool | None = None
    enable_ssm: bool | None = None
    public_key: str | None = None
    public_key_name: str | None = None
    public_key_path: str | None = None
    source_security_group_ids: list[str] | None = None


class Taint(Strict):
    """What keeps pods away that do not tolerate it."""

    effect: str | None = None
    key: str | None = None
    value: str | None = None


class UpdateConfig(Strict):
    """How many nodes may be away while the group is updated."""

    max_unavailable: int | None = None
    max_unavailable_percentage: int | None = None


class RepairOverride(Strict):
    """What is done about one complaint of a node."""

    min_repair_wait_time_mins: int | None = None
    node_monitoring_condition: str | None = None
    node_unhealthy_reason: str | None = None
    repair_action: str | None = None


class NodeRepair(Strict):
    """Whether nodes that are not well are replaced."""

    enabled: bool | None = None
    max_parallel_nodes_repaired_count: int | None = None
    max_parallel_nodes_repaired_percentage: int | None = None
    max_unhealthy_node_threshold_count: int | None = None
    max_unhealthy_node_threshold_percentage: int | None = None
    node_repair_config_overrides: list[RepairOverride] | None = None


class Bottlerocket(Strict):
    """Settings of that operating system."""

    enable_admin_container: bool | None = None
    settings: dict[str, Any] | None = None


class LaunchTemplate(Strict):
    """A launch template of one's own."""

    id: str
    version: str | None = None


class _Nodes(_Disk):
    """What node groups of both sorts have."""

    name: str
    additional_volumes: list[VolumeMapping] | None = None
    ami: str | None = None
    ami_family: AmiFamily | None = None
    asg_suspend_processes: list[str] | None = None
    availability_zones: list[str] | None = None
    bottlerocket: Bottlerocket | None = None
    capacity_reservation: CapacityReservation | None = None
    desired_capacity: int | None = None
    disable_imds_v1: bool | None = Field(default=None, alias="disableIMDSv1")
    disable_pod_imds: bool | None = Field(default=None, alias="disablePodIMDS")
    ebs_optimized: bool | None = None
    efa_enabled: bool | None = None
    enable_detailed_monitoring: bool | None = None
    iam: NodeRole | None = None
    instance_market_options: InstanceMarketOptions | None = None
    instance_name: str | None = None
    instance_prefix: str | None = None
    instance_selector: InstanceSelector | None = None
    instance_type: str | None = None
    labels: Labels | None = None
    max_pods_per_node: int | None = None
    max_size: int | None = None
    min_size: int | None = None
    outpost_arn: str | None = Field(default=None, alias="outpostARN")
    override_bootstrap_command: str | None = None
    placement: Placement | None = None
    pre_bootstrap_commands: list[str] | None = None
    private_networking: bool | None = None
    propagate_asg_tags: bool | None = Field(default=None, alias="propagateASGTags")
    security_groups: SecurityGroups | None = None
    ssh: Ssh | None = None
    subnets: list[str] | None = None
    tags: Labels | None = None
    taints: list[Taint] | None = None
    update_config: UpdateConfig | None = None


class ManagedNodeGroup(_Nodes):
    """Nodes that EKS starts, updates and replaces."""

    instance_types: list[str] | None = None
    launch_template: LaunchTemplate | None = None
    node_repair_config: NodeRepair | None = None
    release_version: str | None = None
    spot: bool | None = None


class MetricsCollection(Strict):
    """Which metrics an auto-scaling group writes, and how often."""

    granularity: str
    metrics: list[str] | None = None


class InstancesDistribution(Strict):
    """Which instances are bought on demand, and which as spot."""

    instance_types: list[str]
    capacity_rebalance: bool | None = None
    max_price: float | None = None
    on_demand_base_capacity: int | None = None
    on_demand_percentage_above_base_capacity: int | None = None
    spot_allocation_strategy: str | None = None
    spot_instance_pools: int | None = None


class NodeGroup(_Nodes):
    """Nodes that one looks after oneself."""

    asg_metrics_collection: list[MetricsCollection] | None = None
    classic_load_balancer_names: list[str] | None = None
    cluster_dns: str | None = Field(default=None, alias="clusterDNS")
    container_runtime: str | None = None
    cpu_credits: str | None = None
    enclave_enabled: bool | None = None
    instances_distribution: InstancesDistribution | None = None
    kubelet_extra_config: dict[str, Any] | None = None
    local_zones: list[str] | None = None
    max_instance_lifetime: int | None = None
    target_group_arns: list[str] | None = Field(default=None, alias="targetGroupARNs")
