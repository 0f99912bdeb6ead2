"""A cluster on EKS as its ClusterConfig describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes import check, rules
from workshop_utils.launchers.source import PACKAGE

ROOT = PACKAGE.parent
FOLDER = Path("jobs/clusters/eks")  # below ROOT, from where all commands run


@dataclass(frozen=True)
class Cluster:
    """A ClusterConfig, which has been checked, and its file, as seen from ROOT."""

    file: Path
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What it is called, and the kubectl context with it."""
        return str(self.config["metadata"]["name"])

    @property
    def region(self) -> str:
        """Where it is."""
        return str(self.config["metadata"]["region"])

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The managed node groups; each has an instanceType, a desiredCapacity and availabilityZones."""
        return list(self.config["managedNodeGroups"])

    def has(self, *families: str) -> bool:
        """Whether a node is of a family such as p4d."""
        return any(group["instanceType"].startswith(families) for group in self.groups)


def known() -> list[str]:
    """The clusters of this repository."""
    return sorted(path.stem for path in (ROOT / FOLDER / "clusters").glob("*.yaml"))


def load(name: str) -> Cluster:
    """The cluster called so, or that of a file.

    Raises:
        JobError: if there is none, its ClusterConfig is wrong, or says too little for a price.
    """
    file = FOLDER / "clusters" / f"{name}.yaml" if name in known() else Path(name).absolute()
    if not (ROOT / file).is_file():
        raise JobError(
            f"cluster is {name!r}; it must be one of {', '.join(known())}, or a ClusterConfig's file"
        )
    try:
        config = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise JobError(f"{file} is not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict) or config.get("kind") != "ClusterConfig":
        raise JobError(f"{file} must hold a ClusterConfig of eksctl.io/v1alpha5")
    problems = list(check.problems_of(config)) or list(rules.problems_of(config)) or _left_out(config)
    if problems:
        raise JobError("\n".join(f"{file}: {line}" for line in problems))
    return Cluster(file, config)


def _left_out(config: Mapping[str, Any]) -> list[str]:
    groups = config.get("managedNodeGroups")
    if not groups:
        return ["managedNodeGroups is missing; jobs need nodes"]
    return [
        f"managedNodeGroups[{index}].{field} is missing; the price and the way there need it"
        for index, group in enumerate(groups)
        for field in ("instanceType", "desiredCapacity", "availabilityZones")
        if not group.get(field)
    ]
