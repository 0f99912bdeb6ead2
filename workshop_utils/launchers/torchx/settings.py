"""The settings: scheduler, rendezvous, cluster. Nothing here talks to TorchX.

Settings(scheduler="kubernetes", queue="training", instance_type="trn1.32xlarge", processes_per_node=32)
Settings.load("place.yaml")
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from workshop_utils.jobs import JobError, StrategyName, TrainingJob
from workshop_utils.launchers.settings import PlaceSettings
from workshop_utils.strategies import strategy_of

STRATEGIES: tuple[StrategyName, ...] = ("torch_ddp", "single")
HERE_TOO = ("scheduler", "processes_per_node", "rendezvous", "rendezvous_endpoint", "max_restarts")
RANDOM_LETTERS = 14  # which TorchX adds to a name, at most: 64 bits in its alphabet
LONGEST_NAME = 63  # of a pod's host: a DNS-1035 label

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
InstanceType = Literal["trn1.2xlarge", "trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge"]


class Settings(PlaceSettings):
    """How and where TorchX runs jobs.

    Attributes:
        scheduler: `"local_cwd"`, processes of this machine, or `"kubernetes"`, a Volcano Job on a cluster.
        processes_per_node: how many workers a node has; each node is one torchrun, which starts them.
        rendezvous: how the nodes find each other: `"c10d"` at the first of them, `"etcd-v2"` (or the older `"etcd"`) at
            an etcd server, which outlives the first node.
        rendezvous_endpoint: `host:port` of that server.
        max_restarts: how often torchrun restarts all workers when one fails; the script must be able to go on from a
            checkpoint.
        queue: Volcano's queue.
        namespace: where the job is made.
        image: the image of every container, unless the job names one.
        instance_type: a Trainium instance for each node, whole, in place of the job's resources.
        service_account: the account whose rights the pods have.
        priority_class: the job's priority.
        node_selector: labels that a node must have.
        data_claim: a PersistentVolumeClaim that holds the data; without it the data travels in a ConfigMap, which
            holds 1 MiB at most.
        volumes: further PersistentVolumeClaims, by the path where they are mounted, such as a cache of compiled graphs.
        wrapper: a program in the image that runs torchrun, such as `neuron_parallel_compile`.
    """

    EXAMPLE: ClassVar[str] = "scheduler: kubernetes"

    scheduler: Literal["local_cwd", "kubernetes"] = "local_cwd"
    processes_per_node: int = Field(default=1, ge=1, strict=True)
    rendezvous: Literal["c10d", "etcd", "etcd-v2"] = "c10d"
    rendezvous_endpoint: str | None = None
    max_restarts: int = Field(default=0, ge=0, strict=True)
    queue: Name = "default"
    namespace: Name = "default"
    image: str = Field(default="workshop-pytorch:cpu", min_length=1)
    instance_type: InstanceType | None = None
    service_account: Name | None = None
    priority_class: Name | None = None
    node_selector: dict[str, str] = Field(default={})
    data_claim: Name | None = None
    volumes: dict[str, Name] = Field(default={})
    wrapper: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        endpoint = self.rendezvous_endpoint
        if self.rendezvous == "c10d" and endpoint is not None:
            raise ValueError(
                f"rendezvous_endpoint is {endpoint!r}; with rendezvous 'c10d' the first node is it: leave it out, or "
                "use rendezvous 'etcd-v2'"
            )
        if self.rendezvous != "c10d" and endpoint is None:
            raise ValueError(
                f"rendezvous_endpoint is missing; rendezvous {self.rendezvous!r} needs one, such as etcd-server:2379"
            )
        if endpoint is not None and not re.fullmatch(r"[\w.-]+:\d{1,5}", endpoint):
            raise ValueError(
                f"rendezvous_endpoint is {endpoint!r}; it must be host:port, such as etcd-server:2379"
            )
        useless = sorted(self.model_fields_set.difference(HERE_TOO))
        if self.scheduler == "local_cwd" and useless:
            raise ValueError(
                f"{useless[0]} is for scheduler 'kubernetes'; leave it out, or set scheduler: kubernetes"
            )
        for path in self.volumes:
            if not path.startswith("/") or path == "/":
                raise ValueError(f"volumes.{path} must be a path in the container, such as /cache")
        if len(set(self.volumes.values())) < len(self.volumes):
            raise ValueError("volumes names the same claim twice; mount it once, and use folders in it")
        return self

    def check(self, job: TrainingJob) -> None:
        """Raise JobError where TorchX, or the scheduler, cannot run `job` as these settings have it."""
        strategy_of(job)
        if job.strategy not in STRATEGIES:
            raise JobError(
                f"strategy is {job.strategy!r}; TorchX starts workers with torchrun, which suits "
                f"{' and '.join(map(repr, STRATEGIES))} alone: use another place, such as local"
            )
        if job.workers % self.processes_per_node:
            raise JobError(
                f"workers is {job.workers}; it must be a multiple of processes_per_node, {self.processes_per_node}"
            )
        last = f"-worker-{self.nodes(job) - 1}-0"
        room = LONGEST_NAME - RANDOM_LETTERS - 1 - len(last)
        if self.scheduler == "kubernetes" and len(job.name) > room:
            raise JobError(
                f"name is {job.name!r}; it may have at most {room} characters, since TorchX adds some to it, and "
                f"{last} to call the last pod"
            )

    def nodes(self, job: TrainingJob) -> int:
        """How many nodes `job` has."""
        return job.workers // self.processes_per_node
