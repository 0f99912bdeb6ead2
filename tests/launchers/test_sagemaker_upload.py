"""What lies in the bucket before a job starts; S3 is moto's, in this process."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import MakeJob
from moto import mock_aws

from workshop_utils.launchers.sagemaker import SageMaker, upload
from workshop_utils.launchers.sagemaker.account import CREDENTIALS
from workshop_utils.launchers.sagemaker.calls import Aws

ROLE = "arn:aws:iam::123456789012:role/workshop"
PAGE = 3  # objects in a page of a listing; S3 itself has 1,000


def test_data_that_lies_there_is_not_brought_again_however_many_objects_there_are(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", str(PAGE))
    with mock_aws():
        aws = Aws("us-east-1", credentials=dict(CREDENTIALS))
        place = SageMaker(aws, role=ROLE, region="us-east-1")
        job = make_job("import torch")
        brought: list[str] = []

        def note(params: dict[str, Any], **_: Any) -> None:
            if "/data/" in params["url_path"]:
                brought.append(params["url_path"].rpartition("/")[2])

        aws.client("s3").meta.events.register("before-call.s3.PutObject", note)
        upload.bring(job, place.render(job), place, aws)
        first = list(brought)
        assert len(first) > PAGE
        upload.bring(job, place.render(job), place, aws)
        assert brought == first
