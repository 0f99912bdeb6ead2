"""What a place.yaml holds for SageMaker: role, instances, network, limits. Nothing here talks to AWS.

SageMakerSettings(role="arn:aws:iam::123456789012:role/workshop", instance_type="ml.c5.xlarge")
SageMakerSettings.load("place.yaml")
"""

from __future__ import annotations

import os
import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from workshop_utils.jobs import Duration, JobError
from workshop_utils.launchers.settings import TargetSettings

ROLE_EXAMPLE = "a role's ARN, such as arn:aws:iam::123456789012:role/workshop"
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+")
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")

Subnet = Annotated[str, Field(pattern=r"^subnet-[0-9a-f]+$")]
SecurityGroup = Annotated[str, Field(pattern=r"^sg-[0-9a-f]+$")]


class SageMakerSettings(TargetSettings):
    """How and where training jobs run on SageMaker.

    Attributes:
        role: ARN of the role that the instances act as; its account pays.
        instance_type: one of SageMaker's training instance types, such as `"ml.c5.xlarge"`.
        image: the full name of the image of jobs that name none; by default AWS's for what the script imports.
        region: such as `"us-east-1"`; by default that of `AWS_REGION` or `AWS_DEFAULT_REGION`.
        bucket: for source, data and models; by default `sagemaker-workshop-REGION-ACCOUNT`, made if it is missing.
        subnets, security_groups: the VPC in which the instances meet; both or none.
        input_mode: `"File"` copies the data before the start, `"FastFile"` streams what is read.
        volume_gb: disk of each instance, in GB.
        max_runtime: when the service ends the job, whatever it does; by default the job's own timeout.
        spot: use spare capacity, which is cheaper and may be taken away; checkpoints are then kept in the bucket.
        max_wait: with `spot`, how long waiting and running may take together; by default an hour more than
            `max_runtime`.
        tags: put on every job, beside the workshop's own tag, by which the clean-up finds it.
        confirm: start without asking, though it costs money.
    """

    EXAMPLE: ClassVar[str] = "role: arn:aws:iam::..."

    role: str = Field(examples=[ROLE_EXAMPLE])
    instance_type: str = "ml.c5.xlarge"
    image: str | None = Field(default=None, min_length=1)
    region: str | None = None
    bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")] | None = None
    subnets: tuple[Subnet, ...] = ()
    security_groups: tuple[SecurityGroup, ...] = ()
    input_mode: Literal["File", "FastFile"] = "File"
    volume_gb: int = Field(default=30, ge=1, le=16_384, strict=True)
    max_runtime: Duration | None = None
    spot: bool = False
    max_wait: Duration | None = None
    tags: dict[str, str] = Field(default={})
    confirm: bool = False

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if not _ROLE.fullmatch(self.role):
            raise ValueError(f"role is {self.role!r}; it must be {ROLE_EXAMPLE}")
        if self.region is not None and not _REGION.fullmatch(self.region):
            raise ValueError(f"region is {self.region!r}; it must be a region's code, such as us-east-1")
        if bool(self.subnets) != bool(self.security_groups):
            names = ("subnets", "security_groups")
            given, missing = names if self.subnets else names[::-1]
            raise ValueError(f"{given} is given without {missing}; instances in a VPC need both")
        if self.max_wait is not None and not self.spot:
            raise ValueError("max_wait is for spot instances; set spot too, or leave it out")
        return self

    @property
    def region_name(self) -> str:
        """The region. Raises JobError if neither these settings nor the environment name one."""
        region = self.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if not region:
            raise JobError("region is missing; set it, or AWS_DEFAULT_REGION, to a code such as us-east-1")
        return region

    @property
    def bucket_name(self) -> str:
        """`bucket`, or else the name that follows from the region and the role's account."""
        return self.bucket or f"sagemaker-workshop-{self.region_name}-{self.role.split(':')[4]}"
