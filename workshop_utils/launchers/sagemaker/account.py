"""The AWS account that a launch talks to: AWS itself, or moto, an emulator of AWS on this machine.

    aws = connect()          # AWS if AWS_PROFILE is set, and otherwise moto's server, which ends with this process
    print(aws)               # which of the two it is
    aws.call("sagemaker", "describe_training_job", TrainingJobName="...")

Moto stores what it is told (buckets, roles, stacks, training jobs and their tags) and completes every training job at
once. It trains nothing; `emulator` does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.exceptions as errors
from botocore.config import Config

from workshop_utils.jobs import PlainError

TAG = {"Key": "made-by", "Value": "distributed-training-workshop"}  # by which the clean-up finds what we made
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
# A connection is retried, too; where AWS throttles, pauses of up to 1, 2, 4, 8 and 16 s lie between the tries.
PATIENT = Config(retries={"mode": "standard", "total_max_attempts": 6}, connect_timeout=5)
NO_SUCH_BUCKET = {"404", "NoSuchBucket", "NotFound"}

# On a notebook instance and in Studio there is a role, and no profile. Source: AWS, "Get notebook instance metadata".
NOTEBOOK = Path("/opt/ml/metadata/resource-metadata.json")

# In AWS's code, in small letters, or in its message, where credentials have expired or are unknown.
UNKNOWN = (
    "expiredtoken",
    "unrecognizedclient",
    "invalidclienttokenid",
    "invalidaccesskeyid",
    "security token",
)
LOGIN = "log in with `aws configure` or `aws sso login`, and name the profile in AWS_PROFILE"


class AwsError(PlainError, ValueError):
    """AWS refused, or did not answer; the message says what was asked, and AWS's reason."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Aws:
    """Clients of one account in one region, with the credentials of the environment.

    `endpoint` is where boto3 finds it: moto's server, or AWS in a VPC; None means AWS's public address.
    """

    region: str
    endpoint: str | None = field(default_factory=lambda: os.environ.get("AWS_ENDPOINT_URL") or None)
    clients: dict[str, Any] = field(default_factory=dict)

    @property
    def is_emulated(self) -> bool:
        """Whether the endpoint is on this machine, so that no call reaches AWS or costs anything."""
        return urlsplit(self.endpoint or "").hostname in LOOPBACK

    def __str__(self) -> str:
        if self.is_emulated:
            return f"an emulator of AWS at {self.endpoint}: nothing reaches AWS, nothing costs money"
        profile = os.environ.get("AWS_PROFILE", "default")
        who = "the role of this notebook" if NOTEBOOK.is_file() else f"profile {profile}"
        where = f" at {self.endpoint}" if self.endpoint else ""
        return f"AWS itself{where}, region {self.region}, {who}: what is started here is paid for"

    def client(self, service: str) -> Any:
        """The client of `service`. Raises AwsError if AWS_PROFILE names no profile."""
        if service not in self.clients:
            # The emulator takes any credentials, and must not need real ones.
            key = "testing" if self.is_emulated else None
            with explained():
                session: Any = boto3.Session(key, key, region_name=self.region)  # typed by service name alone
                endpoint = self.endpoint if self.is_emulated else None  # of AWS, boto3 reads it itself
                self.clients[service] = session.client(service, endpoint_url=endpoint, config=PATIENT)
        return self.clients[service]

    def call(self, service: str, operation: str, **values: Any) -> dict[str, Any]:
        """The answer of `operation`, a method of the client. Waits and tries again where AWS throttles.

        Raises:
            AwsError: if AWS refuses, or does not answer.
        """
        with explained(operation):
            answer: dict[str, Any] = getattr(self.client(service), operation)(**values)
        return answer

    def wait(self, service: str, state: str, **values: Any) -> None:
        """Return once AWS says that `state`, such as `stack_create_complete`, has come. Raises AwsError."""
        with explained(state):
            self.client(service).get_waiter(state).wait(**values)

    def pages(self, service: str, operation: str, key: str, **values: Any) -> Iterator[Any]:
        """The items under `key` in all pages of a listing. Raises AwsError as `call` does."""
        with explained(operation):
            for answer in self.client(service).get_paginator(operation).paginate(**values):
                yield from answer.get(key, [])


def profile(region: str | None = None) -> Aws:
    """AWS itself, or the endpoint that AWS_ENDPOINT_URL names."""
    return Aws(region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1")


def connect(region: str | None = None) -> Aws:
    """The account of AWS_PROFILE, or of the role of this notebook instance or Studio space; otherwise moto's."""
    aws = profile(region)
    return aws if os.environ.get("AWS_PROFILE") or NOTEBOOK.is_file() else replace(aws, endpoint=_moto())


@functools.cache
def _moto() -> str:
    """The address of moto's server, on a thread of this process and a port of loopback that the kernel chooses."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would print every request
    # moto makes all of a stack but a rule for outgoing traffic, and would say so.
    logging.getLogger("moto").addFilter(lambda record: "SecurityGroupEgress" not in record.getMessage())
    warnings.filterwarnings("ignore", "Tried to parse AWS::EC2::SecurityGroupEgress", UserWarning)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"


@contextlib.contextmanager
def explained(asked: str = "AWS") -> Iterator[None]:
    """Turn what botocore raises into an AwsError: what was asked, and AWS's answer."""
    try:
        yield
    except AwsError:
        raise
    except errors.ClientError as error:
        detail = error.response.get("Error", {})
        code, message = detail.get("Code", ""), detail.get("Message", str(error))
        advice = f"; {LOGIN}" if any(word in f"{code} {message}".lower() for word in UNKNOWN) else ""
        raise AwsError(f"{asked}: AWS answers {code}: {message}{advice}", code) from None
    except errors.WaiterError as error:
        raise AwsError(f"{asked} did not come: {error}; AWS's console says why") from None
    except (errors.BotoCoreError, OSError, ValueError) as error:  # no answer; boto3 raises ValueErrors, too
        advice = f"{LOGIN}. Without an account, there is `workshop launch --on sagemaker-local`"
        if isinstance(error, errors.ConnectionError | errors.HTTPClientError):
            advice = "is the region's name right, and is there a network?"
        raise AwsError(f"{asked} cannot be reached: {error}; {advice}") from None


def deploy(template: Path, aws: Aws, **parameters: str) -> dict[str, str]:
    """The outputs of the stack `workshop-NAME`, which is made of the file `template`, NAME.yaml, if there is none.

    A stack that is there is left as it is: its parameters are those that somebody chose.

    Raises:
        AwsError: if there is none, and it cannot be made; or if it has no outputs.
    """
    name = f"workshop-{template.stem}"
    stack = {"StackName": name}
    try:
        (described,) = aws.call("cloudformation", "describe_stacks", **stack)["Stacks"]
    except AwsError as error:
        if "does not exist" not in str(error):
            raise
        given = [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()]
        options = {"Parameters": given, "Tags": [TAG], "Capabilities": ["CAPABILITY_NAMED_IAM"]}
        aws.call(
            "cloudformation", "create_stack", **stack, TemplateBody=template.read_text("utf-8"), **options
        )
        aws.wait("cloudformation", "stack_create_complete", **stack)
        (described,) = aws.call("cloudformation", "describe_stacks", **stack)["Stacks"]
    if "Outputs" not in described:
        state = f"the stack {name} is {described['StackStatus']} and has no outputs"
        raise AwsError(
            f"{state}: its events in CloudFormation say why. If it failed, delete it, then try again"
        )
    return {output["OutputKey"]: output["OutputValue"] for output in described["Outputs"]}


def zones(instance_type: str, aws: Aws) -> list[str]:
    """The Availability Zones of the region in which EC2 offers the type, sorted. Raises AwsError if none does."""
    wanted = {"Name": "instance-type", "Values": [instance_type.removeprefix("ml.")]}
    asked = {"LocationType": "availability-zone", "Filters": [wanted]}
    offered = aws.pages("ec2", "describe_instance_type_offerings", "InstanceTypeOfferings", **asked)
    found = sorted(offer["Location"] for offer in offered)
    if not found:
        raise AwsError(f"no zone of {aws.region} has {instance_type}: take another type, or another region")
    return found


def ensure_bucket(name: str, aws: Aws, owner: str) -> None:
    """Make the bucket `name` if it is missing: tagged, and closed to the public.

    Raises:
        AwsError: if it belongs to another account than `owner`, since anybody may make a bucket of a name that can be
            guessed; or if AWS refuses.
    """
    try:
        aws.call("s3", "head_bucket", Bucket=name, ExpectedBucketOwner=owner)
        return
    except AwsError as error:
        if error.code == "403":
            foreign = f"the bucket {name} is not one of account {owner}, or closed to you: nothing was stored"
            raise AwsError(
                f"{foreign}. Name another bucket, or ask for the right to use it", error.code
            ) from None
        if error.code not in NO_SUCH_BUCKET:
            raise
    # us-east-1 is the one region that may not be named when a bucket is made.
    place = {"CreateBucketConfiguration": {"LocationConstraint": aws.region}}
    options = {} if aws.region == "us-east-1" else place
    aws.call("s3", "create_bucket", Bucket=name, **options)
    closed = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    access = dict.fromkeys(closed, True)
    aws.call("s3", "put_public_access_block", Bucket=name, PublicAccessBlockConfiguration=access)
    aws.call("s3", "put_bucket_tagging", Bucket=name, Tagging={"TagSet": [TAG]})


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key of an s3:// address."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def upload(files: Iterable[tuple[str, Path]], uri: str, aws: Aws, owner: str) -> None:
    """Store `files` under their names below `uri`, unless they are there already; nothing is removed."""
    bucket, prefix = split_uri(uri)
    ours = {"Bucket": bucket, "ExpectedBucketOwner": owner}
    listed = aws.pages("s3", "list_objects_v2", "Contents", **ours, Prefix=prefix)
    stored = {entry["Key"]: entry["Size"] for entry in listed}
    for name, path in files:
        if stored.get(prefix + name) != path.stat().st_size:
            target, asked = {"Bucket": bucket, "Key": prefix + name}, {"ExpectedBucketOwner": owner}
            with path.open("rb") as content:  # in parts, where it is large
                aws.call("s3", "upload_fileobj", Fileobj=content, **target, ExtraArgs=asked)
