"""The one way to send a job: `ModelTrainer` of the SageMaker Python SDK, version 3.

`render` lets it send to nobody: its calls are answered here, by the events in which botocore lets others answer before
there is any connection. `send` lets it send to an account. Both make the same request.

With `mode: toolkit`, ModelTrainer gets no `source_code`: the toolkit inside the image starts the script, as the
hyperparameters tell it. (The SDK's own MPI driver would start the ranks of the first host alone.) With `mode: drivers`,
the workshop's driver is one of the SDK's. This module takes seconds to be imported, since the SDK does.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
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
from sagemaker.train.distributed import DistributedConfig

from workshop_utils.jobs import JobError
from workshop_utils.launchers.sagemaker import check, members
from workshop_utils.launchers.sagemaker.account import Aws
from workshop_utils.launchers.sagemaker.errors import explained
from workshop_utils.launchers.sagemaker.images import image_for
from workshop_utils.launchers.sagemaker.request import PREFIX, TAG, Plan, Request
from workshop_utils.quantities import seconds_of

HERE = Path(__file__).parent
DRIVER = "driver.py"
DRIVERS = (HERE / DRIVER, HERE.parent / "local" / "horovod_rendezvous.py")
CHECKPOINTS = "/opt/ml/checkpoints"
NO_TELEMETRY = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}
# A learner may not be allowed to look at roles; what is wrong with one, AWS says when the job is created.
os.environ["SAGEMAKER_VALIDATE_ROLE"] = "false"
logging.getLogger("sagemaker").setLevel(logging.CRITICAL)  # what goes wrong is raised, too


def render(plan: Plan) -> Request:
    """The request that ModelTrainer would send for `plan`, checked.

    Raises:
        JobError: for what SageMaker would refuse, or would take and then not do.
    """
    started = None
    if plan.settings.mode == "drivers":
        started = members.members(plan, members.addresses(plan), bind_to="0.0.0.0")
    request = Request(plan, {}, started)
    try:
        body = _train(request, _to_nobody(plan.settings.region_name, plan.settings.bucket_name))
    except JobError:
        raise
    except (ValueError, BotoCoreError) as error:
        raise JobError(f"ModelTrainer refuses {plan.job.name}: {error}") from None
    check.body(body)
    check.rules(body)
    return Request(plan, body, started)


def send(request: Request, aws: Aws) -> None:
    """Have ModelTrainer send to `aws` what was rendered. Raises AwsError where AWS, or the SDK, refuses."""
    with explained("create_training_job"):
        _train(request, Wire(aws.session(), request.plan.settings.bucket_name))


class Wire:
    """What ModelTrainer's calls go through: it gives the job its name, and keeps the request as it goes out.

    With `to_nobody`, it answers all calls in AWS's place. Some it always does: the SDK looks at once at what it has
    started, and asks where it may store its drivers.
    """

    def __init__(self, session: boto3.Session, bucket: str, to_nobody: bool = False) -> None:
        self.name = ""
        self.body: dict[str, Any] = {}
        self._bucket, self._to_nobody = bucket, to_nobody
        session.events.register("provide-client-params.sagemaker.CreateTrainingJob", self._give_name)
        session.events.register("before-call", self._before_call)
        self.session = Session(session, default_bucket=bucket, sagemaker_config=NO_TELEMETRY)

    def _give_name(self, params: dict[str, Any], **_: Any) -> None:
        # The SDK's own name is unique only to the second, and the toolkit is told the name beforehand.
        params["TrainingJobName"] = self.name

    def _before_call(self, model: Any, params: Mapping[str, Any], **_: Any) -> Any:
        if model.name == "CreateTrainingJob":
            self.body = json.loads(params["body"])
        answers: dict[str, dict[str, Any]] = {
            "DescribeTrainingJob": {"TrainingJobName": self.name},
            "SimulatePrincipalPolicy": {},
        }
        if self._to_nobody:
            answers["ListBuckets"] = {"Buckets": [{"Name": self._bucket, "CreationDate": datetime.now(UTC)}]}
        elif model.name not in answers:
            return None
        answer = {"ResponseMetadata": {"HTTPStatusCode": 200}, **answers.get(model.name, {})}
        return SimpleNamespace(status_code=200), answer


@functools.cache
def _to_nobody(region: str, bucket: str) -> Wire:
    """A wire that leads nowhere, and that knows nothing of the user's own configuration of AWS."""
    nothing = (None, None, os.devnull, None)
    own = {"profile": (None, None, None, None), "config_file": nothing, "credentials_file": nothing}
    session = boto3.Session("made", "up", region_name=region, botocore_session=botocore.session.Session(own))
    return Wire(session, bucket, to_nobody=True)


class NoDefaults(SageMakerConfig):
    """The user's own configuration of the SDK adds nothing to a request."""

    def resolve_value_from_config(self, *_: Any, **__: Any) -> None:
        """No value for anything that is left out."""


class WorkshopDriver(DistributedConfig):
    """The workshop's driver as one of the SDK's, which brings its folder along."""

    folder: str

    @property
    def driver_dir(self) -> str:
        """The folder."""
        return self.folder

    @property
    def driver_script(self) -> str:
        """The program in it that the SDK's entry point calls."""
        return DRIVER


def _train(request: Request, wire: Wire) -> dict[str, Any]:
    """Let ModelTrainer send a job through `wire`; the request as it went out."""
    plan = request.plan
    wire.name, wire.body = plan.name, {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = ModelTrainer(
            sagemaker_session=wire.session,
            config_mgr=NoDefaults(),
            base_job_name="sdk",
            input_s3_key_prefix=f"{PREFIX}/source/{plan.name}",
            role=plan.settings.role,
            training_image=image_for(plan.job, plan.settings.region_name, plan.settings.instance_type),
            training_input_mode=plan.settings.input_mode,
            hyperparameters=plan.hyperparameters,
            environment=plan.environment,
            output_data_config=shapes.OutputDataConfig(
                s3_output_path=f"s3://{plan.settings.bucket_name}/{PREFIX}/models"
            ),
            **_instances(plan),
            **_drivers(request, Path(folder)),
        )
        trainer.tags = [shapes.Tag(key=TAG["Key"], value=TAG["Value"])]
        trainer.tags += [shapes.Tag(key=key, value=value) for key, value in plan.settings.tags.items()]
        if plan.settings.retries:
            trainer.with_retry_strategy(shapes.RetryStrategy(maximum_retry_attempts=plan.settings.retries))
        trainer.train([_training_channel(plan)], wait=False, logs=False)
    return wire.body


def _instances(plan: Plan) -> dict[str, Any]:
    """ModelTrainer's arguments about instances, their network and their limits."""
    settings = plan.settings
    wait = settings.max_wait or f"{2 * plan.limit_seconds}s"  # of spot instances, with the time that they run
    options: dict[str, Any] = {
        "compute": Compute(
            instance_type=settings.instance_type,
            instance_count=len(plan.hosts),
            volume_size_in_gb=settings.volume_gb,
            keep_alive_period_in_seconds=settings.keep_alive_seconds or None,
            enable_managed_spot_training=settings.spot or None,
        ),
        "stopping_condition": shapes.StoppingCondition(
            max_runtime_in_seconds=plan.limit_seconds,
            max_wait_time_in_seconds=round(seconds_of(wait)) if settings.spot else None,
        ),
        "networking": Networking(
            subnets=list(settings.subnets) or None,
            security_group_ids=list(settings.security_groups) or None,
            enable_inter_container_traffic_encryption=settings.encrypt_traffic or None,
        ),
    }
    if settings.spot:  # where an instance is taken away, the next one goes on from here
        options["checkpoint_config"] = shapes.CheckpointConfig(
            s3_uri=plan.checkpoint_uri, local_path=CHECKPOINTS
        )
    return options


def _drivers(request: Request, folder: Path) -> dict[str, Any]:
    """ModelTrainer's arguments with `mode: drivers`; the drivers are laid out in `folder`."""
    if request.members is None:
        return {}
    for path in DRIVERS:
        shutil.copy(path, folder)
    (folder / "members.json").write_text(json.dumps(request.members), encoding="utf-8")
    return {
        "source_code": SourceCode(source_dir=request.plan.source_uri, entry_script=request.plan.job.script),
        "distributed": WorkshopDriver(folder=str(folder)),
    }


def _training_channel(plan: Plan) -> shapes.Channel:
    """The job's data: every host gets all of it, since how to read shards is the strategies' own matter."""
    source = shapes.S3DataSource(
        s3_data_type="S3Prefix", s3_uri=plan.data_uri, s3_data_distribution_type="FullyReplicated"
    )
    return shapes.Channel(
        channel_name="training",
        data_source=shapes.DataSource(s3_data_source=source),
        input_mode=plan.settings.input_mode,
    )
