"""A training job that was started on SageMaker, or on the stand-in for it: the same Run as everywhere."""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workshop_utils.launchers import output
from workshop_utils.launchers.sagemaker.account import Aws
from workshop_utils.launchers.sagemaker.errors import AwsError
from workshop_utils.launchers.sagemaker.request import Plan
from workshop_utils.launchers.sagemaker.upload import split_uri
from workshop_utils.runs import Run, RunState

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
POLL_SECONDS = 5.0
# CloudWatch shows lines some seconds after they were printed, so after a job's end it is asked again.
LATE_LOOKS, LATE_SECONDS = 2, 5.0
BLIND_POLLS = 12  # so often in a row may the state not be had, before the run is given up

STATES = {"Completed": RunState.SUCCEEDED, "Failed": RunState.FAILED, "Stopped": RunState.STOPPED}
# What the toolkit writes before each line of an MPI rank: [1,mpirank:3,algo-2]<stdout>:text.
TOOLKIT_TAG = re.compile(r"\[\d+,mpirank:(\d+),algo-\d+\]<(stdout|stderr)>: ?(.*)")


def log_streams(job: str, aws: Aws) -> Iterator[str]:
    """The names of the log streams of the training job `job`: one for each host that has printed something."""
    where = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{job}/"}
    try:
        for stream in aws.pages("logs", "describe_log_streams", "logStreams", **where):
            yield stream["logStreamName"]
    except AwsError as error:
        if error.code != "ResourceNotFoundException":  # no job of this account has ever printed anything
            raise


class SageMakerRun(Run):
    """A run on SageMaker. Its workers are called as their hosts are; leaving its `with` block stops the job."""

    def __init__(self, plan: Plan, aws: Aws, poll_seconds: float = POLL_SECONDS) -> None:
        super().__init__(plan.name, plan.hosts)
        self._poll_seconds = poll_seconds
        self.answered_by = str(aws)
        self._aws = aws
        self._description: dict[str, Any] = {}
        self._tokens: dict[str, str] = {}  # how far each log stream has been read
        self._wake = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="workshop-run", daemon=True)
        self._watcher.start()

    # What only SageMaker knows.

    @property
    def stage(self) -> str:
        """SageMaker's own, finer word for where the job is, such as `Downloading`."""
        return str(self._description.get("SecondaryStatus", "Starting"))

    @property
    def model_uri(self) -> str | None:
        """Where the model lies on S3, once the job has ended well."""
        artefact: str | None = self._description.get("ModelArtifacts", {}).get("S3ModelArtifacts")
        return artefact if self.state is RunState.SUCCEEDED else None

    def download_model(self, folder: str | Path) -> list[Path]:
        """Fetch the model into `folder` and return the files' paths.

        Raises:
            AwsError: if there is no model, or it cannot be fetched.
        """
        if self.model_uri is None:
            raise AwsError(f"{self.name} has no model: its state is {self.state}")
        bucket, key = split_uri(self.model_uri)
        content = self._aws.call("s3", "get_object", Bucket=bucket, Key=key)["Body"].read()
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(target, filter="data")  # nothing outside the folder, no devices, no odd owners
            return [target / member.name for member in archive.getmembers() if member.isfile()]

    # What every place must do.

    def _request_stop(self) -> None:
        try:
            self._aws.call("sagemaker", "stop_training_job", TrainingJobName=self.name)
        except AwsError as error:
            # A job that somebody else stops, or that ended in this moment, cannot be stopped; every other refusal costs
            # money and must be heard.
            if self._look() is RunState.RUNNING and self._description["TrainingJobStatus"] != "Stopping":
                raise AwsError(
                    f"{self.name} could not be stopped and still costs money: stop it in SageMaker's console. {error}",
                    error.code,
                ) from None
        self._wake.set()

    def _watch(self) -> None:
        """Follow state and logs until the job has ended."""
        blind = 0
        while True:
            try:
                state = self._look()
                self._read_logs()
                blind = 0
            except AwsError as error:
                state, blind = RunState.RUNNING, blind + 1
                if blind == BLIND_POLLS:
                    reason = f"{self.name} cannot be seen any more, and may still run. {error}"
                    self._finish(RunState.FAILED, reason)
                    return
            if state is not RunState.RUNNING:
                break
            self._wake.wait(self._poll_seconds)
            self._wake.clear()
        for _ in range(0 if self._aws.is_stand_in else LATE_LOOKS):
            time.sleep(LATE_SECONDS)
            with contextlib.suppress(AwsError):  # lines that cannot be had do not change how it ended
                self._read_logs()
        self._finish(state, self._reason_of(state))

    def _look(self) -> RunState:
        self._description = self._aws.call("sagemaker", "describe_training_job", TrainingJobName=self.name)
        return STATES.get(self._description["TrainingJobStatus"], RunState.RUNNING)

    def _read_logs(self) -> None:
        """Take in what the hosts have printed since the last time; each has a log stream of its own."""
        for stream in log_streams(self.name, self._aws):
            host = stream.partition("/")[2].rpartition("-")[0]
            where = {"logGroupName": LOG_GROUP, "logStreamName": stream, "startFromHead": True}
            before: str | None = None
            while self._tokens.get(stream, "") != before:
                before = self._tokens.get(stream, "")
                further = {"nextToken": before} if before else {}
                answer = self._aws.call("logs", "get_log_events", **where, **further)
                for event in answer["events"]:
                    self._take(host, event["message"])
                self._tokens[stream] = answer["nextForwardToken"]  # at the end of the stream, the same again

    def _take(self, host: str, message: str) -> None:
        """One line of a host: the toolkit marks those of MPI ranks."""
        if tagged := TOOLKIT_TAG.match(message):
            self._receive_line(f"worker-{tagged[1]}", tagged[3])
            return
        for worker, text, _ in output.attributed(host, message, "stdout"):
            self._receive_line(worker, text)

    def _reason_of(self, state: RunState) -> str:
        if state is not RunState.FAILED:
            return ""
        said = self._description.get("FailureReason", "SageMaker gave no reason")
        return f"{self.name} failed: {said}\n{output.last_lines(list(map(str, self.logs())))}"
