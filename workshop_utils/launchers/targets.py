"""The places that a command line can name, and the launcher for each.

    place("sagemaker", config="place.yaml")

`sagemaker-stand-in` emulates the instances of a training job, `kubernetes-stand-in` the pods of the manifest, by
processes of this machine. `torchx` is either, as its place.yaml has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.network import Network
from workshop_utils.runs import Run

PLACES = ("local", "sagemaker", "sagemaker-stand-in", "kubernetes", "kubernetes-stand-in", "torchx", "spark")


class Launcher(Protocol):
    """What all places have in common."""

    def render(self, job: TrainingJob) -> Any:
        """The exact request that `launch` would send, which prints as such. Sends nothing."""

    def launch(self, job: TrainingJob) -> Run:
        """Start the job."""


@runtime_checkable
class ChecksOnServer(Launcher, Protocol):
    """A place whose server can say what it would make of a job, and make nothing."""

    def dry_run(self, job: TrainingJob) -> Any:
        """The server's answer to what `launch` would send, which prints as such."""


def place(
    name: str,
    config: Path | None = None,
    network: Network | None = None,
    output: Path | None = None,
) -> Launcher:
    """The launcher for the place called so.

    Raises:
        JobError: if there is no such place, or it has no use for what was given.
    """
    if name not in PLACES:
        raise JobError(f"--on is {name!r}; it must be one of {', '.join(PLACES)}")
    if name == "local":
        if config is not None:
            raise JobError("--config is for other places; a local run has none")
        from workshop_utils.launchers.local import Local

        return Local(network=network, output=output)
    if network is not None:
        raise JobError(f"--network is for local runs; {name} has a network of its own")
    if name == "spark":
        from workshop_utils.launchers.spark import Spark

        return Spark.load(config, output) if config is not None else Spark(output=output)
    if name.startswith("kubernetes"):
        if output is not None:
            raise JobError(f"--output is for local runs; on {name} the model goes with its pod")
        return _kubernetes(name, config)
    if name == "torchx":
        if output is not None:
            raise JobError(f"--output is for local runs; on {name} the model goes with its node")
        from workshop_utils.launchers.torchx import TorchX

        return TorchX.load(config) if config is not None else TorchX()
    if output is not None:
        raise JobError(f"--output is for local runs; on {name} the model is stored in the bucket")
    if config is None:
        raise JobError(
            f"--config is missing; {name} needs a place.yaml with a role, as in jobs/clusters/sagemaker/"
        )
    return _sagemaker(name, config)


def _kubernetes(name: str, config: Path | None) -> Launcher:
    # Here, since the cluster's client takes longer to import than a local launch may take.
    from workshop_utils.launchers.kubernetes import Kubernetes, StandIn

    kind = Kubernetes if name == "kubernetes" else StandIn
    return kind.load(config) if config is not None else kind()


def _sagemaker(name: str, config: Path) -> Launcher:
    # Here, since boto3 takes longer to import than a local launch may take.
    from workshop_utils.launchers.sagemaker import EmulatedSageMaker, SageMaker

    return (SageMaker if name == "sagemaker" else EmulatedSageMaker).load(config)
