"""Launches against a real HTTP service: moto's server, in which training jobs are carried out by stand-in instances."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import MakeJob, Watch, eventually
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.launchers.sagemaker import SageMaker, account, cleanup
from workshop_utils.launchers.sagemaker.account import StandInAccount
from workshop_utils.launchers.sagemaker.calls import Aws, AwsError
from workshop_utils.launchers.sagemaker.request import TAG
from workshop_utils.launchers.sagemaker.upload import ensure_bucket
from workshop_utils.runs import RunFailed, RunState

TEMPLATES = Path(__file__).parents[2] / "jobs" / "clusters" / "sagemaker" / "templates"
ROLE = "arn:aws:iam::123456789012:role/workshop"

SAY = """
    import sys, time
    from workshop_utils import place
    here = place.here()
    print("hello from", here.name, "of", here.world_size, flush=True)
"""


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandInAccount]:
    with StandInAccount() as server:
        account.ensure_role(ROLE, server.aws())
        yield server


@pytest.fixture
def aws(stand_in: StandInAccount) -> Aws:
    return stand_in.aws()


def place(aws: Aws, **settings: Any) -> SageMaker:
    return SageMaker(aws, **{"role": ROLE, "region": "us-east-1", **settings})


# From the launch to the model


@pytest.mark.parametrize("mode", ["toolkit", "drivers"])
def test_a_job_runs_and_its_lines_metrics_and_model_come_back(
    make_job: MakeJob, aws: Aws, mode: str, tmp_path: Path
) -> None:
    job = make_job(
        SAY,
        """
    print("a warning", file=sys.stderr)
    assert place.load("train").count == 3
    place.report(step=1, loss=0.5 + here.rank, accuracy=0.25)
    if here.rank == 0:
        (here.model_folder / "model.txt").write_text("weights")
    """,
        strategy="multi_worker_mirrored" if mode == "toolkit" else "ring",
        workers=2,
    )
    run = place(aws, mode=mode).launch(job).wait(60)
    assert run.state is RunState.SUCCEEDED
    assert "local stand-in" in run.answered_by
    assert run.workers == ("algo-1", "algo-2")
    assert [line.text for line in run.logs(worker="algo-2")] == ["hello from worker-1 of 2", "a warning"]
    table = run.metrics.sort_values("rank")
    assert list(table["loss"]) == [0.5, 1.5]
    assert table["seconds"].between(-1, run.seconds + 1).all()
    assert run.billed_seconds is not None
    assert run.stage == "Completed"
    assert (
        run.model_uri
        == f"s3://sagemaker-workshop-us-east-1-123456789012/workshop/models/{run.name}/output/model.tar.gz"
    )
    (model,) = run.download_model(tmp_path / "model")
    assert model.read_text() == "weights"


def test_what_is_described_is_what_was_rendered(make_job: MakeJob, aws: Aws) -> None:
    job = make_job(SAY, environment={"COLOUR": "red"}, arguments={"x": 1})
    launcher = place(aws, tags={"team": "red"}, volume_gb=40)
    run = launcher.launch(job).wait(60)
    described = aws.call("sagemaker", "describe_training_job", TrainingJobName=run.name)
    rendered = launcher.render(job).body
    for name in (
        "ResourceConfig",
        "StoppingCondition",
        "InputDataConfig",
        "RoleArn",
        "OutputDataConfig",
        "Environment",
    ):
        assert described[name] == rendered[name], name
    tags = aws.call("sagemaker", "list_tags", ResourceArn=described["TrainingJobArn"])["Tags"]
    assert tags == [TAG, {"Key": "team", "Value": "red"}]


def test_mpi_ranks_are_told_apart_in_the_log_of_the_first_host(make_job: MakeJob, aws: Aws) -> None:
    job = make_job(SAY, "place.report(step=1, loss=here.rank)", strategy="mpi", workers=2)
    run = place(aws).launch(job).wait(60)
    said = {line.worker: line.text for line in run.logs() if line.text.startswith("hello")}
    assert said == {"worker-0": "hello from worker-0 of 2", "worker-1": "hello from worker-1 of 2"}
    assert sorted(run.metrics["loss"]) == [0, 1]


def test_lines_come_while_the_job_runs_and_leaving_stops_it(
    make_job: MakeJob, aws: Aws, watch: Watch
) -> None:
    job = make_job(SAY, "time.sleep(1000)")
    with place(aws).launch(job) as run:
        assert next(run.logs(follow=True)).text == "hello from worker-0 of 1"
        assert run.state is RunState.RUNNING
        assert eventually(lambda: run.stage == "Training")  # the line may be read before the next look at it
        assert run.model_uri is None
    assert run.state is RunState.STOPPED
    described = aws.call("sagemaker", "describe_training_job", TrainingJobName=run.name)
    assert described["TrainingJobStatus"] == "Stopped"
    with pytest.raises(AwsError, match="has no model: its state is stopped"):
        run.download_model("nowhere")


def test_a_failing_script_gives_sagemaker_s_reason_and_the_last_lines(make_job: MakeJob, aws: Aws) -> None:
    job = make_job(SAY, "print('out of patience', file=sys.stderr)\nsys.exit(7)")
    run = place(aws).launch(job)
    with pytest.raises(
        RunFailed, match="AlgorithmError: ExecuteUserScriptError on algo-1, exit code: 7"
    ) as failed:
        run.wait(60)
    assert (
        "The last lines of its log:\n  [algo-1] hello from worker-0 of 1\n  [algo-1] out of patience"
        in str(failed.value)
    )


def test_data_on_s3_is_used_where_it_lies_and_missing_data_fails_the_job(
    make_job: MakeJob, aws: Aws, data_folder: Path
) -> None:
    ensure_bucket("elsewhere", aws)
    for path in data_folder.iterdir():
        aws.call("s3", "put_object", Bucket="elsewhere", Key=f"mnist/{path.name}", Body=path.read_bytes())
    job = make_job(SAY, "print('images', place.load('test').count)")
    run = place(aws).launch(job.replace(data="s3://elsewhere/mnist/")).wait(60)
    assert "images 2" in [line.text for line in run.logs()]
    with pytest.raises(RunFailed, match="ClientError: there is nothing at s3://elsewhere/nothing/"):
        place(aws).launch(job.replace(data="s3://elsewhere/nothing/")).wait(60)


def test_what_a_spot_job_keeps_as_checkpoints_is_there_again_at_its_next_launch(
    make_job: MakeJob, aws: Aws
) -> None:
    job = make_job(
        SAY,
        """
    kept = place.checkpoint_folder()
    earlier = sorted(path.name for path in kept.glob("*"))
    print("found", earlier, flush=True)
    (kept / f"step-{len(earlier)}").write_text("weights")
    sys.exit(0 if earlier else 9)  # as if the instance had been taken away
    """,
    )
    launcher = place(aws, spot=True)
    with pytest.raises(RunFailed, match="exit code: 9"):
        launcher.launch(job).wait(60)
    run = launcher.launch(job).wait(60)
    assert "found ['step-0']" in [line.text for line in run.logs()]
    # Without spot instances nothing is kept, and nothing found.
    with pytest.raises(RunFailed, match=r"found \[\]"):
        place(aws).launch(job).wait(60)


def test_a_role_that_does_not_exist_is_refused_before_anything_runs(make_job: MakeJob, aws: Aws) -> None:
    stranger = place(aws, role="arn:aws:iam::123456789012:role/stranger")
    with pytest.raises(
        AwsError, match=r"SageMaker cannot act as the role\. It must exist, and trust"
    ) as refused:
        stranger.launch(make_job(SAY))
    assert "jobs/clusters/sagemaker/" in str(refused.value)


def test_the_bucket_is_tagged_closed_to_the_public_and_made_once(aws: Aws) -> None:
    for _ in range(2):
        ensure_bucket("workshop-of-mine", aws)
    closed = aws.call("s3", "get_public_access_block", Bucket="workshop-of-mine")[
        "PublicAccessBlockConfiguration"
    ]
    assert set(closed.values()) == {True}
    assert aws.call("s3", "get_bucket_tagging", Bucket="workshop-of-mine")["TagSet"] == [TAG]
    west = Aws("eu-west-1", aws.endpoint, aws.credentials)
    ensure_bucket("workshop-in-ireland", west)
    location = west.call("s3", "get_bucket_location", Bucket="workshop-in-ireland")
    assert location["LocationConstraint"] == "eu-west-1"


# The stand-in itself


def test_nothing_of_the_user_s_own_aws_reaches_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "real")
    monkeypatch.setattr(account, "_stand_in", lambda: _Named())
    assert account.connect("eu-west-1") == "stand-in in eu-west-1"
    monkeypatch.setenv("AWS_PROFILE", "mine")
    live = account.connect("eu-west-1")
    assert isinstance(live, Aws)
    assert str(live) == "AWS itself, region eu-west-1, profile mine: what is started here is paid for"


class _Named:
    def aws(self, region: str) -> str:
        return f"stand-in in {region}"


# Clean-up


def test_the_clean_up_finds_what_bears_the_tag_and_removes_that_alone(make_job: MakeJob, aws: Aws) -> None:
    own = Aws(
        "eu-central-1", aws.endpoint, aws.credentials
    )  # a region in which no other test has left anything
    running = place(own, region="eu-central-1").launch(make_job(SAY, "time.sleep(1000)"))
    place(own, region="eu-central-1").launch(make_job(SAY)).wait(60)
    own.call(
        "s3",
        "create_bucket",
        Bucket="not-ours",
        CreateBucketConfiguration={"LocationConstraint": "eu-central-1"},
    )
    own.call("ecr", "create_repository", repositoryName="workshop-horovod", tags=[TAG])
    own.call("ecr", "create_repository", repositoryName="not-ours")
    next(running.logs(follow=True))
    found = cleanup.find(own)
    assert {thing.kind for thing in found} == {"running job", "log stream", "bucket", "image repository"}
    assert not any("not-ours" in thing.name for thing in found)
    assert f"running job {running.name} (costs money every second)" in [str(thing) for thing in found]
    for thing in found:
        cleanup.remove(thing, own)
    running.stop()
    assert running.state is RunState.STOPPED
    # What is left is what the stopped job printed last.
    assert all(thing.name.startswith(running.name) for thing in cleanup.find(own))


def test_what_the_clean_up_may_not_remove_does_not_keep_the_rest(
    aws: Aws, monkeypatch: pytest.MonkeyPatch
) -> None:
    things = [cleanup.Remains("stack", "not-ours", ""), cleanup.Remains("bucket", "ours", "")]
    removed = []

    def remove(thing: cleanup.Remains, aws: Aws) -> None:
        if thing.kind == "stack":
            raise AwsError("you may not do that")
        removed.append(thing.name)

    monkeypatch.setattr(cleanup, "find", lambda aws: things)
    monkeypatch.setattr(cleanup, "remove", remove)
    cleaned = CliRunner().invoke(cli.app, ["clean-up", "--yes"])
    assert cleaned.exit_code == 1
    assert "could not remove stack not-ours: you may not do that" in cleaned.output
    assert removed == ["ours"]


# The templates


def test_the_templates_make_a_network_and_roles_that_a_job_can_name(make_job: MakeJob, aws: Aws) -> None:
    for name in ("network", "roles"):
        parameters = [{"ParameterKey": "Zone", "ParameterValue": "us-east-1a"}] if name == "network" else []
        aws.call(
            "cloudformation",
            "create_stack",
            StackName=f"workshop-{name}",
            TemplateBody=(TEMPLATES / f"{name}.yaml").read_text(),
            Parameters=parameters,
            Capabilities=["CAPABILITY_NAMED_IAM"],
            Tags=[TAG],
        )
    outputs = {}
    for name in ("network", "roles"):
        (stack,) = aws.call("cloudformation", "describe_stacks", StackName=f"workshop-{name}")["Stacks"]
        assert stack["StackStatus"] == "CREATE_COMPLETE"
        outputs |= {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}
    (subnet,) = aws.call("ec2", "describe_subnets", SubnetIds=[outputs["Subnet"]])["Subnets"]
    assert subnet["AvailabilityZone"] == "us-east-1a"
    assert subnet["MapPublicIpOnLaunch"] is False
    (group,) = aws.call("ec2", "describe_security_groups", GroupIds=[outputs["SecurityGroup"]])[
        "SecurityGroups"
    ]
    (rule,) = group["IpPermissions"]
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [outputs["SecurityGroup"]]
    (endpoint,) = aws.call("ec2", "describe_vpc_endpoints")["VpcEndpoints"]
    assert endpoint["ServiceName"] == "com.amazonaws.us-east-1.s3"
    launcher = place(
        aws,
        role=outputs["TrainingRole"],
        subnets=(outputs["Subnet"],),
        security_groups=(outputs["SecurityGroup"],),
    )
    assert launcher.launch(make_job(SAY)).wait(60).state is RunState.SUCCEEDED
    stacks = [thing for thing in cleanup.find(aws) if thing.kind == "stack"]
    assert {thing.name for thing in stacks} == {"workshop-network", "workshop-roles"}
    # AWS removes a stack's parts in the order of their dependencies; moto cannot remove that of the network.
    cleanup.remove(next(thing for thing in stacks if thing.name == "workshop-roles"), aws)
    left = [thing.name for thing in cleanup.find(aws) if thing.kind == "stack"]
    assert left == ["workshop-network"]


# The command line


def test_the_command_line_launches_on_the_account_and_cleans_up(
    make_job: MakeJob, aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert aws.endpoint is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.endpoint)
    for name, value in aws.credentials.items():
        monkeypatch.setenv(name.upper(), value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-southeast-2")
    job = make_job(SAY, "place.report(step=1, loss=0.5)")
    job.save(job.folder)
    config = tmp_path / "place.yaml"
    config.write_text(yaml.safe_dump({"role": ROLE, "region": "ap-southeast-2"}))
    words = ["launch", str(job.folder), "--on", "sagemaker", "--config", str(config)]
    rendered = CliRunner().invoke(cli.app, [*words, "--render"])
    assert json.loads(rendered.stdout)["ResourceConfig"]["InstanceCount"] == 1
    launched = CliRunner().invoke(cli.app, words)
    assert launched.exit_code == 0, launched.output
    assert "answered by: a local stand-in for AWS" in launched.stdout
    assert "[worker-0] step 1, loss 0.5000" in launched.stdout
    declined = CliRunner().invoke(cli.app, ["clean-up"], input="n\n")
    assert "nothing was removed" in declined.stdout
    removed = CliRunner().invoke(cli.app, ["clean-up", "--yes"])
    assert "removed bucket sagemaker-workshop-ap-southeast-2-123456789012" in removed.stdout
    assert "nothing of the workshop is left" in CliRunner().invoke(cli.app, ["clean-up"]).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "moon"], "--on is 'moon'; it must be one of local, sagemaker"),
        (["--on", "sagemaker"], "--config is missing"),
        (["--config", "place.yaml"], "--config is for other places"),
        (
            ["--on", "sagemaker", "--config", "place.yaml", "--network", "1Mbit"],
            "--network is for local runs",
        ),
        (
            ["--on", "sagemaker", "--config", "place.yaml", "--output", "x"],
            "the model is stored in the bucket",
        ),
    ],
)
def test_options_that_a_place_has_no_use_for_are_refused(
    make_job: MakeJob, words: list[str], message: str
) -> None:
    job = make_job(SAY)
    job.save(job.folder)
    refused = CliRunner().invoke(cli.app, ["launch", str(job.folder), *words])
    assert message in str(refused.exception)
    assert os.environ.get("AWS_ENDPOINT_URL") is None
