"""What a job becomes on SageMaker: its hosts, its name, its image, its hyperparameters, its addresses on S3."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib.util
import json
import re
import secrets
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.loaders import Loader
from botocore.model import ServiceModel

from workshop_utils import start
from workshop_utils.jobs import JobError, StrategyName, TrainingJob, imports
from workshop_utils.jobs.quantities import seconds_of
from workshop_utils.launchers.instances import gpus_of, size_of
from workshop_utils.launchers.output import is_secret
from workshop_utils.launchers.sagemaker import toolkit
from workshop_utils.launchers.sagemaker.settings import SageMakerSettings
from workshop_utils.launchers.source import files_below
from workshop_utils.strategies import script_words, strategy_of
from workshop_utils.training.data import NAMED

PREFIX = "workshop"  # of everything in the bucket
DATA = "/opt/ml/input/data"  # a folder for each channel
CODE = f"{DATA}/code"  # where the SDK's drivers start the script
OWN_CHANNELS = ("code", "sm_drivers", "recipe")  # the SDK's
# What starts a script whose command line hyperparameters cannot carry, and the file that holds it.
START, WORDS = "workshop_utils/start.py", "workshop_utils/start.json"
# The strategies that the SDK's drivers start, and the programs that do.
BY_DRIVER: dict[StrategyName, str] = {"single": "basic_script_driver.py", "torch_ddp": "torchrun_driver.py"}

TENSORFLOW_STRATEGIES = ("parameter_server", "multi_worker_mirrored")

# AWS's images, of the workshop's own versions; all have Open MPI, mpi4py and the toolkit in them. Horovod was in those
# for TensorFlow up to 2.12, which has Keras 2, and for PyTorch on GPUs up to 1.13, and is in none that is still built.
# Sources: the SDK's image_uris; aws/deep-learning-containers, docs/src/data and docker/, August 2026.
TENSORFLOW = {"framework": "tensorflow", "version": "2.21", "py_version": "py312"}
PYTORCH = {"framework": "pytorch-amzn2023", "version": "2.13"}
LAST_WITH_HOROVOD = {"tensorflow": (2, 12), "pytorch": (1, 13)}
_OF_AWS = re.compile(r"(\d{12})\.dkr\.ecr\.([^.]+)\.[^/]+/(tensorflow|pytorch)(?:-training)?:(\d+)\.(\d+)")
MOST_ARGUMENTS = 90  # of the 100 hyperparameters that a request may have; the toolkit is told the others
# How long hosts may take to come together, as the toolkit's own waiting goes (mpi.py: an hour for MPI's workers).
JOIN_SECONDS = 1800


@dataclass(frozen=True)
class Submission:
    """A job on its hosts, under a name that no other job of the account has."""

    job: TrainingJob
    settings: SageMakerSettings
    hosts: tuple[str, ...]
    name: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables that all hosts get."""
        waiting = {"WORKSHOP_JOIN_SECONDS": str(JOIN_SECONDS), "WORKSHOP_MODEL": "/opt/ml/model"}
        if self.job.strategy == "horovod":
            waiting["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(JOIN_SECONDS)
        if self.job.data is not None:
            waiting["WORKSHOP_DATA"] = f"{DATA}/training" if isinstance(self.job.data, str) else DATA
        module = {}
        if self.job.strategy in TENSORFLOW_STRATEGIES:
            # AWS's images have set it already, to the same; in others, without it, the toolkit starts plain scripts.
            module = {toolkit.STARTER: toolkit.TENSORFLOW}
        elif self.driver and "/" in self.job.script:
            own = self.job.environment.get("PYTHONPATH")
            module = {"PYTHONPATH": f"{CODE}:{own}" if own else CODE}  # the toolkit sets it by itself
        return {"PYTHONUNBUFFERED": "1", **waiting, **self.job.environment, **module}

    @property
    def driver(self) -> str | None:
        """The program of the SDK that starts the script on each host; None where the toolkit does."""
        return BY_DRIVER.get(self.job.strategy)

    @property
    def is_plain(self) -> bool:
        """Whether hyperparameters can carry the script's command line; otherwise START reads it from WORDS."""
        job = self.job
        if job.module is not None or job.needs_start or len(self.arguments) < len(job.arguments):
            return False
        # A driver puts two dashes before a single letter.
        return _survives(job.script) and not (self.driver and any(len(name) == 1 for name in self.arguments))

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of the script that are hyperparameters; START ignores them, and a script may read them in SM_HPS."""
        carried = [each for each in self.job.named_arguments.items() if self._carries(*each)]
        return dict(carried[:MOST_ARGUMENTS])

    def _carries(self, name: str, value: Any) -> bool:
        """Whether a hyperparameter can carry this argument: the toolkit and torchrun take some for themselves."""
        if (
            is_secret(name, str(value)) or len(name) > 200 or len(str(value)) > 2000
        ):  # of 256 and 2,500, in JSON
            return False
        if name.startswith("sagemaker_") or (self.job.strategy == "torch_ddp" and _is_for_torchrun(name)):
            return False
        return _survives(name) and _survives(value)

    @property
    def entry(self) -> str:
        """The program that the driver or the toolkit starts."""
        return self.job.script if self.is_plain else START

    @property
    def texts(self) -> dict[str, str]:
        """What travels in the source beside the job's own files: START and WORDS, where START is the entry."""
        if self.is_plain:
            return {}
        # The toolkit's mpirun puts `-m mpi4py` before START, which does not see what becomes of START's script.
        by_mpi = toolkit.SWITCHES.get(self.job.strategy) == toolkit.MPI
        bare = self.job.replace(arguments=[], strategy="mpi" if by_mpi else self.job.strategy)
        words = [*script_words(bare, script=bare.script), *self.job.command_line_arguments]
        return {START: Path(start.__file__).read_text(encoding="utf-8"), WORDS: json.dumps(words)}

    @property
    def hyperparameters(self) -> dict[str, str]:
        """The script's arguments, and what the toolkit is told where it starts the script; each value is JSON."""
        if not self.driver:
            values = {**self.arguments, **toolkit.instructions(self)}
        else:  # it would write true
            values = {n: str(each) if isinstance(each, bool) else each for n, each in self.arguments.items()}
        return {name: json.dumps(value) for name, value in sorted(values.items())}

    @property
    def limit_seconds(self) -> int:
        """When the service ends the job; at least one second, since it counts whole ones."""
        return max(1, round(seconds_of(self.settings.max_runtime or self.job.timeout)))

    @property
    def wait_seconds(self) -> int | None:
        """When the service gives spot instances up, waiting included; None without them.

        Raises:
            JobError: if that is before the job's own limit.
        """
        if not self.settings.spot:
            return None
        # Running, waiting for spot instances, and starting again on others, which takes minutes each time.
        wait = round(seconds_of(self.settings.max_wait or f"{self.limit_seconds + 3600}s"))
        if wait < self.limit_seconds:
            least = f"with spot instances it must be at least max_runtime, {self.limit_seconds}"
            raise JobError(f"max_wait is {wait} seconds; {least}")
        return wait

    @property
    def source_uri(self) -> str:
        """Where the source is in the bucket."""
        return f"{self._bucket_uri}/source/{self.name}/sourcedir.tar.gz"

    def channels(self) -> dict[str, str]:
        """Where the data of each channel is: in its own place if that is on S3, and otherwise in the bucket.

        Reads all of the data; a request has what this was when it was made.
        """
        return {name: self._data_uri(source) for name, source in self.job.channels.items()}

    def _data_uri(self, source: str) -> str:
        if source.startswith("s3://"):
            return source
        if source in NAMED:
            return f"{self._bucket_uri}/data/{source}/"
        path = Path(source).expanduser()
        digest = hashlib.sha256(source.encode() if not path.exists() else b"")
        # By what it holds: another's data is never in the same place, and what a running job reads never changes.
        for name, file in (
            files_below(path) if path.is_dir() else [(path.name, path)] if path.exists() else ()
        ):
            with file.open("rb") as content:
                digest.update(f"{name}\0{file.stat().st_size}\0".encode())
                while part := content.read(1 << 20):
                    digest.update(part)
        return f"{self._bucket_uri}/data/{self.job.name}-{digest.hexdigest()[:16]}/"

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


def submission_of(job: TrainingJob, settings: SageMakerSettings) -> Submission:
    """The hosts that `job` takes, and a name for it.

    Raises:
        JobError: if SageMaker's instances cannot run it so; the message says what would be right.
    """
    _check_instance_type(settings.instance_type)
    _check_gpus(job, settings.instance_type)
    _check_size(job, settings.instance_type)
    _check_strategy(job)
    _check_channels(job)
    count = job.nodes or job.workers
    if job.strategy == "parameter_server":
        count += 1  # the chief, which does not train, has a host of its own
    name = f"{job.name[:42].rstrip('-')}-{time.strftime('%Y%m%d%H%M%S')}-{secrets.token_hex(2)}"
    return Submission(job, settings, toolkit.host_names(count), name)


def _survives(value: Any) -> bool:
    """Whether a hyperparameter reaches the script's command line unchanged.

    The SDK's drivers decode it twice, so that "[1]" would be a list, and the toolkit leaves its words to a shell.
    """
    word, decoded = str(value), str(value) if isinstance(value, bool) else value
    if isinstance(decoded, str):
        with contextlib.suppress(ValueError):
            decoded = json.loads(decoded)
    return shlex.quote(word) == word == (decoded if isinstance(decoded, str) else json.dumps(decoded))


@functools.cache
def _instance_types() -> list[str]:
    # Not through a session, which reads the learner's AWS profile: none is needed to look at a request.
    service = ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
    shape: Any = service.shape_for("TrainingInstanceType")
    return list(shape.enum)


def _check_instance_type(name: str) -> None:
    """Raise JobError if SageMaker has no instances of the type `name`."""
    if name not in _instance_types():
        close = difflib.get_close_matches(name, _instance_types(), n=1)
        advice = f"did you mean {close[0]}?" if close else f"{_instance_types()[0]} is one"
        raise JobError(f"instance_type is {name!r}, which is no SageMaker instance type; {advice}")


def _check_gpus(job: TrainingJob, instance_type: str) -> None:
    """Raise JobError if the instances have too few GPUs for the job, or GPUs that it would leave idle."""
    each, per_host = job.resources.gpu, job.processes_per_node or 1
    if not re.match(r"ml\.(p|gr?)\d", instance_type):
        if each:
            lacking = f"instance_type {instance_type} has no NVIDIA GPU; take one such as ml.g5.xlarge"
            raise JobError(f"resources.gpu is {each}, and {lacking}")
        return
    if reason := imports.why_no_gpu(job):
        idle = f"script {job.program!r} {reason}; take one such as ml.c5.xlarge"
        raise JobError(f"instance_type is {instance_type}, whose GPUs you would pay for, and {idle}")
    count = gpus_of(instance_type)
    needed = max(1, each) * per_host  # a script that can use a GPU takes one, even if the job asks for none
    if count not in (None, needed):
        idle = f", {count - needed} of them idle" if count > needed else ""
        raise JobError(
            f"resources.gpu is {each}; {per_host} process(es) a node need {needed} GPU(s), and instance_type "
            f"{instance_type} has {count}{idle}: set processes_per_node to {count}, or to 1 and resources.gpu to "
            f"{count} if one process uses several, or take another instance_type"
        )


def _check_size(job: TrainingJob, instance_type: str) -> None:
    """Raise JobError if the instances are known to have too few processors, or too little memory."""
    count, resources = job.processes_per_node or 1, job.resources
    needed = {"cpu": count * resources.cpu, "memory": count * resources.memory_nbytes / 2**30}
    for (name, need), there in zip(needed.items(), size_of(instance_type), strict=True):
        if name in resources.model_fields_set and 0 < there < need:
            unit = "GiB" if name == "memory" else "processor(s)"
            raise JobError(
                f"resources.{name} is {getattr(resources, name)!r}; {count} process(es) a node need {need:g} {unit}, "
                f"and instance_type {instance_type} has {there:g}: take a larger instance, or ask for less"
            )


def _check_channels(job: TrainingJob) -> None:
    """Raise JobError for channels that the SDK has itself, or that its drivers cannot name in a variable."""
    for name in job.channels:
        if name in OWN_CHANNELS or "-" in name:
            why = f"SageMaker's SDK makes a variable of it, and has {', '.join(OWN_CHANNELS)} for itself"
            raise JobError(f"data.{name} cannot be a channel's name: {why}; take another, without '-'")


def _check_strategy(job: TrainingJob) -> None:
    """Raise JobError for what neither the SDK's drivers nor the toolkit start."""
    given, per_host, hosts = f"strategy is {job.strategy!r}", job.processes_per_node or 1, job.workers + 1
    strategy_of(job)
    if job.strategy not in (*BY_DRIVER, *toolkit.SWITCHES):
        advice = "run it locally, or use another strategy, such as 'torch_ddp'"
        raise JobError(f"{given}; nothing in SageMaker's images starts its processes: {advice}")
    switch = toolkit.SWITCHES.get(job.strategy)
    if per_host > 1 and switch in (toolkit.PARAMETER_SERVER, toolkit.MULTI_WORKER_MIRRORED):
        each = f"with strategy {job.strategy!r} the toolkit starts one on each host"
        raise JobError(f"processes_per_node is {per_host}; {each}")
    if switch == toolkit.PARAMETER_SERVER and job.parameter_servers not in (1, hosts):
        advice = f"the toolkit runs one on each of the {hosts} hosts: leave it out"
        raise JobError(f"parameter_servers is {job.parameter_servers}; {advice}")


@functools.cache
def _is_for_torchrun(name: str) -> bool:
    """Whether torchrun may take the script's `--NAME` for several of its own options, which stand in its source."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return True
    source = Path(torch.origin).with_name("distributed").joinpath("run.py").read_text(encoding="utf-8")
    parser = source.partition("def get_args_parser")[2].partition("\ndef ")[0]
    options = re.findall(r'"(--[a-z][a-z_-]*)"', parser)
    return f"--{name}" not in options and sum(each.startswith(f"--{name}") for each in options) > 1


# Images


def image_for(job: TrainingJob, settings: SageMakerSettings) -> str:
    """The image of the job, or of the place, or else AWS's for what the script imports and for `instance_type`.

    Raises:
        JobError: if AWS has no such image, or the job's own lacks what starts its strategy.
    """
    packages, region = imports.packages(imports.imported(job.script_path)), settings.region_name
    needs_horovod = "horovod" in packages or job.strategy == "horovod"
    if image := job.image or settings.image:
        if needs_horovod and _lacks_horovod(image):
            raise JobError(
                f"image is {image!r}, which has no Horovod in it: AWS's last ones with it have TensorFlow 2.12, or "
                "PyTorch 1.13 for GPUs. Use one of them, or build jobs/images/ and name your own image"
            )
        if job.strategy in TENSORFLOW_STRATEGIES and re.search(r"/workshop-\w+[:@]", image):
            lacks = "an image of jobs/images/, which have no toolkit for TensorFlow's strategies"
            raise JobError(
                f"image is {image!r}, {lacks}: leave it out, and AWS's is taken, which has TensorFlow 2.21"
            )
        return image
    if needs_horovod:
        raise JobError(
            "image is missing: no image of AWS has the Horovod that this script imports. Build jobs/images/ and "
            f"name yours in place.yaml, as image: 123456789012.dkr.ecr.{region}.amazonaws.com/workshop-horovod:cpu"
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
