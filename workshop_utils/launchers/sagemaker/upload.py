"""What must lie in the bucket before a job starts: its source, own drivers, its data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from workshop_utils import data
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.sagemaker import request as requests
from workshop_utils.launchers.sagemaker.calls import Aws, AwsError
from workshop_utils.launchers.sagemaker.request import Request
from workshop_utils.launchers.sagemaker.settings import Settings
from workshop_utils.launchers.sagemaker.source import driver_files, packed

MISSING = {"404", "NoSuchBucket", "NotFound"}


def bring(job: TrainingJob, request: Request, settings: Settings, aws: Aws) -> None:
    """Put everything that `request` names into the bucket, which is made where it is missing.

    Raises:
        AwsError: where AWS refuses it.
        DataError: where the job's data cannot be had.
    """
    folder = None if job.data.startswith("s3://") else data.prepare(job.data)
    ensure_bucket(settings.bucket_name, aws)
    prefix = requests.source_prefix(settings, request.name)
    if settings.mode == "toolkit":
        put(f"{prefix}/sourcedir.tar.gz", packed(job), aws)
    elif settings.mode == "drivers":  # the SDK brings its own
        put(f"{prefix}/{requests.CODE}/sourcedir.tar.gz", packed(job), aws)
        for name, text in driver_files().items():
            put(f"{prefix}/{requests.DRIVERS}/{name}", text.encode(), aws)
        listing = json.dumps(request.members).encode()
        put(f"{prefix}/{requests.DRIVERS}/{requests.MEMBERS_FILE}", listing, aws)
    if folder is not None:
        _bring_data(folder, requests.data_uri(job, settings), aws)


def ensure_bucket(name: str, aws: Aws) -> None:
    """Make the bucket `name` where it is missing: tagged, and closed to the public."""
    try:
        aws.call("s3", "head_bucket", Bucket=name)
        return
    except AwsError as error:
        if error.code not in MISSING:
            raise
    # us-east-1 is the one region that may not be named when a bucket is made.
    place = (
        {} if aws.region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": aws.region}}
    )
    aws.call("s3", "create_bucket", Bucket=name, **place)
    closed = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    access = dict.fromkeys(closed, True)
    aws.call("s3", "put_public_access_block", Bucket=name, PublicAccessBlockConfiguration=access)
    aws.call("s3", "put_bucket_tagging", Bucket=name, Tagging={"TagSet": [requests.TAG]})


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key of an s3:// address."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def put(uri: str, content: bytes, aws: Aws) -> None:
    """Store `content` under `uri`."""
    bucket, key = split_uri(uri)
    aws.call("s3", "put_object", Bucket=bucket, Key=key, Body=content)


def _bring_data(folder: Path, uri: str, aws: Aws) -> None:
    """Store the files of `folder` below `uri`, except those that lie there already with the same contents."""
    bucket, prefix = split_uri(uri)
    listed = aws.pages("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix)
    there = {entry["Key"]: entry["ETag"].strip('"') for entry in listed}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        content = path.read_bytes()
        digest = hashlib.md5(
            content, usedforsecurity=False
        ).hexdigest()  # what S3 calls the ETag of a small object
        if there.get(prefix + path.name) != digest:
            aws.call("s3", "put_object", Bucket=bucket, Key=prefix + path.name, Body=content)
