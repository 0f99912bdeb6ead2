"""Launches jobs on SageMaker, once someone has agreed to the cost, and follows them there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.remote import Receive, RemoteJob, RemoteRun, Unreachable
from workshop_utils.launchers.sagemaker import account, price
from workshop_utils.launchers.sagemaker.account import Aws, AwsError
from workshop_utils.launchers.sagemaker.settings import SageMakerSettings
from workshop_utils.launchers.sagemaker.submission import Submission, submission_of
from workshop_utils.launchers.source import files_below, unpack
from workshop_utils.runs import RunState
from workshop_utils.training import data

if TYPE_CHECKING:
    from workshop_utils.launchers.sagemaker.request import Request

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
POLL_SECONDS = 5.0
# At the log of a job that has ended: CloudWatch shows lines some seconds after they were printed.
LATE_LOOKS = 2

STATES = {"Completed": RunState.SUCCEEDED, "Failed": RunState.FAILED, "Stopped": RunState.STOPPED}
# SageMaker stops a job at a limit without calling it failed.
LIMITS = ("MaxRuntimeExceeded", "MaxWaitTimeExceeded")


class SageMaker(SageMakerSettings):
    """Launches jobs on SageMaker. Its fields are those of `SageMakerSettings`.

    `aws` is the account to use; by default that of the environment: AWS_PROFILE and its like, or AWS_ENDPOINT_URL.
    """

    _aws: Aws | None = PrivateAttr(None)

    def __init__(self, /, aws: Aws | None = None, **values: Any) -> None:
        super().__init__(**values)
        self._aws = aws

    @property
    def aws(self) -> Aws:
        """The account; printed, it says whether it is AWS itself."""
        if self._aws is None:
            self._aws = account.profile(self.region_name)
        return self._aws

    def render(self, job: TrainingJob) -> Request:
        """The request that `launch` would send. Sends nothing, and needs no account.

        Raises:
            JobError: if SageMaker's instances cannot run the job so, or it would leave some of what is paid for idle.
        """
        submission = submission_of(job, self)
        from workshop_utils.launchers.sagemaker.request import render  # the SDK takes seconds to import

        return render(submission, job)

    def launch(self, job: TrainingJob) -> SageMakerRun:
        """Store source and data on S3, and start the job. Asks first, unless `confirm` is set or it costs nothing.

        Raises:
            JobError: as `render` does; nothing has been sent then.
            NotConfirmed: if no one agrees to the cost; neither source nor data has been sent then.
            AwsError: if AWS refuses, or the job's image was never built; the message says why.
            DataError: if the job's data cannot be read.
        """
        request = self.render(job)
        if not self.aws.is_emulated:
            _look_for(request.body["AlgorithmSpecification"]["TrainingImage"], self.aws)
            if not self.confirm:
                price.ask(price.preflight(request.submission))
        _upload(request, self.aws)
        try:
            self.aws.call("sagemaker", "create_training_job", **request.body)
        except AwsError as error:
            if not error.code:  # no answer
                may_run = (
                    f"{request.submission.name} may have started all the same: look in SageMaker's console"
                )
                raise AwsError(f"{error}. {may_run}") from None
            # Nobody else has this name: it is in use if a first try was taken, and its answer lost.
            if error.code != "ResourceInUse":
                raise
        return SageMakerRun(request.submission, self.aws)


def _look_for(image: str, aws: Aws) -> None:
    """Raise AwsError if `image` is one that jobs/images/build.sh would store in this region, and has not."""
    if own := re.fullmatch(rf"(\d{{12}})\.dkr\.ecr\.{aws.region}\.[\w.]+/(workshop-[\w-]+):([\w.-]+)", image):
        account_id, repository, tag = own.groups()
        asked = {"registryId": account_id, "repositoryName": repository, "imageIds": [{"imageTag": tag}]}
        try:
            is_stored = aws.call("ecr", "batch_get_image", **asked)["images"]
        except AwsError as error:
            if error.code == "AccessDeniedException":
                return  # it is SageMaker's role that takes the image
            if error.code != "RepositoryNotFoundException":
                raise
            is_stored = []
        if not is_stored:
            raise AwsError(f"there is no image {image}: jobs/images/build.sh makes it")


def _upload(request: Request, aws: Aws) -> None:
    """Store what the job needs in the bucket, which is made if it is missing."""
    submission = request.submission
    channels = submission.job.channels.items()
    folders = {name: data.prepare(source) for name, source in channels if not source.startswith("s3://")}
    bucket, source = account.split_uri(submission.source_uri)
    owner = submission.settings.role.split(":")[4]
    account.ensure_bucket(bucket, aws, owner)
    for key, content in {source: request.source, **request.uploads}.items():
        aws.call("s3", "put_object", Bucket=bucket, ExpectedBucketOwner=owner, Key=key, Body=content)
    for name, folder in folders.items():
        account.upload(files_below(folder), request.channels[name], aws, owner)


class SageMakerRun(RemoteRun):
    """A run on SageMaker. Its workers have their hosts' names; leaving its `with` block stops the job."""

    def __init__(self, submission: Submission, aws: Aws, poll_seconds: float = POLL_SECONDS) -> None:
        self.answered_by = str(aws)
        self._aws = aws
        self._remote_job = SageMakerJob(submission.name, aws)
        super().__init__(submission.name, submission.hosts, self._remote_job, poll_seconds)

    @property
    def stage(self) -> str:
        """SageMaker's own, finer word for the state of the job, such as `Downloading`."""
        return str(self._remote_job.description.get("SecondaryStatus", "Starting"))

    @property
    def model_uri(self) -> str | None:
        """Where the model is on S3; None unless the job has succeeded."""
        artefact: str | None = self._remote_job.description.get("ModelArtifacts", {}).get("S3ModelArtifacts")
        return artefact if self.state is RunState.SUCCEEDED else None

    def download_model(self, folder: str | Path) -> list[Path]:
        """Fetch the model into `folder` and return the files' paths.

        Raises:
            AwsError: if there is no model, or it cannot be fetched.
            tarfile.TarError: if it holds what is neither file nor folder; `model_uri` says where it is.
        """
        if self.model_uri is None:
            raise AwsError(f"{self.name} has no model: its state is {self.state}")
        bucket, key = account.split_uri(self.model_uri)
        content = self._aws.call("s3", "get_object", Bucket=bucket, Key=key)["Body"].read()
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        return unpack(content, target)


class SageMakerJob(RemoteJob):
    """The training job called `name`, as its account shows it; `description` is SageMaker's last answer.

    SageMaker keeps records of jobs that have ended, at no cost.
    """

    def __init__(self, name: str, aws: Aws) -> None:
        self.description: dict[str, Any] = {}
        self._name, self._aws = name, aws
        self._tokens: dict[str, str] = {}  # how far each log stream has been read
        self._late_looks = 0 if aws.is_emulated else LATE_LOOKS

    def poll(self) -> tuple[RunState, str]:
        """The state of the job, and why it failed. One that has ended still runs while its log may lack lines."""
        state = self._state()
        if state is not RunState.RUNNING and self._late_looks:
            self._late_looks -= 1
            return RunState.RUNNING, ""
        stage = self.description.get("SecondaryStatus")
        at_limit = f"{stage}: the job met its time limit" if stage in LIMITS else "SageMaker gave no reason"
        cause = self.description.get("FailureReason", at_limit)
        return state, f"{self._name} failed: {cause}" if state is RunState.FAILED else ""

    def read(self, receive: Receive) -> None:
        """Pass on what the hosts have printed since the last call; each has a log stream of its own."""
        try:
            for stream in log_streams(self._name, self._aws):
                host = stream.partition("/")[2].rpartition("-")[0]
                for message in self._new_messages(stream):
                    receive(host, message, "stdout")
        except AwsError as error:
            raise Unreachable(str(error)) from None

    def stop(self) -> None:
        """Stop the job. Raises AwsError if AWS refuses, for then it still costs money."""
        try:
            self._aws.call("sagemaker", "stop_training_job", TrainingJobName=self._name)
        except AwsError as error:
            # AWS also refuses to stop a job that is being stopped already, or that has just ended.
            with contextlib.suppress(Unreachable):
                has_ended = self._state() is not RunState.RUNNING
                if has_ended or self.description["TrainingJobStatus"] == "Stopping":
                    return
            still = f"{self._name} could not be stopped and still costs money"
            raise AwsError(f"{still}: stop it in SageMaker's console. {error}", error.code) from None

    def _state(self) -> RunState:
        try:
            named = {"TrainingJobName": self._name}
            self.description = self._aws.call("sagemaker", "describe_training_job", **named)
        except AwsError as error:
            raise Unreachable(str(error)) from None
        state = STATES.get(self.description["TrainingJobStatus"], RunState.RUNNING)
        at_limit = self.description.get("SecondaryStatus") in LIMITS
        return RunState.FAILED if state is RunState.STOPPED and at_limit else state

    def _new_messages(self, stream: str) -> Iterator[str]:
        where = {"logGroupName": LOG_GROUP, "logStreamName": stream, "startFromHead": True}
        before: str | None = None
        while self._tokens.get(stream, "") != before:
            before = self._tokens.get(stream, "")
            further = {"nextToken": before} if before else {}
            answer = self._aws.call("logs", "get_log_events", **where, **further)
            yield from (event["message"] for event in answer["events"])
            self._tokens[stream] = answer["nextForwardToken"]  # at the end of the stream, the same again


def log_streams(job: str, aws: Aws) -> Iterator[str]:
    """The names of the log streams of the training job `job`: one for each host that has printed something."""
    where = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{job}/"}
    try:
        for stream in aws.pages("logs", "describe_log_streams", "logStreams", **where):
            yield stream["logStreamName"]
    except AwsError as error:
        if error.code != "ResourceNotFoundException":  # no job of this account has ever printed anything
            raise
