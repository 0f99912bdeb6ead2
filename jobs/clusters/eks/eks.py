"""A cluster on EKS for the jobs of the lessons: what it costs, made, and taken away again.

    python jobs/clusters/eks/eks.py price trainium
    python jobs/clusters/eks/eks.py create trainium --dry-run       # prints every command, sends nothing
    python jobs/clusters/eks/eks.py create trainium                 # says the price, asks, and runs them
    python jobs/clusters/eks/eks.py delete-all trainium

The commands stand in jobs/clusters/eks/create.sh and delete-all.sh, the clusters in clusters/ beside them.

Prices are dollars, on demand, in us-east-1 and us-west-2, as they were known in 2025: written down without access to
AWS's price pages, and not checked against them since. Those of accelerators are the catalogue's, which has a date of
its own.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes import check
from workshop_utils.scaling import catalogue

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path("jobs/clusters/eks")  # below ROOT, from where the commands run
AS_OF = "2025"
NODES = {"m5.large": 0.096, "m5.xlarge": 0.192, "m5.2xlarge": 0.384, "c5.xlarge": 0.17, "g5.8xlarge": 2.448}
CONTROL_PLANE, NAT_GATEWAY = 0.10, 0.045  # an hour; the gateway's traffic costs as much again for each GB
DISK, DISK_GB = 0.08, 80  # a GB and month of gp3; the size of a node's disk, where nothing else is said
# A GB and month of PERSISTENT_1 with 200 MB/s for each TiB; the size in storage/claim.yaml.
LUSTRE, LUSTRE_GB = 0.29, 1200
HOURS_A_MONTH = 730
QUESTIONS = {
    "create": "Make {}, and pay for it until delete-all?",
    "delete-all": "Delete {}, with everybody's jobs and all data of its file system, for good?",
}
# kubectl runs git for a kustomization that is elsewhere.
PROGRAMS = {"create": ("aws", "eksctl", "kubectl", "helm", "git"), "delete-all": ("aws", "eksctl", "kubectl")}


def load(name: str) -> dict[str, Any]:
    """The ClusterConfig in the file of that name. Raises JobError if there is none, or a field is wrong."""
    files = {path.stem: path for path in sorted((ROOT / FOLDER / "clusters").glob("*.yaml"))}
    if name not in files:
        raise JobError(f"cluster is {name!r}; {FOLDER}/clusters has {', '.join(files)}, and room for yours")
    try:
        config = yaml.safe_load(files[name].read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise JobError(f"{files[name]} is not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise JobError(f"{files[name]} must hold a ClusterConfig of eksctl.io/v1alpha5")
    check.require(config)
    for index, group in enumerate(config.get("managedNodeGroups") or [{}]):
        for field in ("availabilityZones", "desiredCapacity", "instanceType"):
            if group.get(field) in (None, "", []):
                raise JobError(
                    f"managedNodeGroups[{index}].{field} is missing; the price and the commands need it"
                )
        sizes = [group[size] for size in ("minSize", "desiredCapacity", "maxSize") if size in group]
        if sizes != sorted(sizes):
            raise JobError(
                f"managedNodeGroups[{index}]: minSize, desiredCapacity and maxSize must be in that order, but are "
                f"{sizes}"
            )
    return dict(config)


def bill(config: dict[str, Any]) -> str:
    """What each part of a cluster costs an hour, as a table, and how far that can be relied on."""
    parts: dict[str, float | None] = {
        "control plane": CONTROL_PLANE,
        "NAT gateway, without traffic": NAT_GATEWAY,
    }
    for group in config["managedNodeGroups"]:
        count, kind, size = group["desiredCapacity"], group["instanceType"], group.get("volumeSize", DISK_GB)
        accelerated = catalogue.instances().get(kind)
        one = accelerated.dollars_an_hour if accelerated else NODES.get(kind)
        parts[f"{count} × {kind} ({group['name']})"] = None if one is None else count * one
        parts[f"{count} × {size} GB of disk ({group['name']})"] = count * size * DISK / HOURS_A_MONTH
    parts[f"{LUSTRE_GB} GB of FSx for Lustre"] = LUSTRE_GB * LUSTRE / HOURS_A_MONTH
    total = sum(price or 0 for price in parts.values())
    least = "at least " if None in parts.values() else ""
    return "\n".join([
        f"{config['metadata']['name']} in {config['metadata']['region']}, dollars an hour while it is there:",
        *(f"  {'not known' if one is None else f'{one:9.3f}'}  {part}" for part, one in parts.items()),
        f"  {total:9.3f}  {least}in all, {least}{24 * total:.0f} a day",
        f"Prices as known in {AS_OF} (of accelerators: {catalogue.AS_OF}), and not checked since.",
        "See https://aws.amazon.com/eks/pricing/ and the pages that it leads to; AWS's invoice is what counts.",
    ])  # fmt: skip


def script(action: str, name: str, config: dict[str, Any]) -> str:
    """The commands of `action`, behind what they have to know of the cluster."""
    groups = config["managedNodeGroups"]
    known = {
        "cluster": config["metadata"]["name"],
        "region": config["metadata"]["region"],
        "file": f"{FOLDER}/clusters/{name}.yaml",
        "instances": " ".join(f"{each['instanceType']}/{each['availabilityZones'][0]}" for each in groups),
    }
    values = "".join(f"{name}={shlex.quote(value)}\n" for name, value in known.items())
    return values + (ROOT / FOLDER / f"{action}.sh").read_text(encoding="utf-8")


def main(
    action: Literal["price", "create", "delete-all"],
    name: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="cpu, gpu, trainium, or another file in clusters/.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print every command; send nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Say what a cluster on EKS costs, make it, or take it away with all that is in it."""
    try:
        config = load(name)
    except JobError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None
    if action == "price":
        typer.echo(bill(config))
        return
    commands = script(action, name, config)
    if action == "create":
        typer.echo("".join(f"# {line}\n" for line in bill(config).splitlines()))
    if dry_run:
        typer.echo(commands)
        return
    if missing := ", ".join(name for name in PROGRAMS[action] if shutil.which(name) is None):
        typer.echo(
            f"not installed: {missing}; aws.amazon.com/cli, eksctl.io, kubernetes.io, helm.sh and git-scm.com say how.",
            err=True,
        )
        raise typer.Exit(2)
    if not yes:
        cluster = f"{config['metadata']['name']} in {config['metadata']['region']}"
        typer.confirm(QUESTIONS[action].format(cluster), abort=True)
    try:
        code = subprocess.run(["bash", "-c", commands], cwd=ROOT, check=False).returncode
    except KeyboardInterrupt:
        code = 130
    if code:
        typer.echo("What is there stays, and costs. Run it again to go on, or run delete-all.", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
