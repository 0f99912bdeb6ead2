"""What the workshop has left in one region of an account, whoever started it, found by its tag; and its removal.

    remains, unseen = find(aws)
    for thing in remains:
        print(thing)
        remove(thing, aws)

Records and logs of jobs that have ended stay. CloudWatch keeps the logs for ever, and charges a little by the GB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from workshop_utils.launchers.sagemaker.account import NOTEBOOK, TAG, Aws, AwsError

# By kind: the service, its operation, the parameter that names the thing, and other parameters.
REMOVALS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "running job": ("sagemaker", "stop_training_job", "TrainingJobName", {}),
    "notebook instance": ("sagemaker", "delete_notebook_instance", "NotebookInstanceName", {}),
    "bucket": ("s3", "delete_bucket", "Bucket", {}),
    "image repository": ("ecr", "delete_repository", "repositoryName", {"force": True}),
    "stack": ("cloudformation", "delete_stack", "StackName", {}),
}


@dataclass(frozen=True)
class Remains:
    """One thing that the workshop has left in the account."""

    kind: str
    name: str
    costs: str  # what leaving it costs, in words

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.costs})"


def find(aws: Aws) -> tuple[list[Remains], list[str]]:
    """What has the workshop's tag, in the order in which it is best removed; and what could not be seen.

    Of image repositories only those whose name begins as the workshop's do are asked for their tags.

    Raises:
        AwsError: if there is no account, or AWS does not answer.
    """
    remains: list[Remains] = []
    unseen: list[str] = []
    for look in (_jobs, _buckets, _repositories, _notebooks, _stacks):
        try:
            for thing in look(aws):
                remains.append(thing)
        except AwsError as error:
            if "denied" not in f"{error.code} {error}".lower():
                raise
            unseen.append(f"{look.__name__.strip('_')}: {error}")
    return remains, unseen


def remove(thing: Remains, aws: Aws) -> None:
    """Remove `thing` for good; a stack or a notebook instance takes minutes. Raises AwsError if AWS refuses."""
    service, operation, named, options = REMOVALS[thing.kind]
    name = {named: thing.name}
    if thing.kind == "bucket":
        for entry in aws.pages("s3", "list_objects_v2", "Contents", Bucket=thing.name):
            aws.call("s3", "delete_object", Bucket=thing.name, Key=entry["Key"])
    if thing.kind == "notebook instance":
        if NOTEBOOK.is_file() and json.loads(NOTEBOOK.read_text())["ResourceName"] == thing.name:
            raise AwsError("you are on it: stop it, and remove it from another machine")
        status = aws.call("sagemaker", "describe_notebook_instance", **name)["NotebookInstanceStatus"]
        if status == "InService":
            aws.call("sagemaker", "stop_notebook_instance", **name)
        if status in ("InService", "Stopping"):
            aws.wait("sagemaker", "notebook_instance_stopped", **name)
    aws.call(service, operation, **name, **options)
    if thing.kind == "stack":
        aws.wait("cloudformation", "stack_delete_complete", **name)


def _jobs(aws: Aws) -> Iterator[Remains]:
    running = {"StatusEquals": "InProgress", "MaxResults": 100}
    for summary in aws.pages("sagemaker", "list_training_jobs", "TrainingJobSummaries", **running):
        if _is_ours(summary["TrainingJobArn"], aws):
            yield Remains("running job", summary["TrainingJobName"], "costs money every second")


def _is_ours(arn: str, aws: Aws) -> bool:
    return TAG in aws.pages("sagemaker", "list_tags", "Tags", ResourceArn=arn)


def _notebooks(aws: Aws) -> Iterator[Remains]:
    """Those that run, and those that were stopped, whose volume still costs."""
    for notebook in aws.pages("sagemaker", "list_notebook_instances", "NotebookInstances"):
        status = notebook["NotebookInstanceStatus"]
        if status != "Deleting" and _is_ours(notebook["NotebookInstanceArn"], aws):
            is_off = status in ("Stopped", "Failed")
            costs = "its volume costs every month" if is_off else "costs money every second"
            yield Remains("notebook instance", notebook["NotebookInstanceName"], costs)


def _buckets(aws: Aws) -> Iterator[Remains]:
    """Those of the region alone: an account lists the buckets of all."""
    closed = []
    for bucket in aws.pages("s3", "list_buckets", "Buckets", BucketRegion=aws.region):
        try:
            tags = aws.call("s3", "get_bucket_tagging", Bucket=bucket["Name"])["TagSet"]
        except AwsError as error:
            if error.code == "AccessDenied":
                closed.append(bucket["Name"])
            elif error.code != "NoSuchTagSet":
                raise
        else:
            if TAG in tags:
                yield Remains("bucket", bucket["Name"], "its contents cost a little every month")
    if closed:
        raise AwsError(f"you may not read the tags of {', '.join(closed)}", "AccessDenied")


def _repositories(aws: Aws) -> Iterator[Remains]:
    for repository in aws.pages("ecr", "describe_repositories", "repositories"):
        name = repository["repositoryName"]
        if not name.startswith("workshop-"):  # a learner may not ask for the tags of others
            continue
        if TAG in aws.call("ecr", "list_tags_for_resource", resourceArn=repository["repositoryArn"])["tags"]:
            yield Remains("image repository", name, "costs by the GB every month")


def _stacks(aws: Aws) -> Iterator[Remains]:
    for stack in aws.pages("cloudformation", "describe_stacks", "Stacks"):
        if TAG in stack.get("Tags", []) and stack["StackStatus"] != "DELETE_COMPLETE":
            yield Remains("stack", stack["StackName"], "costs what is in it; network and roles cost nothing")
