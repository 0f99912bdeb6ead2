"""An AWS account that exists on this machine alone: moto's server, in which training jobs are carried out for real.

A program: `python -m workshop_utils.launchers.sagemaker.account_server` listens on a loopback port, says which, and
serves until it is told to end. S3, IAM, EC2, STS, logs and CloudFormation are moto's (http.server by werkzeug). Moto
declares a training job done in the moment it is created; here CreateTrainingJob starts stand-in instances, which read
their source and data from S3, print into CloudWatch's logs, and leave their model in S3.
"""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from workshop_utils.launchers.sagemaker import request as requests
from workshop_utils.launchers.sagemaker.account import CREDENTIALS
from workshop_utils.launchers.sagemaker.calls import Aws, AwsError
from workshop_utils.launchers.sagemaker.instances import Assignment, InstancesRun
from workshop_utils.launchers.sagemaker.run import LOG_GROUP
from workshop_utils.launchers.sagemaker.upload import put, split_uri
from workshop_utils.runs import RunState

SDK_DRIVERS = "sm_drivers"  # the channel in which the Python SDK brings drivers
LOG_SECONDS = 0.2  # so often are lines put into CloudWatch's logs
FINAL = {
    RunState.SUCCEEDED: ("Completed", "Completed"),
    RunState.STOPPED: ("Stopped", "Stopped"),
    RunState.FAILED: ("Failed", "Failed"),
}
Reply = tuple[str, list[tuple[str, str]], bytes]
StartResponse = Callable[..., Any]


class Refused(Exception):
    """A request that SageMaker would refuse; the code is AWS's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Job:
    """One training job: its instances, and what a DescribeTrainingJob says of it."""

    def __init__(self, body: dict[str, Any], aws: Aws) -> None:
        self.body, self._aws = body, aws
        self.name: str = body["TrainingJobName"]
        self.status, self.stage, self.reason = "InProgress", "Starting", ""
        self.created, self.ended = time.time(), 0.0
        self._lines: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._run: InstancesRun | None = None
        self._told_to_stop = False
        self._streams: dict[str, str] = {}
        threading.Thread(target=self._carry_out, daemon=True).start()

    def overlay(self) -> dict[str, Any]:
        """What differs from moto's description, which holds the job for done."""
        values: dict[str, Any] = {
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.stage,
            "CreationTime": self.created,
            "Environment": self.body.get("Environment", {}),
        }
        if self.reason:
            values["FailureReason"] = self.reason
        if self.ended:
            values["TrainingEndTime"] = self.ended
            values["BillableTimeInSeconds"] = max(1, round(self.ended - self.created))
        return values

    def stop(self) -> None:
        """Ask the instances to end; the status follows."""
        if self.status != "InProgress":
            raise Refused("ValidationException", f"The request was rejected: the job is {self.status}")
        self.status, self.stage = "Stopping", "Stopping"
        with self._lock:
            self._told_to_stop = True
            run = self._run
        if run is not None:
            threading.Thread(target=run.stop, daemon=True).start()

    def line(self, worker: str, text: str) -> None:
        """Take a line to the log of a host; the toolkit marks those of MPI ranks, which the first host prints."""
        if worker.startswith("algo-"):
            host = worker
        else:
            host, text = "algo-1", f"[1,mpirank:{worker.rpartition('-')[2]},algo-1]<stdout>:{text}"
        with self._lock:
            self._lines.append((host, text))

    def _carry_out(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="workshop-account-") as folder:
                self._train(Path(folder))
        except (AwsError, ValueError, OSError, tarfile.TarError) as error:
            self._end(RunState.FAILED, f"ClientError: {error}")

    def _train(self, folder: Path) -> None:
        self.stage = "Downloading"
        channels = {
            each["ChannelName"]: self._download(each, folder) for each in self.body["InputDataConfig"]
        }
        members, source = None, folder / "sourcedir.tar.gz"
        if SDK_DRIVERS in channels:  # the SDK's own scripts, which come too, are for containers with /opt/ml
            listed = channels[SDK_DRIVERS] / "distributed_drivers" / requests.MEMBERS_FILE
            members, source = json.loads(listed.read_text()), channels[requests.CODE]
        elif requests.DRIVERS in channels:
            members = json.loads((channels[requests.DRIVERS] / requests.MEMBERS_FILE).read_text())
            source = channels[requests.CODE] / source.name
        else:
            uri = json.loads(self.body["HyperParameters"]["sagemaker_submit_directory"])
            source.write_bytes(self._fetch(*split_uri(uri)))
        kept = self._fetch_checkpoints(folder / "checkpoints")
        self.stage = "Training"
        run = LoggedRun(
            self, Assignment(self.body, members, source, channels, checkpoints=kept), folder / "model"
        )
        with self._lock:
            self._run = run
            stopped_before = self._told_to_stop
        if stopped_before:
            run.stop()
        while run.state is RunState.RUNNING:
            time.sleep(LOG_SECONDS)
            self._write_logs()
        self._write_logs()
        self._store_checkpoints(kept)  # however it ended: they are for the next launch
        if run.state is RunState.SUCCEEDED:
            self.stage = "Uploading"
            self._upload_model(folder / "model")
        self._end(run.state, run.reason)

    def _end(self, state: RunState, reason: str) -> None:
        self.ended, self.reason = time.time(), reason[:1024]
        self.status, self.stage = FINAL[state]

    def _download(self, channel: Mapping[str, Any], folder: Path) -> Path:
        target = folder / "channels" / channel["ChannelName"]
        target.mkdir(parents=True)
        bucket, prefix = split_uri(channel["DataSource"]["S3DataSource"]["S3Uri"])
        found = self._keys(bucket, prefix)
        if not found:
            raise ValueError(
                f"there is nothing at s3://{bucket}/{prefix}, of channel {channel['ChannelName']}"
            )
        for key in found:
            path = target / (key.removeprefix(prefix).lstrip("/") or Path(key).name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._fetch(bucket, key))
        return target

    def _fetch(self, bucket: str, key: str) -> bytes:
        content: bytes = self._aws.call("s3", "get_object", Bucket=bucket, Key=key)["Body"].read()
        return content

    def _fetch_checkpoints(self, folder: Path) -> Path:
        """What an earlier launch of the job has kept, where the request says that checkpoints are kept at all."""
        folder.mkdir()
        if "CheckpointConfig" in self.body:
            bucket, prefix = split_uri(self.body["CheckpointConfig"]["S3Uri"])
            for key in self._keys(bucket, f"{prefix}/"):
                path = folder / key.removeprefix(f"{prefix}/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._fetch(bucket, key))
        return folder

    def _store_checkpoints(self, folder: Path) -> None:
        """What SageMaker does all the time; here at the end, when no file is half written."""
        if "CheckpointConfig" in self.body:
            uri = self.body["CheckpointConfig"]["S3Uri"]
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                put(f"{uri}/{path.relative_to(folder).as_posix()}", path.read_bytes(), self._aws)

    def _keys(self, bucket: str, prefix: str) -> list[str]:
        found = self._aws.call("s3", "list_objects_v2", Bucket=bucket, Prefix=prefix).get("Contents", [])
        return [entry["Key"] for entry in found]

    def _upload_model(self, folder: Path) -> None:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz") as file:
            for path in sorted(folder.iterdir()):
                file.add(path, path.name)
        put(
            f"{self.body['OutputDataConfig']['S3OutputPath']}/{self.name}/output/model.tar.gz",
            archive.getvalue(),
            self._aws,
        )

    def _write_logs(self) -> None:
        """Put what was printed since the last time into CloudWatch's logs, a stream for each host."""
        with self._lock:
            fresh, self._lines = self._lines, []
        now = round(time.time() * 1000)
        for host in dict.fromkeys(host for host, _ in fresh):
            if host not in self._streams:
                self._streams[host] = f"{self.name}/{host}-{now}"
                self._make_stream(self._streams[host])
            events = [{"timestamp": now, "message": text or " "} for of, text in fresh if of == host]
            self._aws.call(
                "logs", "put_log_events",
                logGroupName=LOG_GROUP, logStreamName=self._streams[host], logEvents=events,
            )  # fmt: skip

    def _make_stream(self, name: str) -> None:
        try:
            self._aws.call("logs", "create_log_group", logGroupName=LOG_GROUP)
        except AwsError as error:
            if error.code != "ResourceAlreadyExistsException":
                raise
        self._aws.call("logs", "create_log_stream", logGroupName=LOG_GROUP, logStreamName=name)


class LoggedRun(InstancesRun):
    """A run whose every line, metrics too, goes into the job's log."""

    def __init__(self, job: Job, assignment: Assignment, output: Path) -> None:
        self._job = job
        output.mkdir()
        super().__init__(assignment, None, output)

    def _receive_line(self, worker: str, text: str, stream: str = "stdout") -> None:
        self._job.line(worker, text)
        super()._receive_line(worker, text, stream)


class TrainingJobs:
    """Stands before moto's application, and answers for training jobs."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()
        self.endpoint = ""

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        service, _, operation = environ.get("HTTP_X_AMZ_TARGET", "").partition(".")
        handler = getattr(self, f"_{operation}", None) if service == "SageMaker" else None
        if handler is None:
            return self._application(environ, start_response)
        content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(content)
        try:
            status, headers, body = handler(environ, json.loads(content or b"{}"))
        except Refused as refused:
            body = json.dumps({"__type": refused.code, "message": str(refused)}).encode()
            status, headers = "400 BAD REQUEST", [("Content-Type", "application/x-amz-json-1.1")]
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body]

    def _CreateTrainingJob(self, environ: dict[str, Any], body: dict[str, Any]) -> Reply:  # noqa: N802 (AWS's name)
        aws = Aws(_region_of(environ), self.endpoint, CREDENTIALS)
        role = body["RoleArn"].rpartition("/")[2]
        try:
            aws.call("iam", "get_role", RoleName=role)
        except AwsError:
            raise Refused(
                "ValidationException",
                f"Could not assume role {body['RoleArn']}. Please ensure that the role exists and allows principal "
                "'sagemaker.amazonaws.com' to assume the role.",
            ) from None
        with self._lock:
            if body["TrainingJobName"] in self._jobs:
                raise Refused(
                    "ResourceInUse", f"Training job names must be unique: {body['TrainingJobName']}"
                )
            reply = self._forward(environ)
            if reply[0].startswith("200"):
                self._jobs[body["TrainingJobName"]] = Job(body, aws)
        return reply

    def _DescribeTrainingJob(self, environ: dict[str, Any], body: dict[str, Any]) -> Reply:  # noqa: N802
        status, headers, content = self._forward(environ)
        job = self._jobs.get(body.get("TrainingJobName", ""))
        if job is not None and status.startswith("200"):
            content = json.dumps({**json.loads(content), **job.overlay()}).encode()
        return status, headers, content

    def _ListTrainingJobs(self, environ: dict[str, Any], body: dict[str, Any]) -> Reply:  # noqa: N802
        wanted = body.get("StatusEquals")
        forwarded = json.dumps(
            {name: value for name, value in body.items() if name != "StatusEquals"}
        ).encode()
        environ |= {"wsgi.input": io.BytesIO(forwarded), "CONTENT_LENGTH": str(len(forwarded))}
        status, headers, content = self._forward(environ)
        if status.startswith("200"):
            answer = json.loads(content)
            for summary in answer["TrainingJobSummaries"]:
                job = self._jobs.get(summary["TrainingJobName"])
                summary["TrainingJobStatus"] = job.status if job else summary["TrainingJobStatus"]
            listed = answer["TrainingJobSummaries"]
            answer["TrainingJobSummaries"] = [
                summary for summary in listed if wanted in (None, summary["TrainingJobStatus"])
            ]
            content = json.dumps(answer).encode()
        return status, headers, content

    def _StopTrainingJob(self, environ: dict[str, Any], body: dict[str, Any]) -> Reply:  # noqa: N802
        job = self._jobs.get(body.get("TrainingJobName", ""))
        if job is None:
            raise Refused("ResourceNotFound", f"Requested resource not found: {body.get('TrainingJobName')}")
        job.stop()
        return "200 OK", [("Content-Type", "application/x-amz-json-1.1")], b"{}"

    def _forward(self, environ: dict[str, Any]) -> Reply:
        """Moto's own answer."""
        told: list[Any] = []
        chunks = self._application(environ, lambda status, headers, *_: told.extend([status, headers]))
        content = b"".join(chunks)
        return told[0], told[1], content


def _region_of(environ: Mapping[str, Any]) -> str:
    """The region that a request was signed for (Signature Version 4: Credential=KEY/DATE/REGION/SERVICE/...)."""
    found = re.search(r"Credential=[^/]+/\d+/([a-z0-9-]+)/", environ.get("HTTP_AUTHORIZATION", ""))
    return found[1] if found else "us-east-1"


def main() -> None:
    """Serve on a loopback port that the kernel chooses."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would print every request
    application = TrainingJobs(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    application.endpoint = f"http://127.0.0.1:{server.server_port}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"listening at {application.endpoint}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
