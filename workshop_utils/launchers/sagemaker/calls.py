"""A call to AWS as a learner should meet it: patient where AWS asks for patience, and clear where it says no.

aws = Aws.connect(region="eu-west-1")
aws.call("sagemaker", "describe_training_job", TrainingJobName="...")
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.exceptions as errors
from botocore.config import Config

TRIES = 6  # with pauses of up to 1, 2, 4, 8 and 16 s between them where AWS throttles

# Of what botocore tries again, those of the services that are called here.
THROTTLED = {
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "RequestLimitExceeded",
    "TooManyRequestsException",
    "SlowDown",
}
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired"}
UNKNOWN_IDENTITY = {"UnrecognizedClientException", "InvalidClientTokenId", "InvalidSignatureException"}
FORBIDDEN = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"}
NO_CAPACITY = {"InsufficientCapacityError", "InsufficientInstanceCapacity", "CapacityError"}

LOOPBACK = {"127.0.0.1", "::1", "localhost"}
LOGIN = "log in with `aws configure` or `aws sso login`, and name the profile in AWS_PROFILE"


class AwsError(ValueError):
    """AWS did not do what it was asked to; the message says what was asked, why not, and what to do."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code

    def _render_traceback_(self) -> list[str]:
        # As RunFailed does: the message is for people, the frames are not.
        return [f"{type(self).__name__}: {self}"]


@dataclass
class Aws:
    """Clients of one account in one region.

    `endpoint` is that of a stand-in, or of AWS in a VPC; None means AWS where everybody finds it. `clients` may hold
    clients made beforehand, by service.
    """

    region: str
    endpoint: str | None = None
    credentials: dict[str, str] = field(default_factory=dict)
    clients: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def connect(cls, region: str) -> Aws:
        """The account that the environment names (AWS_PROFILE and its like), or the stand-in of AWS_ENDPOINT_URL."""
        return cls(region, os.environ.get("AWS_ENDPOINT_URL") or None)

    @property
    def is_stand_in(self) -> bool:
        """Whether nothing that is asked for here reaches AWS, or costs anything: the endpoint is this machine's.

        Other endpoints may be AWS's own, in a VPC.
        """
        return urlsplit(self.endpoint or "").hostname in LOOPBACK

    def __str__(self) -> str:
        if self.is_stand_in:
            return f"a local stand-in for AWS at {self.endpoint}: nothing reaches AWS, nothing costs money"
        profile = os.environ.get("AWS_PROFILE", "default")
        where = f" at {self.endpoint}" if self.endpoint else ""
        return f"AWS itself{where}, region {self.region}, profile {profile}: what is started here is paid for"

    def client(self, service: str) -> Any:
        """The client of `service`, made when it is first asked for."""
        if service not in self.clients:
            try:
                session: Any = boto3.session.Session()  # its types are for services that are named one by one
                self.clients[service] = session.client(
                    service,
                    region_name=self.region,
                    endpoint_url=self.endpoint,
                    config=Config(
                        retries={"mode": "standard", "total_max_attempts": TRIES},
                        connect_timeout=5,  # it is tried again, too
                        read_timeout=60,
                    ),
                    **self.credentials,
                )
            except (errors.BotoCoreError, ValueError) as error:
                raise AwsError(_without_answer(error)) from None
        return self.clients[service]

    def call(self, service: str, operation: str, **values: Any) -> dict[str, Any]:
        """The answer of `operation`, a method of the client. Tries again, more and more slowly, where AWS throttles.

        Raises:
            AwsError: where it is refused, or nobody answers.
        """
        client = self.client(service)
        with _explained(operation):
            answer: dict[str, Any] = getattr(client, operation)(**values)
        return answer

    def pages(self, service: str, operation: str, key: str, **values: Any) -> Iterator[Any]:
        """What stands under `key` in all pages of a listing. Raises AwsError as `call` does."""
        paginator = self.client(service).get_paginator(operation)
        with _explained(operation):
            for answer in paginator.paginate(**values):
                yield from answer.get(key, [])


@contextlib.contextmanager
def _explained(operation: str) -> Iterator[None]:
    """Turn what botocore raises into an AwsError that says what it means."""
    try:
        yield
    except errors.ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        raise AwsError(explanation(error, operation), code) from None
    except (errors.BotoCoreError, OSError) as error:
        raise AwsError(_without_answer(error)) from None


def explanation(error: errors.ClientError, operation: str = "") -> str:
    """What an answer of AWS that says no means, and what to do about it."""
    detail = error.response.get("Error", {})
    code, said = detail.get("Code", ""), detail.get("Message", str(error))
    asked = operation or error.operation_name
    if code in EXPIRED:
        return f"{asked}: your credentials have expired; {LOGIN}"
    if code in UNKNOWN_IDENTITY:
        return f"{asked}: AWS does not know these credentials ({code}); {LOGIN}"
    if code == "ResourceLimitExceeded":
        return (
            f"{asked}: the account may not use so many instances of this type. AWS says: {said} Ask for more under "
            "Service Quotas, Amazon SageMaker, '<instance type> for training job usage' (a day or two), or take "
            "another type; new accounts have a quota of 0 for most"
        )
    if code in NO_CAPACITY or "capacity" in said.lower():
        return (
            f"{asked}: AWS has no such instances left just now. Try again later, or take another instance type, "
            f"another zone's subnet or another region. AWS says: {said}"
        )
    if code in THROTTLED:
        return (
            f"{asked}: AWS still asks to slow down after {TRIES} tries ({code}); wait a minute and try again"
        )
    if "assume" in said.lower() and "role" in said.lower():
        return (
            f"{asked}: SageMaker cannot act as the role. It must exist, and trust sagemaker.amazonaws.com (the stack "
            f"of jobs/clusters/sagemaker/ makes one). AWS says: {said}"
        )
    if code in ("NoSuchEntity", "NoSuchEntityException"):
        return f"{asked}: there is no such role. AWS says: {said} (the stack of jobs/clusters/sagemaker/ makes one)"
    if code in FORBIDDEN:
        return (
            f"{asked}: you may not do that. AWS says: {said} What a learner needs is in "
            "jobs/clusters/sagemaker/policies/learner.json"
        )
    if code == "ResourceInUse":
        sent_again = error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0) > 0
        perhaps = (
            " It may be this very one: AWS was asked again after an answer was lost" if sent_again else ""
        )
        return f"{asked}: a job of that name exists already; names are used once. AWS says: {said}{perhaps}"
    return f"{asked}: AWS answered {code or 'an error'}: {said}"


def _without_answer(error: Exception) -> str:
    """Why a call got no answer at all."""
    if isinstance(error, errors.NoCredentialsError | errors.PartialCredentialsError):
        return f"there are no AWS credentials here; {LOGIN}. Without an account, use the local stand-in"
    if isinstance(error, errors.ProfileNotFound):
        return f"{error}; AWS_PROFILE must name a profile of ~/.aws/config"
    if isinstance(
        error, errors.TokenRetrievalError | errors.SSOTokenLoadError | errors.UnauthorizedSSOTokenError
    ):
        return f"your AWS login has expired; {LOGIN}"
    if isinstance(error, errors.EndpointConnectionError | errors.ConnectTimeoutError):
        return f"AWS cannot be reached ({error}); is the region's name right, and is there a network?"
    return f"AWS cannot be used: {error}"
