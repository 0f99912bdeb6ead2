"""What the workshop has made in an account and has not removed, found by its tag; and how to remove it.

    for thing in find(aws):
        print(thing)
        remove(thing, aws)

SageMaker keeps the records of jobs that have ended; they cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from workshop_utils.launchers.sagemaker.calls import Aws, AwsError
from workshop_utils.launchers.sagemaker.request import TAG
from workshop_utils.launchers.sagemaker.run import LOG_GROUP

Kind = Literal["running job", "warm instances", "log stream", "bucket", "image repository", "stack"]
AT_ONCE = 1000  # objects that S3 deletes in one call


@dataclass(frozen=True)
class Remains:
    """One thing that the workshop has left in the account."""

    kind: Kind
    name: str
    costs: str  # what leaving it costs, in words

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.costs})"


def find(aws: Aws) -> list[Remains]:
    """Everything that bears the workshop's tag, in the order in which it is best removed.

    Raises:
        AwsError: where the account may not be looked at.
    """
    return [*_jobs(aws), *_buckets(aws), *_repositories(aws), *_stacks(aws)]


def remove(thing: Remains, aws: Aws) -> None:
    """Remove `thing` for good. Raises AwsError where AWS refuses."""
    if thing.kind == "running job":
        aws.call("sagemaker", "stop_training_job", TrainingJobName=thing.name)
    elif thing.kind == "warm instances":
        cold = {"KeepAlivePeriodInSeconds": 0}
        aws.call("sagemaker", "update_training_job", TrainingJobName=thing.name, ResourceConfig=cold)
    elif thing.kind == "log stream":
        aws.call("logs", "delete_log_stream", logGroupName=LOG_GROUP, logStreamName=thing.name)
    elif thing.kind == "bucket":
        _empty(thing.name, aws)
        aws.call("s3", "delete_bucket", Bucket=thing.name)
    elif thing.kind == "image repository":
        aws.call("ecr", "delete_repository", repositoryName=thing.name, force=True)
    else:
        aws.call("cloudformation", "delete_stack", StackName=thing.name)


def _is_ours(tags: list[dict[str, Any]]) -> bool:
    return any({"Key": tag.get("Key"), "Value": tag.get("Value")} == TAG for tag in tags)


def _jobs(aws: Aws) -> Iterator[Remains]:
    """Running jobs and warm instances, which cost money by the second, and the logs of jobs that have ended."""
    for summary in aws.pages("sagemaker", "list_training_jobs", "TrainingJobSummaries", MaxResults=100):
        name = summary["TrainingJobName"]
        tags = list(aws.pages("sagemaker", "list_tags", "Tags", ResourceArn=summary["TrainingJobArn"]))
        if not _is_ours(tags):
            continue
        if summary["TrainingJobStatus"] == "InProgress":
            yield Remains("running job", name, "costs money every second")
            continue
        warm = summary.get("WarmPoolStatus", {}).get("Status")
        if warm in ("Available", "InUse"):
            yield Remains("warm instances", name, "cost money every second")
        for stream in _log_streams(name, aws):
            yield Remains("log stream", stream, "costs next to nothing")


def _log_streams(job: str, aws: Aws) -> Iterator[str]:
    where = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{job}/"}
    try:
        for stream in aws.pages("logs", "describe_log_streams", "logStreams", **where):
            yield stream["logStreamName"]
    except AwsError as error:
        if error.code != "ResourceNotFoundException":  # no job of this account has ever printed anything
            raise


def _buckets(aws: Aws) -> Iterator[Remains]:
    for bucket in aws.call("s3", "list_buckets")["Buckets"]:
        name = bucket["Name"]
        try:
            tags = aws.call("s3", "get_bucket_tagging", Bucket=name)["TagSet"]
        except AwsError as error:
            if error.code in (
                "NoSuchTagSet",
                "AccessDenied",
                "PermanentRedirect",
                "IllegalLocationConstraintException",
            ):
                continue  # it has none, or is not ours to look at, or is in another region
            raise
        if _is_ours(tags):
            yield Remains("bucket", name, "its contents cost a little every month")


def _empty(bucket: str, aws: Aws) -> None:
    while True:
        found = aws.call("s3", "list_objects_v2", Bucket=bucket, MaxKeys=AT_ONCE).get("Contents", [])
        if not found:
            return
        keys = [{"Key": entry["Key"]} for entry in found]
        aws.call("s3", "delete_objects", Bucket=bucket, Delete={"Objects": keys, "Quiet": True})


def _repositories(aws: Aws) -> Iterator[Remains]:
    for repository in aws.pages("ecr", "describe_repositories", "repositories"):
        tags = aws.call("ecr", "list_tags_for_resource", resourceArn=repository["repositoryArn"])["tags"]
        if _is_ours(tags):
            yield Remains("image repository", repository["repositoryName"], "costs by the GB every month")


def _stacks(aws: Aws) -> Iterator[Remains]:
    for stack in aws.pages("cloudformation", "describe_stacks", "Stacks"):
        if _is_ours(stack.get("Tags", [])) and stack["StackStatus"] != "DELETE_COMPLETE":
            yield Remains(
                "stack", stack["StackName"], "a notebook instance in it costs money every second it runs"
            )
