"""What the workshop has left in one region of an account, whoever started it, found by its tag; and its removal.

    for thing in find(aws):
        print(thing)
        remove(thing, aws)

AWS keeps one list of all that bears a tag; what was made a minute ago may not be in it yet. Records and logs of jobs
that have ended stay. CloudWatch keeps the logs for ever, and charges a little by the GB.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from workshop_utils.launchers.sagemaker.account import NOTEBOOK, TAG, Aws, AwsError

# By kind, in the order in which things are best removed: AWS's name for it, and what leaving it costs.
KINDS = {
    "running job": ("sagemaker:training-job", "costs money every second"),
    "bucket": ("s3:bucket", "its contents cost a little every month"),
    "image repository": ("ecr:repository", "costs by the GB every month"),
    "notebook instance": ("sagemaker:notebook-instance", "costs money every second, and stopped every month"),
    "stack": ("cloudformation:stack", "costs what is in it; network and roles cost nothing"),
}
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


def find(aws: Aws) -> list[Remains]:
    """Everything that has the workshop's tag, in the order in which it is best removed.

    Raises:
        AwsError: if there is no account, it may not be looked at, or AWS does not answer.
    """
    # SageMaker writes names in ARNs in small letters, and keeps jobs that have ended.
    names: dict[str, str] = {}
    running = {"StatusEquals": "InProgress", "MaxResults": 100}
    for job in aws.pages("sagemaker", "list_training_jobs", "TrainingJobSummaries", **running):
        names[job["TrainingJobArn"]] = job["TrainingJobName"]
    for notebook in aws.pages("sagemaker", "list_notebook_instances", "NotebookInstances"):
        names[notebook["NotebookInstanceArn"]] = notebook["NotebookInstanceName"]
    remains = []
    tagged = {"TagFilters": [{"Key": TAG["Key"], "Values": [TAG["Value"]]}]}
    for kind, (resource_type, costs) in KINDS.items():
        wanted = {**tagged, "ResourceTypeFilters": [resource_type]}
        for entry in aws.pages(
            "resourcegroupstaggingapi", "get_resources", "ResourceTagMappingList", **wanted
        ):
            arn = entry["ResourceARN"]
            if resource_type.startswith("sagemaker:") and arn not in names:
                continue
            # arn:aws:s3:::NAME, or arn:aws:cloudformation:REGION:ACCOUNT:stack/NAME/ID
            name = names.get(arn) or arn.split(":", 5)[5].split("/")[:2][-1]
            remains.append(Remains(kind, name, costs))
    return remains


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
