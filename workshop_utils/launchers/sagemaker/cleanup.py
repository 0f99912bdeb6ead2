"""What the workshop has left in an account, found by its tag; and how to remove it.

    remains, unseen = find(aws)
    for thing in remains:
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
    "running notebook instance": ("sagemaker", "stop_notebook_instance", "NotebookInstanceName", {}),
    "stopped notebook instance": ("sagemaker", "delete_notebook_instance", "NotebookInstanceName", {}),
    "endpoint": ("sagemaker", "delete_endpoint", "EndpointName", {}),
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


def find(aws: Aws) -> tuple[list[Remains], list[str]]:
    """Everything that has the workshop's tag, in the order in which it is best removed; and what could not be seen.

    Raises:
        AwsError: if there is no account, or AWS does not answer.
    """
    remains: list[Remains] = []
    unseen: list[str] = []
    for look in (_jobs, _notebooks, _endpoints, _buckets, _repositories, _stacks):
        try:
            remains += look(aws)
        except AwsError as error:
            if "denied" not in f"{error.code} {error}".lower():
                raise
            unseen.append(f"{look.__name__.strip('_')}: {error}")
    return remains, unseen


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
        if not _is_ours(summary["TrainingJobArn"], aws):
            continue
        if summary["TrainingJobStatus"] == "InProgress":
            yield Remains("running job", name, "costs money every second")
            continue
        for stream in log_streams(name, aws):
            yield Remains("log stream", stream, "costs next to nothing")


def _is_ours(arn: str, aws: Aws) -> bool:
    return TAG in aws.pages("sagemaker", "list_tags", "Tags", ResourceArn=arn)


def _notebooks(aws: Aws) -> Iterator[Remains]:
    """Those that run, and those that were stopped, whose volume still costs. One in a stack goes with the stack."""
    for notebook in aws.pages("sagemaker", "list_notebook_instances", "NotebookInstances"):
        if _is_ours(notebook["NotebookInstanceArn"], aws):
            stopped = notebook["NotebookInstanceStatus"] in ("Stopped", "Failed")
            kind = f"{'stopped' if stopped else 'running'} notebook instance"
            costs = (
                "its volume costs every month"
                if stopped
                else "costs money every second; stop it, then delete it"
            )
            yield Remains(kind, notebook["NotebookInstanceName"], costs)


def _endpoints(aws: Aws) -> Iterator[Remains]:
    """Models that are served; the workshop starts none, but one that a learner has tagged is found."""
    for endpoint in aws.pages("sagemaker", "list_endpoints", "Endpoints"):
        if _is_ours(endpoint["EndpointArn"], aws):
            yield Remains("endpoint", endpoint["EndpointName"], "costs money every second")


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
        name = repository["repositoryName"]
        if not name.startswith("workshop-"):  # a learner may not ask for the tags of others
            continue
        if TAG in aws.call("ecr", "list_tags_for_resource", resourceArn=repository["repositoryArn"])["tags"]:
            yield Remains("image repository", name, "costs by the GB every month")


def _stacks(aws: Aws) -> Iterator[Remains]:
    costs = "a notebook instance in it costs money every second it runs"
    for stack in aws.pages("cloudformation", "describe_stacks", "Stacks"):
        if TAG in stack.get("Tags", []) and stack["StackStatus"] != "DELETE_COMPLETE":
            yield Remains("stack", stack["StackName"], costs)
