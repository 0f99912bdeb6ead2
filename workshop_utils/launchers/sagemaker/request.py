"""What a launch sends, from a job and what is said of the place: its hosts, its name, its parts in the bucket."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workshop_utils.jobs import JobError, StrategyName, TrainingJob
from workshop_utils.launchers.sagemaker import check, toolkit
from workshop_utils.launchers.sagemaker.hosts import host_names
from workshop_utils.launchers.sagemaker.images import has_nvidia_gpu
from workshop_utils.launchers.sagemaker.settings import Settings
from workshop_utils.quantities import seconds_of
from workshop_utils.strategies import strategy_of

TAG = {"Key": "made-by", "Value": "distributed-training-workshop"}  # by which the clean-up finds it
PREFIX = "workshop"  # of everything in the bucket
MANY_A_HOST: tuple[StrategyName, ...] = ("horovod", "mpi", "torch_ddp")  # to the toolkit

Members = Mapping[str, list[dict[str, Any]]]  # the processes that each host starts, see `members`


@dataclass(frozen=True)
class Plan:
    """A training job that may be launched, before anybody makes a request of it.

    `secret` is the run's own: whoever does not know it cannot join.
    """

    job: TrainingJob
    settings: Settings
    hosts: tuple[str, ...]
    name: str
    secret: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def hyperparameters(self) -> dict[str, str]:
        """The script's arguments, and what the toolkit is told."""
        return toolkit.hyperparameters(self)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the request has for all hosts."""
        return {"PYTHONUNBUFFERED": "1", **self.job.environment}

    @property
    def limit_seconds(self) -> int:
        """After how long the service ends the job; at least one second, since it counts whole ones."""
        return max(1, round(seconds_of(self.settings.max_runtime or self.job.timeout)))

    @property
    def source_uri(self) -> str:
        """Where the source lies in the bucket."""
        return f"s3://{self.settings.bucket_name}/{PREFIX}/source/{self.name}/sourcedir.tar.gz"

    @property
    def data_uri(self) -> str:
        """Where the data lies: in place if it is on S3, and otherwise below the workshop's own prefix."""
        data = self.job.data
        if data.startswith("s3://"):
            return data
        label = data if data in ("digits", "mnist") else f"folder-{self.job.name}"
        return f"s3://{self.settings.bucket_name}/{PREFIX}/data/{label}/"

    @property
    def checkpoint_uri(self) -> str:
        """Where checkpoints lie: those of the job, not of this launch, so that the next one finds them."""
        return f"s3://{self.settings.bucket_name}/{PREFIX}/checkpoints/{self.name.rsplit('-', 2)[0]}"


@dataclass(frozen=True)
class Request:
    """A CreateTrainingJob request as it goes out, and with `mode: drivers` what each host would start."""

    plan: Plan
    body: dict[str, Any]
    members: Members | None = None

    def __str__(self) -> str:
        text = json.dumps(self.body, indent=2)
        if self.members is not None:
            text += f"\n\n# drivers/members.json\n{json.dumps(self.members, indent=2)}"
        return text.replace(self.plan.secret, "****")

    __repr__ = __str__


def plan(job: TrainingJob, settings: Settings) -> Plan:
    """The hosts that `job` takes, under a name that no other job of the account has.

    Raises:
        JobError: if the job cannot be laid out so; the message says what would be right.
    """
    check.instance_type(settings.instance_type)
    if job.resources.gpu and not has_nvidia_gpu(settings.instance_type):
        raise JobError(
            f"resources.gpu is {job.resources.gpu}, and instance_type {settings.instance_type} has no NVIDIA GPU; take "
            "one such as ml.g5.xlarge"
        )
    per_host = settings.processes_per_host
    _check_strategy(job, per_host, settings.mode == "toolkit")
    if (
        job.strategy == "parameter_server"
    ):  # a host for the chief, which does not train, and one for each worker
        hosts = job.workers + 1
    elif job.workers % per_host:
        raise JobError(
            f"workers is {job.workers} and processes_per_host {per_host}; the first must be a multiple of the second"
        )
    else:
        hosts = job.workers // per_host
    name = f"{job.name[:42].rstrip('-')}-{time.strftime('%Y%m%d%H%M%S')}-{secrets.token_hex(2)}"
    return Plan(job, settings, host_names(hosts), name)


def _check_strategy(job: TrainingJob, per_host: int, by_toolkit: bool) -> None:
    """Raise JobError for what the toolkit, or the workshop's driver, does not start."""
    strategy = strategy_of(job)
    if by_toolkit and job.strategy not in toolkit.SWITCHES:
        raise JobError(
            f"strategy is {job.strategy!r}; the toolkit in SageMaker's images does not know it: set mode: drivers"
        )
    if job.strategy == "mpi" and not by_toolkit:
        raise JobError(
            "strategy is 'mpi'; mpirun reaches the other hosts through the toolkit: set mode: toolkit"
        )
    if not by_toolkit and any(spec.starts for spec in strategy.plan(job)):
        raise JobError(
            f"strategy is {job.strategy!r}; its driver starts workers on one machine alone: run it locally"
        )
    one_each = job.strategy == "parameter_server" or (by_toolkit and job.strategy not in MANY_A_HOST)
    if per_host > 1 and one_each:
        starter = "the toolkit" if by_toolkit else "the driver"
        raise JobError(
            f"processes_per_host is {per_host}; with strategy {job.strategy!r} {starter} starts one on each host"
        )
    hosts = job.workers + 1
    if by_toolkit and job.strategy == "parameter_server" and job.parameter_servers not in (1, hosts):
        raise JobError(
            f"parameter_servers is {job.parameter_servers}; the toolkit runs one on each of the {hosts} hosts: leave "
            "it out, or set mode: drivers"
        )
