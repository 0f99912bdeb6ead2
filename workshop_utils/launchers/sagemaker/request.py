"""The CreateTrainingJob request of a job: exactly what is sent, and where its parts come from."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.sagemaker import check, toolkit
from workshop_utils.launchers.sagemaker.hosts import Layout, layout, members_by_host
from workshop_utils.launchers.sagemaker.images import has_nvidia_gpu, image_for
from workshop_utils.launchers.sagemaker.settings import Settings
from workshop_utils.quantities import seconds_of
from workshop_utils.strategies import Addresses, strategy_of

TAG = {"Key": "made-by", "Value": "distributed-training-workshop"}  # by which the clean-up finds it
PREFIX = "workshop"  # of everything in the bucket
CHECKPOINTS = "/opt/ml/checkpoints"

# Where own drivers find things: SageMaker puts each channel into a folder of its name.
DRIVERS, CODE, DATA = "drivers", "code", "training"
ENTRY_POINT = "container.py"
MEMBERS_FILE = "members.json"
FIRST_PORT = 7000  # of the processes that own drivers start; within a job's security group any will do


@dataclass(frozen=True)
class Request:
    """What `launch` would send: the body, and for own drivers the members that each host would start."""

    body: dict[str, Any]
    members: dict[str, list[dict[str, Any]]] | None = None

    @property
    def name(self) -> str:
        """The training job's name."""
        return str(self.body["TrainingJobName"])

    def __str__(self) -> str:
        text = json.dumps(self.body, indent=2)
        if self.members is None:
            return text
        shown = {
            host: [_without_secret(member) for member in listed] for host, listed in self.members.items()
        }
        return f"{text}\n\n# {DRIVERS}/{MEMBERS_FILE}\n{json.dumps(shown, indent=2)}"

    __repr__ = __str__


def build(job: TrainingJob, settings: Settings) -> Request:
    """The request for `job`, checked.

    Raises:
        JobError: for what SageMaker would refuse, or would take and then not do; one line for each thing.
    """
    plan = layout(job, settings)
    if job.resources.gpu and not has_nvidia_gpu(settings.instance_type):
        raise JobError(
            f"resources.gpu is {job.resources.gpu}, and instance_type {settings.instance_type} has no NVIDIA GPU; take "
            "one such as ml.g5.xlarge"
        )
    name = job_name(job)
    body: dict[str, Any] = {
        "TrainingJobName": name,
        "AlgorithmSpecification": {
            "TrainingImage": image_for(job, settings.region_name, settings.instance_type),
            "TrainingInputMode": settings.input_mode,
        },
        "RoleArn": settings.role,
        "InputDataConfig": [channel(DATA, data_uri(job, settings), settings.input_mode)],
        "OutputDataConfig": {"S3OutputPath": f"s3://{settings.bucket_name}/{PREFIX}/models"},
        "ResourceConfig": {
            "InstanceType": settings.instance_type,
            "InstanceCount": len(plan.hosts),
            "VolumeSizeInGB": settings.volume_gb,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": max_runtime_seconds(job, settings)},
        "Environment": {"PYTHONUNBUFFERED": "1", **job.environment},
        "Tags": [TAG, *({"Key": key, "Value": value} for key, value in settings.tags.items())],
    }
    members = None
    if settings.mode == "toolkit":
        source = f"{source_prefix(settings, name)}/sourcedir.tar.gz"
        body["HyperParameters"] = toolkit.hyperparameters(job, settings, plan, name, source)
    else:
        members = _drive(body, job, settings, plan)
    _add_options(body, settings, name)
    check.body(body)
    check.rules(body)
    return Request(body, members)


def job_name(job: TrainingJob) -> str:
    """A name that no other job of the account has, of at most 63 characters."""
    return f"{job.name[:42].rstrip('-')}-{time.strftime('%Y%m%d%H%M%S')}-{secrets.token_hex(2)}"


def max_runtime_seconds(job: TrainingJob, settings: Settings) -> int:
    """After how long the service ends the job; at least one second, since it counts whole ones."""
    return max(1, round(seconds_of(settings.max_runtime or job.timeout)))


def channel(name: str, uri: str, mode: str) -> dict[str, Any]:
    """A channel that gives every host all that lies below `uri`; how to read shards is the strategies' own matter."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}


def source_prefix(settings: Settings, name: str) -> str:
    """Below what the source of the training job `name` lies in the bucket."""
    return f"s3://{settings.bucket_name}/{PREFIX}/source/{name}"


def data_uri(job: TrainingJob, settings: Settings) -> str:
    """Where the job's data lies: in place if it is on S3, and otherwise below the workshop's own prefix."""
    if job.data.startswith("s3://"):
        return job.data
    label = job.data if job.data in ("digits", "mnist") else f"folder-{job.name}"
    return f"s3://{settings.bucket_name}/{PREFIX}/data/{label}/"


def _drive(
    body: dict[str, Any], job: TrainingJob, settings: Settings, plan: Layout
) -> dict[str, list[dict[str, Any]]]:
    """Let a program of the workshop be the container's entry point, and say which members each host starts."""
    prefix = source_prefix(settings, body["TrainingJobName"])
    body["AlgorithmSpecification"] |= {
        "ContainerEntrypoint": ["python3"],
        "ContainerArguments": [f"/opt/ml/input/data/{DRIVERS}/{ENTRY_POINT}"],
    }
    body["InputDataConfig"] += [
        channel(CODE, f"{prefix}/{CODE}/", "File"),
        channel(DRIVERS, f"{prefix}/{DRIVERS}/", "File"),
    ]
    # Only values that Python's JSON gives back as they were; the script's name is the entry point's to know.
    body["HyperParameters"] = toolkit.encoded({**job.arguments, "sagemaker_program": job.script})
    return members(job, plan)


def members(job: TrainingJob, plan: Layout) -> dict[str, list[dict[str, Any]]]:
    """What each host starts, with the variables by which it finds the others: the hosts' names are known beforehand.

    `{interface}` in a value stands for the network interface, which only the host itself knows.
    """
    strategy = strategy_of(job)
    placed = members_by_host(job, plan)
    where = {member.name: host for host, listed in placed.items() for member in listed}
    everyone = strategy.members(job)
    addresses = Addresses(
        {
            member.name: f"{where[member.name]}:{FIRST_PORT + number}"
            for number, member in enumerate(everyone)
            if member.listens
        },
        interface="{interface}",
        secret=secrets.token_hex(16),
    )
    described: dict[str, list[dict[str, Any]]] = {}
    for host, listed in placed.items():
        described[host] = []
        trains = [member for member in listed if member.rank is not None]
        for member in listed:
            environment: dict[str, str] = {}
            if member.role != "rendezvous":
                environment = strategy.environment(job, member, addresses)
                local = trains.index(member) if member in trains else 0
                environment = _on_its_host(environment, local, len(trains), plan, host)
            described[host].append(
                {
                    "name": member.name,
                    "role": member.role,
                    "awaited": member.awaited,
                    "leaves": member.leaves,
                    "address": addresses.of.get(member.name, ""),
                    "environment": environment,
                }
            )
    return described


def _on_its_host(
    environment: dict[str, str], local_rank: int, here: int, plan: Layout, host: str
) -> dict[str, str]:
    """`environment` with what a strategy cannot know: which of the members share a host."""
    local = {
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(here),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(here),
        "HOROVOD_CROSS_RANK": str(plan.hosts.index(host)),
        "HOROVOD_CROSS_SIZE": str(len(plan.hosts)),
        "HOROVOD_HOSTNAME": host,
    }
    return {name: local.get(name, value) for name, value in environment.items()}


def _add_options(body: dict[str, Any], settings: Settings, name: str) -> None:
    if settings.subnets:
        body["VpcConfig"] = {
            "Subnets": list(settings.subnets),
            "SecurityGroupIds": list(settings.security_groups),
        }
    if settings.encrypt_traffic:
        body["EnableInterContainerTrafficEncryption"] = True
    if settings.retries:
        body["RetryStrategy"] = {"MaximumRetryAttempts": settings.retries}
    if settings.keep_alive:
        body["ResourceConfig"]["KeepAlivePeriodInSeconds"] = round(seconds_of(settings.keep_alive))
    if settings.spot:
        limit = body["StoppingCondition"]["MaxRuntimeInSeconds"]
        body["EnableManagedSpotTraining"] = True
        wait = seconds_of(settings.max_wait) if settings.max_wait else 2 * limit
        body["StoppingCondition"]["MaxWaitTimeInSeconds"] = round(wait)
        # Of the job, not of this launch: the next one goes on where a spot instance was taken away.
        stem = name.rsplit("-", 2)[0]
        body["CheckpointConfig"] = {
            "S3Uri": f"s3://{settings.bucket_name}/{PREFIX}/checkpoints/{stem}",
            "LocalPath": CHECKPOINTS,
        }


def _without_secret(member: Mapping[str, Any]) -> dict[str, Any]:
    hidden = {name: "****" if "SECRET" in name else value for name, value in member["environment"].items()}
    return {**member, "environment": hidden}
