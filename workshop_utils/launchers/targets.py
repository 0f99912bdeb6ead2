"""The targets that a command line can name, and the launcher for each.

    launcher_for("sagemaker", config="place.yaml").launch(job)

To add a target, write a launcher with `render` and `launch` in a file of its own, and add it to `_LAUNCHERS`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.network import Network
from workshop_utils.runs import Run

# Module and class, imported when asked for: boto3 and the cluster's client take longer than a local launch may take.
_LAUNCHERS = {
    "local": ("local", "Local"),
    "slurm": ("slurm", "Slurm"),
    "sagemaker": ("sagemaker", "SageMaker"),
    "sagemaker-local": ("sagemaker", "EmulatedSageMaker"),
    "kubernetes": ("kubernetes", "Kubernetes"),
    "kubernetes-local": ("kubernetes", "EmulatedKubernetes"),
}
TARGETS = tuple(_LAUNCHERS)


class Launcher(Protocol):
    """What all targets have in common."""

    def render(self, job: TrainingJob) -> Any:
        """The exact request that `launch` would send, which prints as such. Sends nothing."""

    def launch(self, job: TrainingJob) -> Run:
        """Start the job."""


def launcher_for(
    target: str,
    config: Path | None = None,
    network: Network | None = None,
    emulated_device: str | None = None,
) -> Launcher:
    """The launcher for `target`, configured by the YAML file `config`.

    Raises:
        JobError: if there is no such target, or it has no use for the other arguments.
    """
    if target not in TARGETS:
        raise JobError(f"--on is {target!r}; it must be one of {', '.join(TARGETS)}")
    module, name = _LAUNCHERS[target]
    launcher: Any = getattr(importlib.import_module(f"workshop_utils.launchers.{module}"), name)
    if target == "local":
        if config is not None:
            raise JobError("--config is for other targets; a local run has none")
        local: Launcher = launcher(network=network, emulated_device=emulated_device)
        return local
    if network is not None:
        raise JobError(f"--network is for local runs; {target} has a network of its own")
    if emulated_device is not None:
        raise JobError(f"--emulated-device is for local runs, not for {target}")
    if config is None and target == "sagemaker":
        raise JobError("--config is missing; name a place.yaml with a role, as in jobs/clusters/sagemaker/")
    remote: Launcher = launcher.load(config) if config is not None else launcher()
    return remote
