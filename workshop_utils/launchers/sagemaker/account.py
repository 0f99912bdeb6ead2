"""The account that answers: AWS itself where AWS_PROFILE is set, and otherwise moto's, on this machine.

aws = connect()          # moto's server is started when it is first needed, and ends with this process
print(aws)               # which of the two answers
aws.call("sagemaker", "describe_training_job", TrainingJobName="...")

Moto keeps what it is told (buckets, roles, stacks, training jobs and their tags), and calls every training job
completed the moment it is created: what trains here are emulated instances, see `instances`.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config

from workshop_utils.launchers.sagemaker.errors import TRIES, explained

LOOPBACK = {"127.0.0.1", "::1", "localhost"}
PATIENT = Config(
    retries={"mode": "standard", "total_max_attempts": TRIES},
    connect_timeout=5,  # it is tried again, too
    read_timeout=60,
)


class LocalSession(boto3.Session):
    """A session whose clients, those of the SageMaker SDK too, call `endpoint` on this machine."""

    def __init__(self, endpoint: str | None, region: str) -> None:
        super().__init__("testing", "testing", region_name=region)  # moto takes any credentials
        self._endpoint = endpoint

    def client(self, *names: Any, endpoint_url: str | None = None, **options: Any) -> Any:
        options["endpoint_url"] = endpoint_url or self._endpoint
        return super().client(*names, **options)


@dataclass(frozen=True)
class Aws:
    """Clients of one account in one region, with the credentials of the environment.

    `endpoint` is where boto3 finds it: moto's server, or AWS in a VPC; None means AWS where everybody finds it.
    """

    region: str
    endpoint: str | None = field(default_factory=lambda: os.environ.get("AWS_ENDPOINT_URL") or None)
    clients: dict[str, Any] = field(default_factory=dict)

    @property
    def is_stand_in(self) -> bool:
        """Whether nothing that is asked for here reaches AWS, or costs anything: the endpoint is this machine's."""
        return urlsplit(self.endpoint or "").hostname in LOOPBACK

    def __str__(self) -> str:
        if self.is_stand_in:
            return f"a local stand-in for AWS at {self.endpoint}: nothing reaches AWS, nothing costs money"
        profile = os.environ.get("AWS_PROFILE", "default")
        where = f" at {self.endpoint}" if self.endpoint else ""
        return f"AWS itself{where}, region {self.region}, profile {profile}: what is started here is paid for"

    def session(self) -> boto3.Session:
        """A new session, which can make clients. Raises AwsError where AWS_PROFILE names no profile."""
        with explained():
            if self.is_stand_in:
                return LocalSession(self.endpoint, self.region)
            return boto3.Session(region_name=self.region)

    def client(self, service: str) -> Any:
        """The client of `service`, made when it is first asked for."""
        if service not in self.clients:
            session: Any = self.session()  # its types are for services that are named one by one
            with explained():
                self.clients[service] = session.client(service, config=PATIENT)
        return self.clients[service]

    def call(self, service: str, operation: str, **values: Any) -> dict[str, Any]:
        """The answer of `operation`, a method of the client. Tries again, more and more slowly, where AWS throttles.

        Raises:
            AwsError: where it is refused, or nobody answers.
        """
        with explained(operation):
            answer: dict[str, Any] = getattr(self.client(service), operation)(**values)
        return answer

    def pages(self, service: str, operation: str, key: str, **values: Any) -> Iterator[Any]:
        """What stands under `key` in all pages of a listing. Raises AwsError as `call` does."""
        with explained(operation):
            for answer in self.client(service).get_paginator(operation).paginate(**values):
                yield from answer.get(key, [])


def profile(region: str | None = None) -> Aws:
    """AWS itself, or the endpoint that AWS_ENDPOINT_URL names."""
    return Aws(region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1")


def connect(region: str | None = None) -> Aws:
    """The account that answers here: that of AWS_PROFILE, or else moto's."""
    aws = profile(region)
    return aws if os.environ.get("AWS_PROFILE") else replace(aws, endpoint=_moto())


@functools.cache
def _moto() -> str:
    """The address of moto's server, on a thread of this process and a port of loopback that the kernel chooses."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would print every request
    # moto makes all of a stack but a rule for outgoing traffic, and would say so twice.
    logging.getLogger("moto").addFilter(lambda record: "SecurityGroupEgress" not in record.getMessage())
    warnings.filterwarnings("ignore", "Tried to parse AWS::EC2::SecurityGroupEgress", UserWarning)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"
