"""What a job becomes on SageMaker: its hosts, its name, its image, its addresses on S3, and what each host starts."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob, imports
from workshop_utils.jobs.quantities import seconds_of
from workshop_utils.launchers.sagemaker import toolkit
from workshop_utils.launchers.sagemaker.settings import SageMakerSettings
from workshop_utils.strategies import Addresses, strategy_of

PREFIX = "workshop"  # of everything in the bucket
FIRST_PORT = 7000  # of the processes that listen; within a job's security group any will do
STORED_DATA = ("digits", "mnist")  # every job finds the same there
HERE = Path(__file__).parent
DRIVERS = (HERE / "driver.py", HERE.parent / "local" / "horovod_rendezvous.py")  # the first starts the other

# AWS's images, of the workshop's own versions; all have Open MPI, mpi4py and the toolkit in them. Horovod was in those
# for TensorFlow up to 2.12, which has Keras 2, and for PyTorch on GPUs up to 1.13, and is in none that is still built.
# Sources: the SDK's image_uris; aws/deep-learning-containers, docs/src/data and docker/, August 2026.
TENSORFLOW = {"framework": "tensorflow", "version": "2.21", "py_version": "py312"}
PYTORCH = {"framework": "pytorch-amzn2023", "version": "2.13"}
LAST_WITH_HOROVOD = {"tensorflow": (2, 12), "pytorch": (1, 13)}
_OF_AWS = re.compile(r"(\d{12})\.dkr\.ecr\.([^.]+)\.[^/]+/(tensorflow|pytorch)(?:-training)?:(\d+)\.(\d+)")
# How long hosts may take to come together, as the toolkit's own waiting goes (mpi.py: an hour for MPI's workers).
JOIN_SECONDS = 1800

# How many GPUs an instance of these families has, by its size. Source: AWS, "Amazon EC2 accelerated computing".
FAMILIES_WITH_GPUS = re.compile(r"ml\.(p[3-6]|g4dn|gr?[56])(?!g\.)[\w-]*\.(\w+)")
GPUS = {
    "p": {"2xlarge": 1, "4xlarge": 1, "8xlarge": 4, "16xlarge": 8, "24xlarge": 8, "48xlarge": 8},
    "g": {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1}
    | {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
}

Members = Mapping[str, list[dict[str, Any]]]  # the processes that each host starts, by host


@dataclass(frozen=True)
class Submission:
    """A job on its hosts, under a name that no other job of the account has.

    `secret` is the run's own; a process that does not know it cannot join.
    """

    job: TrainingJob
    settings: SageMakerSettings
    hosts: tuple[str, ...]
    name: str
    secret: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def environment(self) -> dict[str, str]:
        """The variables that all hosts get."""
        waiting = {"WORKSHOP_JOIN_SECONDS": str(JOIN_SECONDS)}
        if self.job.strategy == "horovod":
            waiting["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(JOIN_SECONDS)
        module = toolkit.MODULES.get(toolkit.SWITCHES.get(self.job.strategy) or "")
        # AWS's images have set it already, to the same; in others, without it, the toolkit starts plain scripts.
        starter = {toolkit.STARTER: module} if module and self.settings.mode == "toolkit" else {}
        return {"PYTHONUNBUFFERED": "1", **waiting, **self.job.environment, **starter}

    @property
    def limit_seconds(self) -> int:
        """When the service ends the job; at least one second, since it counts whole ones."""
        return max(1, round(seconds_of(self.settings.max_runtime or self.job.timeout)))

    @property
    def source_uri(self) -> str:
        """Where the source is in the bucket."""
        return f"{self._bucket_uri}/source/{self.name}/sourcedir.tar.gz"

    @property
    def data_uri(self) -> str:
        """Where the data is: in its own place if that is on S3, and otherwise in the bucket."""
        data = self.job.data or ""
        label = data if data in STORED_DATA else f"folder-{self.job.name}"
        return data if data.startswith("s3://") else f"{self._bucket_uri}/data/{label}/"

    @property
    def output_uri(self) -> str:
        """Below which address the model is stored. Raises JobError if the job's outputs are not on S3."""
        return self.job.storage("outputs", "s3") or f"{self._bucket_uri}/models"

    @property
    def checkpoint_uri(self) -> str | None:
        """Where SageMaker keeps the checkpoints; None if it keeps none.

        They are this launch's own, unless the job says where: SageMaker's restart of an interrupted job keeps the name.

        Raises:
            JobError: if the job's checkpoints are not on S3.
        """
        own = f"{self._bucket_uri}/checkpoints/{self.name}" if self.settings.spot else None
        return self.job.storage("checkpoints", "s3") or own

    @property
    def _bucket_uri(self) -> str:
        return f"s3://{self.settings.bucket_name}/{PREFIX}"


@dataclass(frozen=True)
class Request:
    """A CreateTrainingJob request, exactly as it is sent.

    Attributes:
        members: with `mode: drivers`, what each host starts.
        uploads: files that ModelTrainer stores for the job, by their keys in the bucket.
    """

    submission: Submission
    body: dict[str, Any]
    members: Members | None
    uploads: Mapping[str, bytes]

    def __str__(self) -> str:
        text = json.dumps(self.body, indent=2)
        if self.members is not None:
            text += f"\n\n# drivers/members.json\n{json.dumps(self.members, indent=2)}"
        return text.replace(self.submission.secret, "****")

    __repr__ = __str__


def submission_of(job: TrainingJob, settings: SageMakerSettings) -> Submission:
    """The hosts that `job` takes, and a name for it.

    Raises:
        JobError: if SageMaker's instances cannot run it so; the message says what would be right.
    """
    _check_gpus(job, settings.instance_type)
    _check_strategy(job, settings.mode == "toolkit")
    count = job.nodes or job.workers
    if job.strategy == "parameter_server":
        count += 1  # the chief, which does not train, has a host of its own
    name = f"{job.name[:42].rstrip('-')}-{time.strftime('%Y%m%d%H%M%S')}-{secrets.token_hex(2)}"
    return Submission(job, settings, toolkit.host_names(count), name)


def _check_gpus(job: TrainingJob, instance_type: str) -> None:
    """Raise JobError if the instances have too few GPUs for the job, or GPUs that it would leave idle."""
    each, per_host = job.resources.gpu, job.processes_per_node or 1
    if not re.match(r"ml\.(p|gr?)\d", instance_type):
        if each:
            lacking = f"instance_type {instance_type} has no NVIDIA GPU; take one such as ml.g5.xlarge"
            raise JobError(f"resources.gpu is {each}, and {lacking}")
        return
    if reason := imports.why_no_gpu(job):
        idle = f"script {job.script!r} cannot use one: {reason}; take one such as ml.c5.xlarge"
        raise JobError(f"instance_type is {instance_type}, whose GPUs you would pay for, and {idle}")
    family = FAMILIES_WITH_GPUS.fullmatch(instance_type)
    count = GPUS[family[1][0]].get(family[2]) if family else None
    needed = max(1, each) * per_host  # a script that can use a GPU takes one, even if the job asks for none
    if count not in (None, needed):
        idle = f", {count - needed} of them idle" if count > needed else ""
        raise JobError(
            f"resources.gpu is {each}; {per_host} process(es) a node need {needed} GPU(s), and instance_type "
            f"{instance_type} has {count}{idle}: set processes_per_node to {count}, or to 1 and resources.gpu to "
            f"{count} if one process uses several, or take another instance_type"
        )


def _check_strategy(job: TrainingJob, by_toolkit: bool) -> None:
    """Raise JobError for what the toolkit, or the workshop's driver, does not start."""
    per_host, has_servers = job.processes_per_node or 1, job.strategy == "parameter_server"
    given, known = f"strategy is {job.strategy!r}", job.strategy in toolkit.SWITCHES
    strategy = strategy_of(job)
    if by_toolkit and not known:
        raise JobError(f"{given}; the toolkit in SageMaker's images does not know it: set mode: drivers")
    if not by_toolkit and any(spec.children for spec in strategy.plan(job)):
        advice = "set mode: toolkit" if known else "run it locally"
        raise JobError(f"{given}; a process that starts the others cannot reach other hosts: {advice}")
    one_each = by_toolkit and toolkit.SWITCHES[job.strategy] not in toolkit.SEVERAL
    if per_host > 1 and (has_servers or one_each):
        starter = "the toolkit" if by_toolkit else "the driver"
        each = f"with strategy {job.strategy!r} {starter} starts one on each host"
        raise JobError(f"processes_per_node is {per_host}; {each}")
    hosts = job.workers + 1
    if by_toolkit and has_servers and job.parameter_servers not in (1, hosts):
        advice = f"the toolkit runs one on each of the {hosts} hosts: leave it out, or set mode: drivers"
        raise JobError(f"parameter_servers is {job.parameter_servers}; {advice}")


# What each host starts


def addresses(submission: Submission) -> dict[str, str]:
    """host:port of what listens, by its name: hosts have names before there are any hosts."""
    if submission.settings.mode == "toolkit":
        listed = toolkit.cluster(submission).values()
        return {address: address for addresses in listed for address in addresses}
    hosts, at = submission.hosts, {}
    for number, spec in enumerate(strategy_of(submission.job).plan(submission.job, Addresses(nodes=hosts))):
        if spec.listens:
            at[spec.name] = f"{hosts[spec.node]}:{FIRST_PORT + number}"
    return at


def members(submission: Submission, at: Mapping[str, str], bind: str = "", **words: str) -> Members:
    """What each host starts, for `driver` to read there, if what listens is `at` these addresses.

    A rendezvous may `bind` to another one. `words` replace words in braces, as in `ProcessSpec.filled`; {python},
    {drivers} (the driver's folder) and {interface} are for the driver to replace.
    """
    job, hosts = submission.job, submission.hosts
    if submission.settings.mode == "toolkit":
        specs = toolkit.plan(submission, at)
    else:
        meeting = Addresses(at, hosts, interface="{interface}", secret=submission.secret, bind=bind)
        specs = strategy_of(job).plan(job, meeting)
    specs = [spec.filled(script=job.script, programs="{drivers}", **words) for spec in specs]
    started: dict[str, list[dict[str, Any]]] = {}
    for node, host in enumerate(hosts):
        placed = [spec for spec in specs if spec.node == node]
        # A host without a process to wait for has servers and workers, which leave when their chief does.
        nothing_required = not any(spec.required for spec in placed)
        started[host] = [
            {
                "name": spec.name,
                "command": list(spec.argv),
                "environment": dict(spec.environment),
                "required": spec.required or (nothing_required and spec.leaves),
            }
            for spec in placed
        ]
    return started


# Images


def image_for(job: TrainingJob, settings: SageMakerSettings) -> str:
    """The job's own image, or else AWS's for what its script imports and the processor of `instance_type`.

    Raises:
        JobError: if AWS has no such image, or the job's own is one of AWS's and lacks Horovod.
    """
    packages, region = imports.packages(imports.imported(job.script_path)), settings.region_name
    needs_horovod = "horovod" in packages or job.strategy == "horovod"
    if job.image is not None:
        if needs_horovod and _lacks_horovod(job.image):
            raise JobError(
                f"image is {job.image!r}, which has no Horovod in it: AWS's last ones with it have TensorFlow 2.12, or "
                "PyTorch 1.13 for GPUs. Use one of them, or build jobs/images/ and name your own image"
            )
        return job.image
    if needs_horovod:
        raise JobError(
            "image is missing: no image of AWS has the Horovod that this script imports. Build jobs/images/ and "
            f"name yours, such as 123456789012.dkr.ecr.{region}.amazonaws.com/workshop-horovod:cpu"
        )
    # PyTorch's image has mpi4py and NumPy in it, too.
    return _aws_image(
        TENSORFLOW if imports.TENSORFLOW & packages else PYTORCH, region, settings.instance_type
    )


def _lacks_horovod(image: str) -> bool:
    """Whether `image` is known to be without Horovod, as AWS's newer ones are."""
    match = _OF_AWS.match(image)
    if match is None:
        return False
    account, region, framework, *version = match.groups()
    if tuple(map(int, version)) <= LAST_WITH_HOROVOD[framework]:
        return False
    try:
        return _aws_image(PYTORCH, region, "ml.c5.xlarge").startswith(account)
    except JobError:  # a region that the SDK does not know
        return False


def _aws_image(image: Mapping[str, str], region: str, instance_type: str) -> str:
    """AWS's training image in `region` for the processor of `instance_type`. Raises JobError if there is none."""
    from sagemaker.core import image_uris  # here, since the SDK takes seconds to import

    options = {**image, "region": region, "instance_type": instance_type, "image_scope": "training"}
    try:
        # AWS lists the tags of TensorFlow 2.21 with this ending, which the SDK leaves out.
        return str(image_uris.retrieve(**options)) + ("-sagemaker" if image is TENSORFLOW else "")
    except ValueError as error:
        message = f"image is missing, and AWS has none for {instance_type} in region {region}: {error}"
        raise JobError(message) from None
