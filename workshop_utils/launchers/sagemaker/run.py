"""A training job that was started on SageMaker, or on the stand-in for it: the same Run as everywhere."""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

from workshop_utils.launchers import mpirun
from workshop_utils.launchers.sagemaker.calls import Aws, AwsError
from workshop_utils.launchers.sagemaker.preflight import Preflight
from workshop_utils.launchers.sagemaker.request import Request
from workshop_utils.launchers.sagemaker.upload import split_uri
from workshop_utils.runs import Run, RunState

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
POLL_SECONDS = 5.0
STAND_IN_POLL_SECONDS = 0.25
# CloudWatch shows lines some seconds after they were printed, so after a job's end it is asked again.
LATE_LOOKS, LATE_SECONDS = 2, 5.0
LAST_LINES = 12  # in the message of a job that failed
BLIND_POLLS = 12  # so often in a row may the state not be had, before the run is given up

STATES = {"Completed": RunState.SUCCEEDED, "Failed": RunState.FAILED, "Stopped": RunState.STOPPED}
# What the toolkit writes before each line of an MPI rank: [1,mpirank:3,algo-2]<stdout>:text.
TOOLKIT_TAG = re.compile(r"\[\d+,mpirank:(\d+),algo-\d+\]<(stdout|stderr)>: ?(.*)")


class SageMakerRun(Run):
    """A run on SageMaker. Its workers are called as their hosts are; leaving its `with` block stops the job."""

    def __init__(
        self,
        request: Request,
        aws: Aws,
        preflight: Preflight,
        hosts: tuple[str, ...],
        poll_seconds: float | None = None,
    ) -> None:
        super().__init__(request.name, hosts)
        self._poll_seconds = poll_seconds or (STAND_IN_POLL_SECONDS if aws.is_stand_in else POLL_SECONDS)
        self.preflight = preflight
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

    @property
    def billed_seconds(self) -> int | None:
        """The seconds that each instance is paid for, once SageMaker has said."""
        return self._description.get("BillableTimeInSeconds")

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
                blind += 1
                state = RunState.RUNNING
                if blind == BLIND_POLLS:
                    self._finish(
                        RunState.FAILED, f"{self.name} cannot be seen any more, and may still run. {error}"
                    )
                    return
            if state is not RunState.RUNNING:
                self._read_late_lines()
                self._finish(state, self._reason_of(state))
                return
            self._wake.wait(self._poll_seconds)
            self._wake.clear()

    def _look(self) -> RunState:
        self._description = self._aws.call("sagemaker", "describe_training_job", TrainingJobName=self.name)
        return STATES.get(self._description["TrainingJobStatus"], RunState.RUNNING)

    def _read_logs(self) -> None:
        """Take in what the hosts have printed since the last time; each has a log stream of its own."""
        where = {"logGroupName": LOG_GROUP}
        try:
            streams = list(
                self._aws.pages(
                    "logs", "describe_log_streams", "logStreams", **where, logStreamNamePrefix=f"{self.name}/"
                )
            )
        except AwsError as error:
            if error.code == "ResourceNotFoundException":  # nobody has printed anything yet
                return
            raise
        for stream in streams:
            self._read_stream(stream["logStreamName"])

    def _read_late_lines(self) -> None:
        """Look again for what a job printed at its end; a stand-in has it at once."""
        for _ in range(0 if self._aws.is_stand_in else LATE_LOOKS):
            time.sleep(LATE_SECONDS)
            # The job's end is known; lines that cannot be had do not change it.
            with contextlib.suppress(AwsError):
                self._read_logs()

    def _read_stream(self, name: str) -> None:
        host = name.partition("/")[2].rpartition("-")[0] or name
        while True:
            token = self._tokens.get(name)
            further = {"nextToken": token} if token else {}
            answer = self._aws.call(
                "logs", "get_log_events",
                logGroupName=LOG_GROUP, logStreamName=name, startFromHead=True, **further,
            )  # fmt: skip
            for event in answer["events"]:
                self._take(host, event["message"])
            self._tokens[name] = answer["nextForwardToken"]
            if not answer["events"] or answer["nextForwardToken"] == token:
                return

    def _take(self, host: str, message: str) -> None:
        """One line of a host: the toolkit marks those of MPI ranks."""
        tagged = TOOLKIT_TAG.match(message)
        if tagged:
            self._receive_line(f"worker-{tagged[1]}", tagged[3])
            return
        for worker, text, _ in mpirun.lines(host, message, "stdout"):
            self._receive_line(worker, text)

    def _reason_of(self, state: RunState) -> str:
        if state is not RunState.FAILED:
            return ""
        said = self._description.get("FailureReason", "SageMaker gave no reason")
        last = [f"  {line}" for line in list(self.logs())[-LAST_LINES:]]
        printed = "The last lines of its log:\n" + "\n".join(last) if last else "Its log is empty."
        return f"{self.name} failed: {said}\n{printed}"
