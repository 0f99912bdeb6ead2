"""ClusterConfig, eksctl.io/v1alpha5: a cluster on EKS in one file.

Source: eksctl, schema of eksctl.io/v1alpha5. What a cluster for training has no use for is known by name, and not
looked into: `UNCHECKED`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from workshop_utils.launchers.kubernetes.kinds.node_groups import Labels, ManagedNodeGroup, NodeGroup
from workshop_utils.launchers.kubernetes.kinds.strict import Strict

UNCHECKED = (
    "autoModeConfig",
    "capabilities",
    "fargateProfiles",
    "gitops",
    "iamIdentityMappings",
    "identityProviders",
    "karpenter",
    "kubeAPIServerConfig",
    "kubeControllerManagerConfig",
    "kubeSchedulerConfig",
    "outpost",
    "remoteNetworkConfig",
)
Objects = list[dict[str, Any]]


class RollbackConfig(Strict):
    """How long an upgrade may be taken back."""

    timeout_minutes: int | None = None


class Metadata(Strict):
    """What the cluster is called, and where it is."""

    name: str
    region: str
    annotations: Labels | None = None
    force_update_version: bool | None = None
    rollback_config: RollbackConfig | None = None
    tags: Labels | None = None
    version: str | None = None


class WellKnownPolicies(Strict):
    """Rights that eksctl knows by the name of who needs them."""

    auto_scaler: bool | None = None
    aws_load_balancer_controller: bool | None = None
    cert_manager: bool | None = None
    ebs_csi_controller: bool | None = Field(default=None, alias="ebsCSIController")
    efs_csi_controller: bool | None = Field(default=None, alias="efsCSIController")
    external_dns: bool | None = Field(default=None, alias="externalDNS")
    image_builder: bool | None = None


class PodIdentity(Strict):
    """A role for the pods of a service account, by the pod identity agent."""

    create_service_account: bool | None = None
    disable_session_tags: bool | None = None
    namespace: str | None = None
    permission_policy: dict[str, Any] | None = None
    permission_policy_arns: list[str] | None = Field(default=None, alias="permissionPolicyARNs")
    permission_policy_name: str | None = None
    permissions_boundary_arn: str | None = Field(default=None, alias="permissionsBoundaryARN")
    policy: str | None = None
    role_arn: str | None = Field(default=None, alias="roleARN")
    role_name: str | None = None
    service_account_name: str | None = None
    tags: Labels | None = None
    target_role_arn: str | None = Field(default=None, alias="targetRoleARN")
    well_known_policies: WellKnownPolicies | None = None


class AccountMetadata(Strict):
    """Which service account."""

    annotations: Labels | None = None
    labels: Labels | None = None
    name: str | None = None
    namespace: str | None = None


class AccountStatus(Strict):
    """What eksctl writes of a service account that it has made."""

    capabilities: list[str] | None = None
    role_arn: str | None = Field(default=None, alias="roleARN")
    stack_name: str | None = None
    tags: Labels | None = None


class ServiceAccount(Strict):
    """A role for the pods of a service account, by OIDC (IRSA)."""

    attach_policy: dict[str, Any] | None = None
    attach_policy_arns: list[str] | None = Field(default=None, alias="attachPolicyARNs")
    attach_role_arn: str | None = Field(default=None, alias="attachRoleARN")
    metadata: AccountMetadata | None = None
    permissions_boundary: str | None = None
    role_name: str | None = None
    role_only: bool | None = None
    status: AccountStatus | None = None
    subject_pattern: str | None = None
    tags: Labels | None = None
    well_known_policies: WellKnownPolicies | None = None


class Iam(Strict):
    """Who may do what in the account."""

    fargate_pod_execution_role_arn: str | None = Field(default=None, alias="fargatePodExecutionRoleARN")
    fargate_pod_execution_role_permissions_boundary: str | None = None
    pod_identity_associations: list[PodIdentity] | None = None
    service_accounts: list[ServiceAccount] | None = None
    service_role_arn: str | None = Field(default=None, alias="serviceRoleARN")
    service_role_permissions_boundary: str | None = None
    vpc_resource_controller_policy: bool | None = None
    with_oidc: bool | None = Field(default=None, alias="withOIDC")


class AddonNamespace(Strict):
    """Where an add-on lives."""

    namespace: str | None = None


class Addon(Strict):
    """A part of the cluster that EKS installs and updates."""

    name: str
    attach_policy: dict[str, Any] | None = None
    attach_policy_arns: list[str] | None = Field(default=None, alias="attachPolicyARNs")
    configuration_values: str | None = None
    namespace_config: AddonNamespace | None = None
    owners: list[str] | None = None
    permissions_boundary: str | None = None
    pod_identity_associations: list[PodIdentity] | None = None
    publishers: list[str] | None = None
    resolve_conflicts: str | None = None
    service_account_role_arn: str | None = Field(default=None, alias="serviceAccountRoleARN")
    tags: Labels | None = None
    types: list[str] | None = None
    use_default_pod_identity_associations: bool | None = None
    version: str | None = None
    well_known_policies: WellKnownPolicies | None = None


class AddonsConfig(Strict):
    """What holds for all add-ons."""

    auto_apply_pod_identity_associations: bool | None = None
    disable_default_addons: bool | None = None


class Endpoints(Strict):
    """From where the control plane can be reached."""

    private_access: bool | None = None
    public_access: bool | None = None


class Nat(Strict):
    """How private subnets reach the internet."""

    gateway: Literal["HighlyAvailable", "Single", "Disable"] | None = None


class Subnet(Strict):
    """A subnet that there is already."""

    az: str | None = None
    cidr: str | None = None
    id: str | None = None


class Subnets(Strict):
    """The subnets, by any name, or by that of their zone."""

    private: dict[str, Subnet] | None = None
    public: dict[str, Subnet] | None = None


class Vpc(Strict):
    """The network."""

    auto_allocate_ipv6: bool | None = Field(default=None, alias="autoAllocateIPv6")
    cidr: str | None = None
    cluster_endpoints: Endpoints | None = None
    control_plane_egress_mode: str | None = None
    control_plane_on_private_subnets: bool | None = None
    control_plane_security_group_ids: list[str] | None = Field(
        default=None, alias="controlPlaneSecurityGroupIDs"
    )
    control_plane_subnet_ids: list[str] | None = Field(default=None, alias="controlPlaneSubnetIDs")
    extra_cidrs: list[str] | None = Field(default=None, alias="extraCIDRs")
    extra_ipv6_cidrs: list[str] | None = Field(default=None, alias="extraIPv6CIDRs")
    hostname_type: str | None = None
    id: str | None = None
    ipv6_cidr: str | None = None
    ipv6_pool: str | None = None
    manage_shared_node_security_group_rules: bool | None = None
    nat: Nat | None = None
    public_access_cidrs: list[str] | None = Field(default=None, alias="publicAccessCIDRs")
    security_group: str | None = None
    shared_node_security_group: str | None = None
    subnets: Subnets | None = None


class AccessPolicyScope(Strict):
    """Where a policy holds."""

    namespaces: list[str] | None = None
    type: str | None = None


class AccessPolicy(Strict):
    """What somebody may do in the cluster."""

    access_scope: AccessPolicyScope | None = None
    policy_arn: str | None = Field(default=None, alias="policyARN")


class AccessEntry(Strict):
    """Somebody of the account who may use the cluster."""

    access_policies: list[AccessPolicy] | None = None
    kubernetes_groups: list[str] | None = None
    kubernetes_username: str | None = None
    principal_arn: str | None = Field(default=None, alias="principalARN")
    type: str | None = None


class AccessConfig(Strict):
    """Who may use the cluster."""

    access_entries: list[AccessEntry] | None = None
    authentication_mode: str | None = None
    bootstrap_cluster_creator_admin_permissions: bool | None = None


LogType = Literal["api", "audit", "authenticator", "controllerManager", "scheduler", "all", "*"]


class ClusterLogging(Strict):
    """Which logs of the control plane are kept."""

    enable_types: list[LogType] | None = None
    log_retention_in_days: int | None = None


class CloudWatch(Strict):
    """What is written to CloudWatch."""

    cluster_logging: ClusterLogging | None = None


class NetworkConfig(Strict):
    """The addresses of pods and services."""

    ip_family: Literal["IPv4", "IPv6"] | None = None
    service_ipv4_cidr: str | None = Field(default=None, alias="serviceIPv4CIDR")
    service_ipv6_cidr: str | None = Field(default=None, alias="serviceIPv6CIDR")


class PrivateCluster(Strict):
    """A cluster that the internet does not reach."""

    additional_endpoint_services: list[str] | None = None
    enabled: bool | None = None
    skip_endpoint_creation: bool | None = None


class SecretsEncryption(Strict):
    """With which key secrets are encrypted."""

    key_arn: str = Field(alias="keyARN")


class ScalingTier(Strict):
    """How large the control plane is."""

    tier: str | None = None


class UpgradePolicy(Strict):
    """How long a version is supported, and at what price."""

    support_type: Literal["STANDARD", "EXTENDED"] | None = None


class ZonalShift(Strict):
    """Whether the cluster moves away from a zone that is not well."""

    enabled: bool | None = None


class ClusterConfig(Strict):
    """A cluster on EKS."""

    api_version: Literal["eksctl.io/v1alpha5"]
    kind: Literal["ClusterConfig"]
    metadata: Metadata
    access_config: AccessConfig | None = None
    addons: list[Addon] | None = None
    addons_config: AddonsConfig | None = None
    auto_mode_config: dict[str, Any] | None = None
    availability_zones: list[str] | None = None
    capabilities: Objects | None = None
    cloud_watch: CloudWatch | None = None
    control_plane_scaling_config: ScalingTier | None = None
    fargate_profiles: Objects | None = None
    gitops: dict[str, Any] | None = None
    iam: Iam | None = None
    iam_identity_mappings: Objects | None = None
    identity_providers: Objects | None = None
    karpenter: dict[str, Any] | None = None
    kube_api_server_config: dict[str, Any] | None = Field(default=None, alias="kubeAPIServerConfig")
    kube_controller_manager_config: dict[str, Any] | None = None
    kube_scheduler_config: dict[str, Any] | None = None
    kubernetes_network_config: NetworkConfig | None = None
    local_zones: list[str] | None = None
    managed_node_groups: list[ManagedNodeGroup] | None = None
    node_groups: list[NodeGroup] | None = None
    outpost: dict[str, Any] | None = None
    private_cluster: PrivateCluster | None = None
    remote_network_config: dict[str, Any] | None = None
    secrets_encryption: SecretsEncryption | None = None
    upgrade_policy: UpgradePolicy | None = None
    vpc: Vpc | None = None
    zonal_shift_config: ZonalShift | None = None
