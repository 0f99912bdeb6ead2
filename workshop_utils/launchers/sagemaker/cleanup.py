"""What the workshop has left in one region of an account, whoever started it, found by its tag; and its removal.

    remains, unseen = find(aws)
    for thing in remains:
        print(thing)
        remove(thing, aws)

Records and logs of jobs that have ended stay. CloudWatch keeps the logs for ever, and charges a little by the GB.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from workshop_utils.launchers.sagemaker.account import NO_SUCH_BUCKET, NOTEBOOK, TAG, Aws, AwsError

# AWS's codes for what has no tags, or was removed after it had been listed.
GONE = {*NO_SUCH_BUCKET, "NoSuchTagSet", "RepositoryNotFoundException", "ResourceNotFound"}

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


Tagged = tuple[Remains, Callable[[], list[Any]]]  # what is perhaps ours, and how to get its tags


def find(aws: Aws) -> tuple[list[Remains], list[str]]:
    """What has the workshop's tag, in the order in which it is best removed; and what could not be seen.

    Of image repositories only those whose name begins as the workshop's do are asked for their tags.

    Raises:
        AwsError: if there is no account, or AWS does not answer.
    """
    remains: list[Remains] = []
    unseen: list[str] = []
    for look in (_jobs, _buckets, _repositories, _notebooks, _stacks):
        closed = []
        try:
            for thing, tags_of in look(aws):
                try:
                    if TAG in tags_of():
                        remains.append(thing)
                except AwsError as error:  # one thing must not hide the others
                    if _is_denied(error):
                        closed.append(thing.name)
                    elif error.code not in GONE:
                        raise
        except AwsError as error:
            if not _is_denied(error):
                raise
            unseen.append(f"{look.__name__.strip('_')}: {error}")
        if closed:
            unseen.append(f"{look.__name__.strip('_')}: you may not read the tags of {', '.join(closed)}")
    return remains, unseen


def _is_denied(error: AwsError) -> bool:
    return "denied" in f"{error.code} {error}".lower()


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


def _jobs(aws: Aws) -> Iterator[Tagged]:
    running = {"StatusEquals": "InProgress", "MaxResults": 100}
    for summary in aws.pages("sagemaker", "list_training_jobs", "TrainingJobSummaries", **running):
        thing = Remains("running job", summary["TrainingJobName"], "costs money every second")
        yield thing, partial(_tags, aws, summary["TrainingJobArn"])


def _tags(aws: Aws, arn: str) -> list[Any]:
    return list(aws.pages("sagemaker", "list_tags", "Tags", ResourceArn=arn))


def _tags_of_bucket(aws: Aws, name: str) -> list[Any]:
    return list(aws.call("s3", "get_bucket_tagging", Bucket=name)["TagSet"])


def _tags_of_repository(aws: Aws, arn: str) -> list[Any]:
    return list(aws.call("ecr", "list_tags_for_resource", resourceArn=arn)["tags"])


def _notebooks(aws: Aws) -> Iterator[Tagged]:
    """Those that run, and those that were stopped, whose volume still costs."""
    for notebook in aws.pages("sagemaker", "list_notebook_instances", "NotebookInstances"):
        status = notebook["NotebookInstanceStatus"]
        is_off = status in ("Stopped", "Failed")
        costs = "its volume costs every month" if is_off else "costs money every second"
        if status != "Deleting":
            thing = Remains("notebook instance", notebook["NotebookInstanceName"], costs)
            yield thing, partial(_tags, aws, notebook["NotebookInstanceArn"])


def _buckets(aws: Aws) -> Iterator[Tagged]:
    """Those of the region alone: an account lists the buckets of all."""
    for bucket in aws.pages("s3", "list_buckets", "Buckets", BucketRegion=aws.region):
        thing = Remains("bucket", bucket["Name"], "its contents cost a little every month")
        yield thing, partial(_tags_of_bucket, aws, thing.name)


def _repositories(aws: Aws) -> Iterator[Tagged]:
    for repository in aws.pages("ecr", "describe_repositories", "repositories"):
        thing = Remains("image repository", repository["repositoryName"], "costs by the GB every month")
        if thing.name.startswith("workshop-"):  # a learner may not ask for the tags of others
            yield thing, partial(_tags_of_repository, aws, repository["repositoryArn"])


def _stacks(aws: Aws) -> Iterator[Tagged]:
    for stack in aws.pages("cloudformation", "describe_stacks", "Stacks"):
        if stack["StackStatus"] != "DELETE_COMPLETE":
            costs = "costs what is in it; network and roles cost nothing"
            yield Remains("stack", stack["StackName"], costs), partial(stack.get, "Tags", [])
