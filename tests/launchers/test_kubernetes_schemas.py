"""The own models of MPIJob, Volcano and ClusterConfig: what they refuse, and that the real schemas refuse the same."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from resource_schemas import needs_schemas, places, replaced, schema, validator

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes, check, manifest, rules
from workshop_utils.launchers.kubernetes.kinds import cluster_config
from workshop_utils.launchers.kubernetes.kinds.strict import Strict
from workshop_utils.launchers.kubernetes.play import play
from workshop_utils.launchers.kubernetes.tables import fields_of, required_of

ROOT = Path(__file__).parents[2]
VOLCANO_JOB = """
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: bert, namespace: default}
spec:
  schedulerName: volcano
  queue: workshop
  minAvailable: 3
  maxRetry: 3
  minSuccess: 1
  ttlSecondsAfterFinished: 60
  priorityClassName: high
  plugins: {svc: [--publish-not-ready-addresses], env: []}
  policies: [{event: PodEvicted, action: RestartJob}, {exitCode: 3, action: AbortJob, timeout: 5m}]
  networkTopology: {mode: hard, highestTierAllowed: 1}
  volumes: [{mountPath: /data, volumeClaimName: training-data}]
  tasks:
    - name: bert-0
      replicas: 1
      maxRetry: 1
      policies: [{events: [PodFailed, PodEvicted], action: RestartJob}]
      template: &pod
        metadata: {labels: {app: bert}}
        spec:
          restartPolicy: Never
          nodeSelector: {node.kubernetes.io/instance-type: trn1.32xlarge}
          containers:
            - name: bert
              image: workshop-neuron:trn1
              command: [torchrun]
              env: [{name: FI_PROVIDER, value: efa}]
              ports: [{name: c10d, containerPort: 29500}]
              resources: {limits: {aws.amazon.com/neuron: 16, memory: 400Gi}, requests: {cpu: 500m}}
    - name: bert-1
      replicas: 2
      minAvailable: 1
      dependsOn: {name: [bert-0], iteration: any}
      partitionPolicy: {totalPartitions: 2, partitionSize: 1, minPartitions: 1}
      topologyPolicy: best-effort
      template: *pod
"""
QUEUE = """
apiVersion: scheduling.volcano.sh/v1beta1
kind: Queue
metadata: {name: workshop}
spec:
  weight: 2
  priority: 1
  reclaimable: false
  parent: root
  type: training
  dequeueStrategy: fifo
  capability: {cpu: 8, aws.amazon.com/neuron: "32"}
  deserved: {memory: 1Gi}
  guarantee: {resource: {cpu: 500m}}
  affinity:
    nodeGroupAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [a]}
    nodeGroupAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [b]}
  extendClusters: [{name: other, weight: 1, capacity: {cpu: 1}}]
"""
CLUSTER = """
apiVersion: eksctl.io/v1alpha5
kind: ClusterConfig
metadata: {name: all-of-it, region: us-west-2, version: "1.35", tags: {a: b}}
availabilityZones: [us-west-2a, us-west-2b]
upgradePolicy: {supportType: STANDARD}
iam:
  withOIDC: true
  serviceAccounts:
    - metadata: {name: fsx, namespace: kube-system}
      attachPolicyARNs: ["arn:aws:iam::aws:policy/AmazonFSxFullAccess"]
      wellKnownPolicies: {ebsCSIController: true}
  podIdentityAssociations: [{namespace: a, serviceAccountName: b, roleARN: c}]
vpc:
  cidr: 10.0.0.0/16
  nat: {gateway: Single}
  clusterEndpoints: {publicAccess: true, privateAccess: true}
  subnets: {private: {us-west-2a: {id: subnet-1}}}
addons: [{name: vpc-cni, version: latest, configurationValues: "{}"}]
addonsConfig: {disableDefaultAddons: false}
cloudWatch: {clusterLogging: {enableTypes: [api], logRetentionInDays: 7}}
secretsEncryption: {keyARN: "arn:aws:kms:x"}
kubernetesNetworkConfig: {ipFamily: IPv4, serviceIPv4CIDR: 10.1.0.0/16}
privateCluster: {enabled: false, additionalEndpointServices: [s3]}
accessConfig:
  authenticationMode: API
  accessEntries: [{principalARN: x, accessPolicies: [{policyARN: y, accessScope: {type: cluster}}]}]
managedNodeGroups:
  - name: accelerators
    instanceType: trn1.32xlarge
    amiFamily: AmazonLinux2023
    minSize: 0
    desiredCapacity: 2
    maxSize: 2
    availabilityZones: [us-west-2a]
    efaEnabled: true
    privateNetworking: true
    placement: {groupName: close}
    capacityReservation: {capacityReservationTarget: {capacityReservationID: cr-1}}
    instanceMarketOptions: {marketType: capacity-block}
    taints: [{key: a, value: b, effect: NoSchedule}]
    labels: {a: b}
    iam: {withAddonPolicies: {fsx: true, ebs: false}, attachPolicyARNs: [x]}
    volumeSize: 500
    volumeType: gp3
    disableIMDSv1: true
    ssh: {allow: false, enableSsm: true}
    additionalVolumes: [{volumeName: /dev/sdb, volumeSize: 1, snapshotID: s}]
    instanceSelector: {vCPUs: 4, neuron_devices: 1, cpuArchitecture: x86_64}
    updateConfig: {maxUnavailable: 1}
    nodeRepairConfig: {enabled: true, nodeRepairConfigOverrides: [{repairAction: Reboot}]}
    launchTemplate: {id: lt-1, version: "2"}
nodeGroups:
  - name: own
    instancesDistribution: {instanceTypes: [g5.8xlarge], maxPrice: 0.5, onDemandBaseCapacity: 0}
    asgMetricsCollection: [{granularity: 1Minute, metrics: [a]}]
    availabilityZones: [us-west-2b]
"""


def mpijob() -> dict[str, Any]:
    made = copy.deepcopy(Kubernetes().render(TrainingJob.load(ROOT / "jobs" / "mnist_mpi")).resource)
    made["spec"]["runPolicy"]["schedulingPolicy"] = {
        "queue": "a",
        "minAvailable": 3,
        "minResources": {"cpu": 1},
    }
    return made


SAMPLES: dict[str, dict[str, Any]] = {
    "MPIJob": mpijob(),
    "VolcanoJob": json.loads(json.dumps(yaml.safe_load(VOLCANO_JOB))),  # two pods, not one twice
    "Queue": yaml.safe_load(QUEUE),
    "ClusterConfig": yaml.safe_load(CLUSTER),
}
# Where the model asks for more than the schema, on purpose: an operator without these has nothing to start.
MORE_IS_ASKED = {
    "MPIJob": {"apiVersion", "kind", "metadata", "spec", "replicas", "template"},
    "VolcanoJob": {"apiVersion", "kind", "metadata", "spec"},
    "Queue": {"apiVersion", "kind", "metadata", "spec"},
    "ClusterConfig": set(),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_whole_object_is_accepted(name: str) -> None:
    assert list(check.problems_of(SAMPLES[name])) == []
    assert list(rules.problems_of(SAMPLES[name])) == []


# What is wrong, in sentences


def changed(name: str, path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(SAMPLES[name])
    at: Any = found
    *parents, last = path.split(".")
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[last] = value
    return found


GROUP = "managedNodeGroups.0"
TASK = "spec.tasks.0"


AN_AMOUNT = "it must be an amount such as 500m, 2 or 2Gi"
FIELDS_OF_SSH = (
    ": unknown field; the fields are allow, enableSsm, publicKey, publicKeyName, publicKeyPath, "
    "sourceSecurityGroupIds"
)
POD = f"{TASK}.template.spec.containers.0"
EVENTS = "'*', 'PodPending', 'PodRunning', 'PodFailed', 'PodEvicted', 'Unknown', 'TaskCompleted', 'OutOfSync'"
ONE_OF_THE_EVENTS = f"it must be one of {EVENTS}, 'CommandIssued', 'JobUpdated', 'TaskFailed'"


@pytest.mark.parametrize(
    ("name", "path", "value", "said"),
    [
        ("ClusterConfig", f"{GROUP}.instanceTyp", "m5.large", ": unknown field; did you mean instanceType?"),
        ("ClusterConfig", f"{GROUP}.efaEnabled", "yes", " is 'yes'; it must be true or false"),
        ("ClusterConfig", f"{GROUP}.maxSize", 2.5, " is 2.5; it must be a whole number"),
        ("ClusterConfig", f"{GROUP}.taints.0.efect", "x", ": unknown field; did you mean effect?"),
        ("ClusterConfig", f"{GROUP}.ssh.key", "x", FIELDS_OF_SSH),
        ("ClusterConfig", f"{GROUP}.subnets", None, " has no value; give it one, or leave the field out"),
        ("ClusterConfig", "upgradePolicy.supportType", "LONG", " is 'LONG'; it must be one of 'STANDARD', 'EXTENDED'"),
        ("ClusterConfig", "metadata.version", 1.35, " is 1.35; it must be a text; put it in quotes"),
        ("ClusterConfig", "vpc.subnets.private.us-west-2a.cidrs", "x", ": unknown field; did you mean cidr?"),
        ("ClusterConfig", "metadata", {"name": "x"}, ".region is missing"),
        ("ClusterConfig", "iam", [], " is []; it must be an object with fields of its own"),
        ("ClusterConfig", "availabilityZones", "us-west-2a", " is 'us-west-2a'; it must be a list"),
        ("VolcanoJob", f"{TASK}.replica", 1, ": unknown field; did you mean replicas?"),
        ("VolcanoJob", f"{TASK}.replicas", -1, " is -1; it must be at least 0"),
        ("VolcanoJob", f"{TASK}.name", "Bert", " is 'Bert'; it must match ^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
        ("VolcanoJob", f"{POD}.imagee", "x", ": unknown field; did you mean image?"),
        ("VolcanoJob", f"{POD}.resources.limits.memory", "4GB", f" is '4GB'; {AN_AMOUNT}"),
        ("VolcanoJob", "spec.tasks", [], " is []; it must not be empty"),
        ("VolcanoJob", "spec.policies.0.event", "PodLost", f" is 'PodLost'; {ONE_OF_THE_EVENTS}"),
        ("VolcanoJob", "spec.volumes.0.mountPath", "a:b", " is 'a:b'; it must match ^[^:]+$"),
        ("Queue", "spec.weight", 70000, " is 70000; it must be at most 65535"),
        ("Queue", "spec.weigth", 1, ": unknown field; did you mean weight?"),
        ("Queue", "spec.capability.cpu", "8 cores", f" is '8 cores'; {AN_AMOUNT}"),
        ("Queue", "spec.type", "x" * 254, f" is {'x' * 254!r}; it must have at most 253 characters"),
        ("MPIJob", "spec.mpiImplementation", "Open", " is 'Open'; it must be one of 'OpenMPI', 'Intel', 'MPICH'"),
        ("MPIJob", "spec.runPolicy.schedulingPolicy.que", "a", ": unknown field; did you mean queue?"),
        ("MPIJob", "metadata.lables", {}, ": unknown field; did you mean labels?"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_would_be_right(name: str, path: str, value: Any, said: str) -> None:
    wrong = changed(name, path, value)
    written = re.sub(r"\.(\d+)", r"[\1]", path)
    assert list(check.problems_of(wrong)) == [written + said]
    with pytest.raises(JobError):
        check.body(wrong)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    wrong = changed("ClusterConfig", f"{GROUP}.efaEnabeld", True)
    wrong["managedNodeGroups"][0]["minSize"] = "1"
    wrong["iamm"] = {}
    assert len(list(check.problems_of(wrong))) == 3


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("VolcanoJob", "spec.minAvailable", 4, "spec.minAvailable is 4; it may be at most 3"),
        ("VolcanoJob", "spec.tasks.1.minAvailable", 3, "tasks[1].minAvailable is 3; it may be at most replicas, 2"),
        ("VolcanoJob", "spec.tasks.1.name", "bert-0", "another task is called so already"),
        ("VolcanoJob", "spec.tasks.1.dependsOn.name", ["bert"], "holds 'bert'; the tasks are bert-0, bert-1"),
        ("VolcanoJob", "spec.plugins.sssh", [], "spec.plugins.sssh: unknown plugin"),
        ("VolcanoJob", "spec.policies.0.action", "Restart", "action is 'Restart'; it must be one of AbortJob"),
        ("VolcanoJob", "spec.policies.0.exitCode", 1, "must have either event (or events) or exitCode"),
        ("VolcanoJob", "spec.policies.1.exitCode", 0, "spec.policies[1].exitCode is 0"),
        ("VolcanoJob", "spec.volumes.0.volumeClaim", {}, "must have either volumeClaim or volumeClaimName"),
        ("VolcanoJob", f"{TASK}.template.spec.containers", [], "containers is missing or empty"),
        ("VolcanoJob", "metadata.name", "b" * 57, "a pod's name, would have more than 63 characters"),
        ("Queue", "metadata.name", "root", "that is the queue that holds all others"),
        ("ClusterConfig", f"{GROUP}.maxSize", 1, "minSize, desiredCapacity and maxSize must be in that order"),
        ("ClusterConfig", f"{GROUP}.availabilityZones", ["us-west-2a", "us-west-2b"], "efaEnabled needs one zone"),
        ("ClusterConfig", f"{GROUP}.availabilityZones", ["us-west-2c"], "holds 'us-west-2c'; the cluster's are"),
        ("ClusterConfig", f"{GROUP}.subnets", ["subnet-1"], "only one of availabilityZones and subnets"),
        ("ClusterConfig", f"{GROUP}.placement", {}, "placement.groupName is missing"),
        ("ClusterConfig", "nodeGroups.0.name", "accelerators", "another node group is called so already"),
        ("ClusterConfig", "iam.withOIDC", False, "iam.withOIDC must be true"),
        ("ClusterConfig", "availabilityZones", ["us-west-2a"], "the control plane of a cluster stands in at least two"),
    ],
)  # fmt: skip
def test_what_no_schema_says_is_checked_too(name: str, path: str, value: Any, message: str) -> None:
    wrong = changed(name, path, value)
    assert list(check.problems_of(wrong)) == []
    assert message in "\n".join(rules.problems_of(wrong))


def test_a_job_of_volcano_is_not_played_as_kubernetes_s_own() -> None:
    job = TrainingJob.load(ROOT / "jobs" / "mnist_single")
    with pytest.raises(JobError, match=r"is a Job of batch\.volcano\.sh/v1alpha1; it must be a job"):
        play(job, manifest.read(VOLCANO_JOB))


# The model and the schema say the same


def properties(model: type[Strict], found: dict[str, Any], path: str) -> Iterator[str]:
    """Where the fields of `model`, or those that there must be, are not those of its schema."""
    fields, known = fields_of(model), found.get("properties", {})
    for name in sorted(set(fields) ^ set(known)):
        yield f"{path}.{name}: only in the {'model' if name in fields else 'schema'}"
    for name in sorted(set(required_of(model)) ^ set(found.get("required", []))):
        yield f"{path}.{name} must be there only in the {'model' if name in required_of(model) else 'schema'}"
    for name in set(fields) & set(known):
        kind, below = fields[name], known[name]
        while kind.of is not None and (
            "items" in below or isinstance(below.get("additionalProperties"), dict)
        ):
            kind, below = kind.of, below.get("items") or below["additionalProperties"]
        if kind.kind is not None and issubclass(kind.kind, Strict):
            yield from properties(kind.kind, below, f"{path}.{name}")


@needs_schemas
@pytest.mark.parametrize("name", SAMPLES)
def test_a_model_has_the_fields_of_its_schema_and_asks_for_the_same(name: str) -> None:
    version, kind = SAMPLES[name]["apiVersion"], SAMPLES[name]["kind"]
    model, found = check.KINDS[version, kind], schema(version, kind)
    assert found is not None
    assert issubclass(model, Strict)
    differences = list(properties(model, found, ""))
    assert {line.split(" must be")[0].rpartition(".")[2] for line in differences} == MORE_IS_ASKED[name]
    assert all("must be there only in the model" in line for line in differences), differences


def mutations(described: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects with one thing changed each: at every place an unknown field, no value, and values of other types."""
    for path, value in places(described, ()):
        others: list[Any] = [None, "§", -7, True, 1.5, [], {}]
        if isinstance(value, dict):
            others.append({**value, "unknownField": 1})
        for other in others:
            if type(other) is not type(value) or other != value:
                yield f"{path} → {other!r}", replaced(described, path, other)


# The kinds' own fields alone: a pod's are the client's table, of metadata a resource's schema says nothing.
NOT_COMPARED = ("'template'", "('metadata'", *(f"'{field}'" for field in cluster_config.UNCHECKED))


@needs_schemas
@pytest.mark.parametrize("name", SAMPLES)
def test_a_model_refuses_what_its_schema_refuses_and_nothing_else(name: str) -> None:
    sample = SAMPLES[name]
    real = validator(sample["apiVersion"], sample["kind"])
    assert real.is_valid(sample)
    compared = refused = 0
    for change, mutated in mutations(sample):
        if any(words in change for words in NOT_COMPARED) or change.startswith(("('kind'", "('apiVersion'")):
            continue
        wrong = not real.is_valid(mutated)
        said = list(check.problems_of(mutated))
        asked = {line.removesuffix(" is missing").rpartition(".")[2] for line in said}
        assert bool(said) == wrong or (said and asked <= MORE_IS_ASKED[name]), (change, said)
        compared, refused = compared + 1, refused + wrong
    assert compared > 100
    assert 0.5 * compared < refused < compared
