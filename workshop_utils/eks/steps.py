"""What makes a cluster, step by step, and takes it away again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from workshop_utils.eks.cluster import FOLDER, ROOT, Cluster

RAW, GITHUB = "https://raw.githubusercontent.com", "https://github.com"
MPI_OPERATOR = f"{RAW}/kubeflow/mpi-operator/v0.8.2/deploy/v2beta1/mpi-operator.yaml"
TRAINER = f"{GITHUB}/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0"
VOLCANO = f"{RAW}/volcano-sh/volcano/v1.15.1/installer/volcano-development.yaml"
NVIDIA = f"{RAW}/NVIDIA/k8s-device-plugin/v0.17.1/deployments/static/nvidia-device-plugin.yml"
NEURON = ("oci://public.ecr.aws/neuron/neuron-helm-chart", "--version", "1.9.0")
FSX = f"{GITHUB}/kubernetes-sigs/aws-fsx-csi-driver/deploy/kubernetes/overlays/stable/?ref=v1.10.0"
# Everything that may still hold a claim when a cluster is taken away.
JOBS = ("tfjobs", "pytorchjobs", "mpijobs", "trainjobs", "jobs.batch.volcano.sh", "jobs", "pods")

Command = tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One thing that a cluster needs: how it is made, and how it is taken away.

    Attributes:
        why: what it is, in words.
        do, undo: the commands, in order; `$name` in one stands for what a step before has kept under that name.
        unless: a question that succeeds where it is there already.
        keep: under which name the output is kept; there must be one, or it is an error.
        fill: a file whose `${name}` are filled in, and which is given to the command as its standard input.
        remains: how to list what may be left over by other ways, and how to delete `$each` of it.
        inside: whether it lives in the cluster, and goes with it.
    """

    why: str
    do: tuple[Command, ...] = ()
    undo: tuple[Command, ...] = ()
    unless: Command = ()
    keep: str = ""
    fill: Path | None = None
    remains: tuple[Command, Command] | None = None
    inside: bool = True


def there(cluster: Cluster) -> Command:
    """Asks whether there is such a cluster."""
    return ("aws", "eks", "describe-cluster", "--name", cluster.name, "--region", cluster.region,
            "--query", "cluster.status", "--output", "text")  # fmt: skip


def reach(cluster: Cluster) -> tuple[Command, Command]:
    """Tell kubectl and helm of the cluster, under its own name; and see that they reach it."""
    tell = ("aws", "eks", "update-kubeconfig", "--name", cluster.name, "--region", cluster.region,
            "--alias", cluster.name)  # fmt: skip
    return tell, ("kubectl", "--context", cluster.name, "get", "namespace", "default")


def steps(cluster: Cluster) -> list[Step]:
    """What makes `cluster`, in order. Backwards, and with `undo` in place of `do`, it takes it away."""
    name, at = cluster.name, ("--region", cluster.region)
    kubectl = ("kubectl", "--context", name)  # never the context that happens to be the current one

    def applied(why: str, *what: str, wait: tuple[Command, ...] = ()) -> Step:
        make = (*kubectl, "apply", "--server-side", "--force-conflicts", *what)
        return Step(why, (make, *wait), ((*kubectl, "delete", "--ignore-not-found", *what),))

    def up(namespace: str) -> Command:
        return (*kubectl, "wait", "--namespace", namespace, "--for=condition=Available", "deployment", "--all",
                "--timeout=10m")  # fmt: skip

    file = str(cluster.file)
    zone = cluster.groups[-1]["availabilityZones"][0]
    found = [
        Step(
            f"is {group['instanceType']} offered in {group['availabilityZones'][0]}?",
            (("aws", "ec2", "describe-instance-type-offerings", *at, "--location-type", "availability-zone",
              "--filters", f"Name=instance-type,Values={group['instanceType']}",
              f"Name=location,Values={group['availabilityZones'][0]}",
              "--query", "InstanceTypeOfferings[].InstanceType", "--output", "text"),),
            keep=f"offered_{index}",
        )
        for index, group in enumerate(cluster.groups)
    ]  # fmt: skip
    found += [
        Step(
            "control plane, network and roles: 15 minutes",
            (("eksctl", "create", "cluster", "-f", file, "--without-nodegroup"),),
            (("eksctl", "delete", "cluster", "--name", name, *at, "--wait", "--disable-nodegroup-eviction"),),
            unless=there(cluster),
            inside=False,
        ),
        Step(
            "file systems that a claim has left behind; the network cannot go before them",
            remains=(
                ("aws", "fsx", "describe-file-systems", *at, "--output", "text", "--query",
                 f"FileSystems[?Tags[?Key=='cluster'&&Value=='{name}']].FileSystemId"),
                ("aws", "fsx", "delete-file-system", *at, "--file-system-id", "$each"),
            ),
            inside=False,
        ),
        Step("how kubectl reaches it", reach(cluster), (("kubectl", "config", "delete-context", name),)),
        Step(
            "nodes; those that are there already are left as they are",
            (("eksctl", "create", "nodegroup", "-f", file, "--install-neuron-plugin=false",
              "--install-nvidia-plugin=false"),),
        ),
        applied("TFJob and PyTorchJob", "-k", str(FOLDER / "operators"), wait=(up("kubeflow"),)),
        applied("MPIJob v2beta1", "-f", MPI_OPERATOR, wait=(up("mpi-operator"),)),
        applied("TrainJob", "-k", TRAINER, wait=(up("kubeflow-system"),)),
    ]  # fmt: skip
    if cluster.has("p", "g"):
        found.append(applied("NVIDIA's device plugin: nvidia.com/gpu", "-f", NVIDIA))
    if cluster.has("trn", "inf"):
        helm = ("--kube-context", name, "--namespace", "kube-system")
        found.append(Step(
            "Neuron's device plugin: aws.amazon.com/neuron",
            (("helm", "upgrade", "--install", "neuron", *NEURON, *helm, "--set", "npd.enabled=false", "--wait"),),
            (("helm", "uninstall", "neuron", *helm, "--wait"),),
        ))  # fmt: skip
    if any(group.get("efaEnabled") for group in cluster.groups):
        own = str(FOLDER / "devices" / "efa.yaml")
        made = yaml.safe_load((ROOT / own).read_text())["metadata"]
        other = ("delete", "daemonset", made["name"], "--namespace", made["namespace"], "--ignore-not-found")
        plugin = applied("EFA's device plugin, in place of eksctl's: vpc.amazonaws.com/efa", "-f", own)
        found.append(Step(plugin.why, ((*kubectl, *other), *plugin.do), plugin.undo))
    found += [
        applied("Volcano", "-f", VOLCANO, wait=(up("volcano-system"),)),
        applied("Volcano's queue", "-f", str(FOLDER / "queue.yaml")),
        applied("FSx's driver", "-k", FSX, wait=((*kubectl, "rollout", "status", "--namespace", "kube-system",
                "deployment/fsx-csi-controller", "--timeout=10m"),)),
        Step(
            "the nodes' subnet",
            (("aws", "ec2", "describe-subnets", *at, "--filters",
              f"Name=tag:alpha.eksctl.io/cluster-name,Values={name}", f"Name=availability-zone,Values={zone}",
              "Name=tag:kubernetes.io/role/internal-elb,Values=1",
              "--query", "Subnets[0].SubnetId", "--output", "text"),),
            keep="subnet",
        ),
        Step(
            "the cluster's security group",
            (("aws", "eks", "describe-cluster", "--name", name, *at, "--query",
              "cluster.resourcesVpcConfig.clusterSecurityGroupId", "--output", "text"),),
            keep="security_group",
        ),
        Step(
            "how a file system is made",
            ((*kubectl, "apply", "-f", "-"),),
            ((*kubectl, "delete", "storageclass", "lustre", "--ignore-not-found"),),
            fill=FOLDER / "storage" / "storage-class.yaml",
        ),
        Step(
            "the file system: 10 minutes; with the claim it goes, and all that is on it",
            ((*kubectl, "apply", "-f", str(FOLDER / "storage" / "claim.yaml")),
             (*kubectl, "wait", "--for=jsonpath={.status.phase}=Bound", "pvc/training-data", "--timeout=30m")),
            ((*kubectl, "delete", "-f", str(FOLDER / "storage" / "claim.yaml"), "--ignore-not-found"),
             (*kubectl, "wait", "--for=delete", "persistentvolumes", "--all", "--timeout=30m")),
        ),
        applied("etcd, where torchrun's agents meet", "-f", str(FOLDER / "etcd.yaml"), wait=(up("default"),)),
        Step(
            "jobs and pods, which hold the claim",
            undo=tuple((*kubectl, "delete", kind, "--all", "--namespace", "default") for kind in JOBS),
        ),
    ]  # fmt: skip
    return found


def shown(step: Step, cluster: Cluster, undo: bool = False) -> Iterator[str]:
    """The commands of `step` as one would type them."""
    for command in step.undo if undo else step.do:
        line = shlex.join(command)
        if step.keep:
            line = f"{step.keep}=$({line})"
        if step.fill and not undo:
            values = f"cluster={cluster.name} subnet=$subnet security_group=$security_group"
            line = f"{values} envsubst < {shlex.quote(str(step.fill))} | {line}"
        if step.unless and not undo:
            line = f"{shlex.join(step.unless)} || {line}"
        yield line
    if undo and step.remains:
        listing, deletion = (shlex.join(command) for command in step.remains)
        yield f"for each in $({listing}); do {deletion.replace(shlex.quote('$each'), '$each')}; done"
