"""What must lie in the bucket before a job starts: its source and its data. (ModelTrainer brings drivers itself.)"""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.sagemaker.account import Aws
from workshop_utils.launchers.sagemaker.errors import AwsError
from workshop_utils.launchers.sagemaker.request import TAG, Plan
from workshop_utils.launchers.source import shipped
from workshop_utils.strategies import strategy_of
from workshop_utils.training import data

LEFT_OUT = {"__pycache__", ".ipynb_checkpoints", ".git", ".venv"}
MISSING = {"404", "NoSuchBucket", "NotFound"}


def bring(plan: Plan, aws: Aws) -> None:
    """Put what the job needs into the bucket, which is made where it is missing.

    Raises:
        AwsError: where AWS refuses it.
        DataError: where the job's data cannot be had.
    """
    is_there = plan.job.data.startswith("s3://")
    folder = None if is_there else data.prepare(plan.job.data)
    ensure_bucket(plan.settings.bucket_name, aws)
    bucket, key = split_uri(plan.source_uri)
    aws.call("s3", "put_object", Bucket=bucket, Key=key, Body=packed(plan.job))
    if folder is not None:
        _bring_data(folder, plan.data_uri, aws)


def packed(job: TrainingJob) -> bytes:
    """`sourcedir.tar.gz` of `job`: its folder, and beside the script the modules that it may import."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as file:
        for path in sorted(path for path in job.folder.rglob("*") if path.is_file()):
            relative = path.relative_to(job.folder)
            if not LEFT_OUT & set(relative.parts):
                file.add(path, relative.as_posix())
        for name, text in shipped(strategy_of(job)).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            file.addfile(entry, io.BytesIO(text.encode()))
    return archive.getvalue()


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
    aws.call("s3", "put_bucket_tagging", Bucket=name, Tagging={"TagSet": [TAG]})


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key of an s3:// address."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def _bring_data(folder: Path, uri: str, aws: Aws) -> None:
    """Store the files of `folder` below `uri`, except those that lie there already with the same contents."""
    bucket, prefix = split_uri(uri)
    listed = aws.pages("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix)
    there = {entry["Key"]: entry["ETag"].strip('"') for entry in listed}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        content = path.read_bytes()
        # What S3 calls the ETag of a small object.
        digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if there.get(prefix + path.name) != digest:
            aws.call("s3", "put_object", Bucket=bucket, Key=prefix + path.name, Body=content)
