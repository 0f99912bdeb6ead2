"""What the workshop has left in an account, found by its tag; and how to remove it.

    for thing in find(aws):
        print(thing)
        remove(thing, aws)

SageMaker keeps the records of jobs that have ended; they cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from workshop_utils.launchers.sagemaker.account import TAG, Aws, AwsError
from workshop_utils.launchers.sagemaker.launcher import LOG_GROUP, log_streams

# By kind: the service, its operation, the parameter that names the thing, and other parameters.
REMOVALS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "running job": ("sagemaker", "stop_training_job", "TrainingJobName", {}),
    "log stream": ("logs", "delete_log_stream", "logStreamName", {"logGroupName": LOG_GROUP}),
    "bucket": ("s3", "delete_bucket", "Bucket", {}),
    "image repository": ("ecr", "delete_repository", "repositoryName", {"force": True}),
    "stack": ("cloudformation", "delete_stack", "StackName", {}),
}
# What a bucket answers that has no tags, is not ours to look at, or is in another region.
NOT_OURS = ("NoSuchTagSet", "AccessDenied", "PermanentRedirect", "IllegalLocationConstraintException")


@dataclass(frozen=True)
class Remains:
    """One thing that the workshop has left in the account."""

    kind: str
    name: str
    costs: str  # what leaving it costs, in words

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.costs})"


def find(aws: Aws) -> list[Remains]:
    """Everything that has the workshop's tag, in the order in which it is best removed.

    Raises:
        AwsError: if AWS refuses to list it.
    """
    return [*_jobs(aws), *_buckets(aws), *_repositories(aws), *_stacks(aws)]


def remove(thing: Remains, aws: Aws) -> None:
    """Remove `thing` for good. Raises AwsError if AWS refuses."""
    if thing.kind == "bucket":
        for entry in aws.pages("s3", "list_objects_v2", "Contents", Bucket=thing.name):
            aws.call("s3", "delete_object", Bucket=thing.name, Key=entry["Key"])
    service, operation, named, options = REMOVALS[thing.kind]
    aws.call(service, operation, **{named: thing.name}, **options)


def _jobs(aws: Aws) -> Iterator[Remains]:
    """Running jobs, which cost money by the second, and the logs of jobs that have ended."""
    for summary in aws.pages("sagemaker", "list_training_jobs", "TrainingJobSummaries", MaxResults=100):
        name = summary["TrainingJobName"]
        if TAG not in aws.pages("sagemaker", "list_tags", "Tags", ResourceArn=summary["TrainingJobArn"]):
            continue
        if summary["TrainingJobStatus"] == "InProgress":
            yield Remains("running job", name, "costs money every second")
            continue
        for stream in log_streams(name, aws):
            yield Remains("log stream", stream, "costs next to nothing")


def _buckets(aws: Aws) -> Iterator[Remains]:
    for bucket in aws.call("s3", "list_buckets")["Buckets"]:
        try:
            tags = aws.call("s3", "get_bucket_tagging", Bucket=bucket["Name"])["TagSet"]
        except AwsError as error:
            if error.code not in NOT_OURS:
                raise
        else:
            if TAG in tags:
                yield Remains("bucket", bucket["Name"], "its contents cost a little every month")


def _repositories(aws: Aws) -> Iterator[Remains]:
    for repository in aws.pages("ecr", "describe_repositories", "repositories"):
        if TAG in aws.call("ecr", "list_tags_for_resource", resourceArn=repository["repositoryArn"])["tags"]:
            yield Remains("image repository", repository["repositoryName"], "costs by the GB every month")


def _stacks(aws: Aws) -> Iterator[Remains]:
    costs = "a notebook instance in it costs money every second it runs"
    for stack in aws.pages("cloudformation", "describe_stacks", "Stacks"):
        if TAG in stack.get("Tags", []) and stack["StackStatus"] != "DELETE_COMPLETE":
            yield Remains("stack", stack["StackName"], costs)
