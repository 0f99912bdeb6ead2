"""The request that `ModelTrainer` of the SageMaker Python SDK, version 3, makes of a submission.

ModelTrainer talks to a session that reaches no one: its uploads are noted, and its calls are answered here, through the
events in which botocore lets others answer before there is a connection. A launch sends exactly what was noted.

The SDK's drivers start plain scripts and, by `Torchrun`, PyTorch's ranks. It has none for TensorFlow's strategies, and
that for MPI would start the ranks of the first host alone: there ModelTrainer gets no `source_code`, and the toolkit
inside the image starts the script, as the hyperparameters tell it. This module takes seconds to import, since the SDK
does.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import botocore.session
from botocore.exceptions import BotoCoreError
from sagemaker.core import shapes
from sagemaker.core.config.config_manager import SageMakerConfig
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.training.configs import Compute, Networking, SourceCode
from sagemaker.train import ModelTrainer
from sagemaker.train.distributed import Torchrun

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.sagemaker.account import TAG
from workshop_utils.launchers.sagemaker.submission import BY_DRIVER, PREFIX, WORDS, Submission, image_for
from workshop_utils.launchers.source import packed

NO_TELEMETRY = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
# A learner may not be allowed to look at roles; AWS says what is wrong with one when the job is created.
os.environ["SAGEMAKER_VALIDATE_ROLE"] = "false"
logging.getLogger("sagemaker").setLevel(logging.CRITICAL)  # what goes wrong is raised, too


@dataclass(frozen=True)
class Request:
    """A CreateTrainingJob request, exactly as it is sent.

    `uploads` are the files that ModelTrainer stores for the job, by their keys in the bucket: the SDK's drivers.
    `source` is the `.tar.gz` for `submission.source_uri`.
    """

    submission: Submission
    body: dict[str, Any]
    uploads: Mapping[str, bytes]
    source: bytes

    @property
    def channels(self) -> dict[str, str]:
        """Where the job finds the data of each channel, the SDK's own included."""
        given = self.body.get("InputDataConfig", [])
        return {each["ChannelName"]: each["DataSource"]["S3DataSource"]["S3Uri"] for each in given}

    def __str__(self) -> str:
        variables = {
            name: output.masked(name, text) for name, text in self.body.get("Environment", {}).items()
        }
        parts = [json.dumps({**self.body, "Environment": variables}, indent=2)]
        # What torchrun is told; the other drivers are the same for every job.
        parts += [
            f"# sm_drivers/distributed.json\n{content.decode()}"
            for key, content in self.uploads.items()
            if key.endswith("/distributed.json") and self.submission.driver == BY_DRIVER["torch_ddp"]
        ]
        parts += [f"# {WORDS}\n{text}" for name, text in self.submission.texts.items() if name == WORDS]
        return "\n\n".join(parts)

    __repr__ = __str__


def render(submission: Submission, job: TrainingJob) -> Request:
    """The request that ModelTrainer would send for `submission`, whose job is `job` but for folders of this machine.

    Raises:
        JobError: for what the SDK or the service's model refuses, or would be done differently; or as `packed` does.
    """
    settings = submission.settings
    session = _session(settings.region_name, settings.bucket_name)
    session.uploads, session.body = {}, {}
    try:
        _train(submission, session)
    except JobError:
        raise
    except (ValueError, BotoCoreError) as error:
        raise JobError(f"ModelTrainer refuses {submission.job.name}: {error}") from None
    # The toolkit installs what it finds in these files.
    installed = ("setup.py", *(() if job.requirements else ("requirements.txt",)))
    source = packed(job, submission.texts, () if submission.driver else installed)
    # The SDK's own name is unique only to the second, and the toolkit is told the name beforehand.
    body = {**session.body, "TrainingJobName": submission.name}
    return Request(replace(submission, job=job), body, session.uploads, source)


class OfflineSession(Session):
    """A session that reaches no one: it notes the files that ModelTrainer uploads, and the request that it sends."""

    def __init__(self, region: str, bucket: str) -> None:
        self.uploads: dict[str, bytes] = {}  # by their keys in the bucket
        self.body: dict[str, Any] = {}
        # Nothing of the user's own configuration of AWS is read.
        nothing = (None, None, os.devnull, None)
        own = {"profile": (None, None, None, None), "config_file": nothing, "credentials_file": nothing}
        botocore_session = botocore.session.Session(own)
        boto = boto3.Session("made", "up", region_name=region, botocore_session=botocore_session)
        boto.events.register("before-call", self._answer)
        super().__init__(boto, default_bucket=bucket, sagemaker_config=NO_TELEMETRY)
        self._default_bucket = bucket  # it need not look whether there is one

    def _answer(self, model: Any, params: Mapping[str, Any], **_: Any) -> Any:
        if model.name == "CreateTrainingJob":
            self.body = json.loads(params["body"])
        # ModelTrainer also looks at the job that it has started, and asks where it may store its drivers.
        answer = {"TrainingJobName": "sdk", "ResponseMetadata": {"HTTPStatusCode": 200}}
        return SimpleNamespace(status_code=200), answer

    def upload_data(self, path: str, bucket: str, key_prefix: str, **_: Any) -> str:
        """Note the files of the folder `path`; the address below which the launch will store them."""
        files = sorted(file for file in Path(path).rglob("*") if file.is_file())
        self.uploads |= {f"{key_prefix}/{file.relative_to(path)}": file.read_bytes() for file in files}
        return f"s3://{bucket}/{key_prefix}"


_session = functools.cache(OfflineSession)


class NoDefaults(SageMakerConfig):
    """The user's own configuration of the SDK adds nothing to a request."""

    def resolve_value_from_config(self, *_: Any, **__: Any) -> None:
        """No value for anything that is left out."""


def _train(submission: Submission, session: OfflineSession) -> None:
    """Have ModelTrainer send the job to `session`."""
    settings = submission.settings
    checkpoints = submission.checkpoint_uri
    trainer = ModelTrainer(
        sagemaker_session=session,
        config_mgr=NoDefaults(),
        base_job_name="sdk",
        input_s3_key_prefix=f"{PREFIX}/source/{submission.name}",
        role=settings.role,
        training_image=image_for(submission.job, settings),
        training_input_mode=settings.input_mode,
        hyperparameters=submission.hyperparameters,
        environment=submission.environment,
        output_data_config=shapes.OutputDataConfig(s3_output_path=submission.output_uri),
        checkpoint_config=checkpoints
        and shapes.CheckpointConfig(s3_uri=checkpoints, local_path="/opt/ml/checkpoints"),
        compute=Compute(
            instance_type=settings.instance_type,
            instance_count=len(submission.hosts),
            volume_size_in_gb=settings.volume_gb,
            enable_managed_spot_training=settings.spot or None,
        ),
        stopping_condition=shapes.StoppingCondition(
            max_runtime_in_seconds=submission.limit_seconds,
            max_wait_time_in_seconds=submission.wait_seconds,
        ),
        networking=Networking(
            subnets=list(settings.subnets) or None,
            security_group_ids=list(settings.security_groups) or None,
        ),
        tags=[
            shapes.Tag(key=key, value=value)
            for key, value in {TAG["Key"]: TAG["Value"], **settings.tags}.items()
        ],
        **_driver(submission),
    )
    # Every host gets all of the data, since strategies differ in how they read shards.
    channels = []
    for name, uri in submission.channels().items():
        channels.append(trainer.create_input_data_channel(name, uri))
        channels[-1].input_mode = settings.input_mode
    trainer.train(channels or None, wait=False, logs=False)


def _driver(submission: Submission) -> dict[str, Any]:
    """ModelTrainer's arguments that name the driver; none where the toolkit starts the script."""
    job = submission.job
    if not submission.driver:
        return {}
    # The toolkit installs these by itself.
    has_requirements = job.requirements and (job.folder / "requirements.txt").is_file()
    source = SourceCode(
        source_dir=submission.source_uri,
        entry_script=submission.entry,
        requirements="requirements.txt" if has_requirements else None,
    )
    torchrun = Torchrun(process_count_per_node=job.processes_per_node or 1)
    return {"source_code": source, "distributed": torchrun if job.strategy == "torch_ddp" else None}
