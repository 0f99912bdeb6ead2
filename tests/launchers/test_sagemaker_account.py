"""Launches that are sent for real, by HTTP, to moto's server as it is; and cleaning up after them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import MakeJob
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.launchers.sagemaker import SageMaker, account, cleanup
from workshop_utils.launchers.sagemaker.account import Aws
from workshop_utils.launchers.sagemaker.request import TAG
from workshop_utils.launchers.sagemaker.upload import ensure_bucket
from workshop_utils.runs import RunState

ROLE = "arn:aws:iam::123456789012:role/workshop"
SAY = "from workshop_utils import place\nprint('hello from', place.here().name)\n"


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    """The account on this machine."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return account.connect("us-east-1")


def place(aws: Aws, **settings: Any) -> SageMaker:
    return SageMaker(aws, **{"role": ROLE, "region": aws.region, **settings})


@pytest.mark.parametrize("mode", ["toolkit", "drivers"])
def test_what_is_sent_is_what_was_rendered_with_source_and_data_in_the_bucket(
    make_job: MakeJob, aws: Aws, mode: str
) -> None:
    job = make_job(SAY, environment={"COLOUR": "red"}, arguments={"x": 1})
    launcher = place(aws, mode=mode, tags={"team": "red"}, volume_gb=40)
    rendered = launcher.render(job).body
    run = launcher.launch(job).wait(60)
    assert (run.state, run.stage, run.workers) == (RunState.SUCCEEDED, "Completed", ("algo-1",))
    assert "local stand-in" in run.answered_by
    described = aws.call("sagemaker", "describe_training_job", TrainingJobName=run.name)
    for name in ("ResourceConfig", "StoppingCondition", "RoleArn", "OutputDataConfig"):
        assert described[name] == rendered[name], name
    own = {name: text for name, text in described["HyperParameters"].items() if "sagemaker_" not in name}
    assert own == {"x": "1"}
    tags = aws.call("sagemaker", "list_tags", ResourceArn=described["TrainingJobArn"])["Tags"]
    assert tags == [TAG, {"Key": "team", "Value": "red"}]
    bucket = {"Bucket": "sagemaker-workshop-us-east-1-123456789012"}
    stored = {entry["Key"] for entry in aws.pages("s3", "list_objects_v2", "Contents", **bucket)}
    assert f"workshop/source/{run.name}/sourcedir.tar.gz" in stored
    assert "workshop/data/folder-job-1/train-images-idx3-ubyte" in stored
    drivers = [key for key in stored if key.endswith(("/driver.py", "/members.json")) and run.name in key]
    assert len(drivers) == (2 if mode == "drivers" else 0)


def test_nothing_is_told_to_anybody_else(
    make_job: MakeJob, aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        # Whatever is not for this machine, such as the SDK's telemetry, would go through here.
        for name in ("HTTPS_PROXY", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        place(aws).launch(make_job(SAY)).wait(60)
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has called
            proxy.accept()


def test_data_that_lies_there_is_not_brought_again(make_job: MakeJob, aws: Aws) -> None:
    brought: list[str] = []

    def note(params: dict[str, Any], **_: Any) -> None:
        if "/data/" in params["url_path"]:
            brought.append(params["url_path"])

    aws.client("s3").meta.events.register("before-call.s3.PutObject", note)
    job, launcher = make_job(SAY), place(aws, bucket="a-bucket-of-its-own")
    for _ in range(2):
        launcher.launch(job).wait(60)
    assert len(brought) == len(set(brought)) == 4


def test_the_bucket_is_tagged_closed_to_the_public_and_made_once() -> None:
    west = account.connect("eu-west-1")
    for _ in range(2):
        ensure_bucket("workshop-of-mine", west)
    access = west.call("s3", "get_public_access_block", Bucket="workshop-of-mine")
    assert set(access["PublicAccessBlockConfiguration"].values()) == {True}
    assert west.call("s3", "get_bucket_tagging", Bucket="workshop-of-mine")["TagSet"] == [TAG]
    location = west.call("s3", "get_bucket_location", Bucket="workshop-of-mine")
    assert location["LocationConstraint"] == "eu-west-1"


def test_a_profile_is_aws_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert str(account.connect("eu-west-1")).startswith("AWS itself, region eu-west-1, profile mine")


# Clean-up


def test_the_clean_up_finds_what_bears_the_tag_and_removes_that_alone(make_job: MakeJob) -> None:
    own = account.connect("eu-central-1")  # a region in which no other test has left anything
    before = cleanup.find(own)  # but buckets, of which moto lists those of all regions
    run = place(own).launch(make_job(SAY)).wait(60)
    own.call("logs", "create_log_group", logGroupName="/aws/sagemaker/TrainingJobs")
    for stream in (f"{run.name}/algo-1-1", "another-job/algo-1-1"):
        where = {"logGroupName": "/aws/sagemaker/TrainingJobs", "logStreamName": stream}
        own.call("logs", "create_log_stream", **where)
    place_of = {"CreateBucketConfiguration": {"LocationConstraint": "eu-central-1"}}
    described = own.call("sagemaker", "describe_training_job", TrainingJobName=run.name)
    needed = ("AlgorithmSpecification", "OutputDataConfig", "ResourceConfig", "RoleArn", "StoppingCondition")
    same = {name: described[name] for name in needed}
    own.call("sagemaker", "create_training_job", TrainingJobName="another-job", **same)
    for bucket in ("not-ours", "somebody-elses"):
        own.call("s3", "create_bucket", Bucket=bucket, **place_of)
    other = {"Key": "team", "Value": "red"}
    own.call("s3", "put_bucket_tagging", Bucket="somebody-elses", Tagging={"TagSet": [other]})
    own.call("ecr", "create_repository", repositoryName="workshop-horovod", tags=[TAG])
    own.call("ecr", "create_repository", repositoryName="not-ours")
    template = '{"Resources": {"Logs": {"Type": "AWS::Logs::LogGroup"}}}'
    for name, tag in (("workshop", TAG), ("not-ours", other)):
        own.call("cloudformation", "create_stack", StackName=name, TemplateBody=template, Tags=[tag])
    found = [thing for thing in cleanup.find(own) if thing not in before]
    assert {(thing.kind, thing.name) for thing in found} == {
        ("log stream", f"{run.name}/algo-1-1"),
        ("bucket", "sagemaker-workshop-eu-central-1-123456789012"),
        ("image repository", "workshop-horovod"),
        ("stack", "workshop"),
    }
    for thing in found:
        cleanup.remove(thing, own)
    assert cleanup.find(own) == before


def test_what_cannot_be_removed_does_not_keep_the_rest(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_bucket("left-by-the-workshop", aws)
    things = [cleanup.Remains("bucket", name, "") for name in ("not-there", "left-by-the-workshop")]
    monkeypatch.setattr(cleanup, "find", lambda aws: things)
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(aws.endpoint))
    cleaned = CliRunner().invoke(cli.app, ["clean-up", "--yes"])
    assert cleaned.exit_code == 1
    assert "could not remove bucket not-there: list_objects_v2: " in cleaned.output
    assert "removed bucket left-by-the-workshop" in cleaned.output


# The command line


def test_the_command_line_renders_launches_and_cleans_up(
    make_job: MakeJob, aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-southeast-2")
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(aws.endpoint))
    job = make_job(SAY, "place.report(step=1, loss=0.5)")
    job.save(job.folder)
    config = tmp_path / "place.yaml"
    config.write_text(yaml.safe_dump({"role": ROLE, "region": "ap-southeast-2"}))
    words = ["launch", str(job.folder), "--config", str(config), "--on"]
    launched = CliRunner().invoke(cli.app, [*words, "sagemaker"])
    assert launched.exit_code == 0, launched.output
    assert "answered by: a local stand-in for AWS" in launched.stdout
    declined = CliRunner().invoke(cli.app, ["clean-up"], input="n\n")
    assert "nothing was removed" in declined.stdout
    removed = CliRunner().invoke(cli.app, ["clean-up", "--yes"])
    assert "removed bucket sagemaker-workshop-ap-southeast-2-123456789012" in removed.stdout
    assert "nothing of the workshop is left" in CliRunner().invoke(cli.app, ["clean-up"]).stdout
    emulated = CliRunner().invoke(cli.app, [*words, "sagemaker-stand-in"])
    assert "answered by: emulated instances on this machine" in emulated.stdout
    assert "[algo-1] hello from worker-0" in emulated.stdout or "step 1, loss 0.5000" in emulated.stdout
