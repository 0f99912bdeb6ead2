"""An account: what AWS alone can answer (refusals, a job's life), what moto stores, and the question about the cost."""

import datetime
import functools
import io
import sys
from pathlib import Path

import boto3
import pytest
from botocore.stub import Stubber
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.jobs import JobError
from workshop_utils.launchers import remote
from workshop_utils.launchers.sagemaker import SageMaker, account, cleanup, launcher, price
from workshop_utils.launchers.sagemaker.account import TAG, Aws, AwsError
from workshop_utils.launchers.sagemaker.launcher import LATE_LOOKS, SageMakerRun
from workshop_utils.launchers.sagemaker.price import NotConfirmed
from workshop_utils.launchers.sagemaker.submission import submission_of
from workshop_utils.runs import RunFailed, RunState

OWNER = "123456789012"
ROLE = f"arn:aws:iam::{OWNER}:role/workshop"
NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
NAME = {"TrainingJobName": "x"}
NETWORK = Path(__file__).parents[2] / "jobs" / "clusters" / "sagemaker" / "templates" / "network.yaml"


@pytest.fixture(autouse=True)
def _no_account(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    yield
    while ACTIVE:
        ACTIVE.pop().deactivate()


ACTIVE: list[Stubber] = []


@functools.cache
def client_of(service):
    """A client takes most of a second to make."""
    return boto3.client(service, region_name="us-east-1")


def scripted(*services):
    """AWS itself, where each service gives the answers of its Stubber, in that order."""
    clients = {service: client_of(service) for service in services}
    stubs = {service: Stubber(client) for service, client in clients.items()}
    for stub in stubs.values():
        stub.activate()
        ACTIVE.append(stub)
    return Aws("us-east-1", clients=clients), stubs


def submission(make_job, workers=1, **settings):
    job = make_job("import torch", strategy="torch_ddp", workers=workers)
    return submission_of(job, SageMaker(**({"role": ROLE, "region": "us-east-1"} | settings)))


# Refusals


def test_a_refusal_says_what_was_asked_and_what_aws_answers():
    aws, stubs = scripted("sagemaker")
    stubs["sagemaker"].add_client_error("describe_training_job", "ThrottlingException", "too fast")
    with pytest.raises(
        AwsError, match=r"^describe_training_job: AWS answers ThrottlingException: too fast$"
    ) as refused:
        aws.call("sagemaker", "describe_training_job", **NAME)
    assert refused.value.code == "ThrottlingException"
    stubs["sagemaker"].add_client_error("describe_training_job", "ExpiredTokenException", "too old")
    with pytest.raises(AwsError, match=r"ExpiredTokenException: too old; log in with `aws configure`"):
        aws.call("sagemaker", "describe_training_job", **NAME)


def test_without_an_answer_the_message_says_why(monkeypatch):
    with pytest.raises(AwsError, match=r"cannot be reached: .*region's name right"):
        Aws("us-east-1", "http://127.0.0.1:9").call("sts", "get_caller_identity")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(
        AwsError,
        match=r"profile \(nobody\) could not be found; log in .*`workshop launch --on sagemaker-local`",
    ):
        Aws("us-east-1").call("sts", "get_caller_identity")


def test_only_an_endpoint_on_this_machine_is_an_emulator():
    for endpoint, text in (
        ("http://localhost:4000", "an emulator of AWS at http://localhost:4000: nothing reaches AWS"),
        (None, "AWS itself, region us-east-1, profile default: what is started here is paid for"),
        ("https://vpce-1.api.sagemaker.us-east-1.vpce.amazonaws.com", "AWS itself at https://vpce-1"),
    ):
        aws = Aws("us-east-1", endpoint)
        assert str(aws).startswith(text)
        assert aws.is_emulated is text.startswith("an emulator")


# A job's life


def description(status, secondary, **more):
    return {
        **NAME,
        "TrainingJobArn": "arn:aws:sagemaker:us-east-1:123456789012:training-job/x",
        "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/model.tar.gz"},
        "TrainingJobStatus": status,
        "SecondaryStatus": secondary,
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        "ResourceConfig": {"InstanceType": "ml.c5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        "CreationTime": NOW,
        **more,
    }


TRAINING = description("InProgress", "Training")
NEEDED = ("AlgorithmSpecification", "ResourceConfig", "StoppingCondition")
TRAINING_JOB = {
    "RoleArn": ROLE,
    "OutputDataConfig": {"S3OutputPath": "s3://a"},
    **{k: TRAINING[k] for k in NEEDED},
}
ENDED = 1 + LATE_LOOKS  # how often a job that has ended is looked at


def answer(stubs, *states, asked_for_log=True):
    """Let AWS show these states, one after the other, each time without a log where it is asked for one."""
    for state in states:
        stubs["sagemaker"].add_response("describe_training_job", state)
        if asked_for_log:
            stubs["logs"].add_client_error("describe_log_streams", "ResourceNotFoundException")


def test_a_job_that_cannot_be_stopped_is_said_to_cost_money_and_can_be_stopped_again(make_job, watch):
    aws, stubs = scripted("sagemaker", "logs")
    answer(stubs, TRAINING)
    run = SageMakerRun(submission(make_job), aws, poll_seconds=1000)
    assert watch.eventually(lambda: run.stage == "Training")
    for _ in range(2):
        stubs["sagemaker"].add_client_error("stop_training_job", "AccessDeniedException", "no")
        answer(stubs, TRAINING, asked_for_log=False)
        with pytest.raises(AwsError, match="could not be stopped and still costs money: stop it in SageMa"):
            run.stop()
        assert run.state is RunState.RUNNING
    # A job that someone else is stopping already may be stopped, too.
    run._poll_seconds = 0.01
    stubs["sagemaker"].add_client_error("stop_training_job", "ValidationException", "is in status Stopping")
    answer(stubs, description("Stopping", "Stopping"), asked_for_log=False)
    answer(stubs, *[description("Stopped", "Stopped")] * ENDED)
    run.stop()
    assert run.state is RunState.STOPPED
    with pytest.raises(AwsError, match="has no model: its state is stopped"):
        run.download_model("nowhere")


def test_a_job_that_sagemaker_stops_at_its_limit_has_failed(make_job):
    aws, stubs = scripted("sagemaker", "logs")
    answer(stubs, *[description("Stopped", "MaxRuntimeExceeded")] * ENDED)
    run = SageMakerRun(submission(make_job), aws, poll_seconds=0.01)
    with pytest.raises(RunFailed, match="failed: MaxRuntimeExceeded: the job met its time limit"):
        run.wait(20)


def test_logs_are_read_from_where_they_were_left_and_end_with_sagemaker_s_reason(make_job):
    aws, stubs = scripted("sagemaker", "logs")
    failed = description("Failed", "Failed", FailureReason="CapacityError: Unable to provision")
    answer(stubs, TRAINING, *[failed] * ENDED, asked_for_log=False)
    metric = '{"workshop": "metric", "worker": "worker-3", "rank": 3, "time": 1.0, "step": 1, "loss": 0.5}'
    rank = "[1,mpirank:3,algo-2]<stdout>:"  # the toolkit's mark
    where = {
        "logGroupName": launcher.LOG_GROUP,
        "logStreamName": "x/algo-2-1700000000",
        "startFromHead": True,
    }
    for number, page in enumerate((["one"], [f"{rank}{metric}", f"{rank}two"], ["late"])):
        stream = {"logStreamName": "x/algo-2-1700000000"}
        stubs["logs"].add_response("describe_log_streams", {"logStreams": [stream]})
        for token, messages in ((f"f/{number - 1}" if number else None, page), (f"f/{number}", [])):
            events = [{"timestamp": 1, "message": message} for message in messages]
            answered = {"events": events, "nextForwardToken": f"f/{number}"}
            asked = where | ({"nextToken": token} if token else {})
            stubs["logs"].add_response("get_log_events", answered, asked)
    for _ in range(ENDED - 2):
        stubs["logs"].add_client_error("describe_log_streams", "ResourceNotFoundException")
    run = SageMakerRun(submission(make_job), aws, poll_seconds=0.01)
    last = r"  \[algo-2\] one\n  \[worker-3\] two\n  \[algo-2\] late"
    with pytest.raises(RunFailed, match=rf"Unable to provision\. Its last lines:\n{last}\nThe whole log"):
        run.wait(30)
    assert list(run.metrics["loss"]) == [0.5]


def test_a_run_is_given_up_when_aws_no_longer_answers(make_job, monkeypatch):
    monkeypatch.setattr(remote, "BLIND_SECONDS", 0.0)
    aws, stubs = scripted("sagemaker", "logs")
    stubs["sagemaker"].add_client_error("describe_training_job", "ExpiredTokenException", "expired")
    with pytest.raises(RunFailed, match=r"may still be running\. .*ExpiredTokenException"):
        SageMakerRun(submission(make_job), aws, poll_seconds=0.01).wait(30)


def test_a_name_in_use_is_this_job_s_own_and_a_lost_answer_is_said(make_job, monkeypatch):
    monkeypatch.setattr(launcher, "_upload", lambda request, aws: None)
    monkeypatch.setattr(launcher, "SageMakerRun", lambda submission, aws: submission.name)
    aws, stubs = scripted("sagemaker")
    target = SageMaker(aws, role=ROLE, region="us-east-1", confirm=True)
    job = make_job("import torch", strategy="torch_ddp")
    stubs["sagemaker"].add_client_error("create_training_job", "ResourceInUse", "taken")
    assert target.launch(job)
    for code, message in (
        ("Else", "AWS answers Else"),
        ("", "may have started all the same: look in SageM"),
    ):
        stubs["sagemaker"].add_client_error("create_training_job", code, "no")
        with pytest.raises(AwsError, match=message):
            target.launch(job)


# Before anything is paid for


class Terminal(io.StringIO):
    """A terminal at which someone answers."""

    def isatty(self):
        return True


def test_only_a_yes_is_a_yes_and_the_question_holds_the_price_at_the_limit(make_job, monkeypatch, capsys):
    question = price.preflight(submission(make_job, workers=2, max_runtime="60min"))
    assert "price at the limit: 2 × 0.204 $/h × (60 + 2) min = 0.43 $" in question
    assert "third more" not in question
    assert "a third more" in price.preflight(submission(make_job, region="eu-west-1"))
    assert "quota: 'ml.c5.xlarge for training job usage' must be at least 2" in question
    assert "not known here" in price.preflight(submission(make_job, instance_type="ml.c6i.xlarge"))
    for answer in ("n", "", "yes please"):
        monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
        with pytest.raises(NotConfirmed, match="nothing was started"):
            price.ask(question)
    monkeypatch.setattr(sys, "stdin", Terminal(" YES \n"))
    price.ask(question)
    assert capsys.readouterr().out.count(question) == 4


def test_spot_instances_have_an_hour_to_be_found_and_checkpoints_where_the_job_says(make_job):
    target = SageMaker(role=ROLE, region="us-east-1", spot=True, max_runtime="2min")
    body = target.render(make_job("import torch", strategy="torch_ddp", checkpoints="s3://mine/kept")).body
    assert body["StoppingCondition"] == {"MaxRuntimeInSeconds": 120, "MaxWaitTimeInSeconds": 3720}
    assert body["CheckpointConfig"]["S3Uri"] == "s3://mine/kept"
    with pytest.raises(JobError, match=r"max_wait is 60 seconds; .* at least max_runtime, 120"):
        SageMaker(role=ROLE, region="us-east-1", spot=True, max_runtime="2min", max_wait="1min").render(
            make_job("import torch", strategy="torch_ddp")
        )


# What the workshop leaves in an account


def test_the_bucket_is_tagged_closed_to_the_public_and_made_once():
    west = account.connect("eu-west-1")
    for _ in range(2):
        account.ensure_bucket("workshop-of-mine", west, OWNER)
    access = west.call("s3", "get_public_access_block", Bucket="workshop-of-mine")
    assert set(access["PublicAccessBlockConfiguration"].values()) == {True}
    assert west.call("s3", "get_bucket_tagging", Bucket="workshop-of-mine")["TagSet"] == [TAG]
    location = west.call("s3", "get_bucket_location", Bucket="workshop-of-mine")
    assert location["LocationConstraint"] == "eu-west-1"


def test_a_bucket_of_somebody_else_gets_nothing():
    aws, stubs = scripted("s3")
    stubs["s3"].add_client_error(
        "head_bucket", "403", "Forbidden", expected_params={"Bucket": "a", "ExpectedBucketOwner": OWNER}
    )
    with pytest.raises(AwsError, match="is not one of account 123456789012, or closed to you"):
        account.ensure_bucket("a", aws, OWNER)


def test_the_clean_up_finds_what_has_the_tag_and_removes_that_alone(tmp_path, monkeypatch):
    own = account.connect("eu-central-1")  # a region in which no other test has left anything
    before = cleanup.find(own)
    account.ensure_bucket("elsewhere", account.connect("eu-north-1"), OWNER)
    for name, tag in (("ours", TAG), ("not-ours", {"Key": "team", "Value": "red"})):
        job = {**TRAINING_JOB, "TrainingJobName": name}
        own.call("sagemaker", "create_training_job", **job, Tags=[tag])
        own.call("ecr", "create_repository", repositoryName=f"workshop-{name}", tags=[tag])
        notebook = {"NotebookInstanceName": name, "InstanceType": "ml.t3.medium", "RoleArn": ROLE}
        own.call("sagemaker", "create_notebook_instance", **notebook, Tags=[tag])
        template = '{"Resources": {"Logs": {"Type": "AWS::Logs::LogGroup"}}}'
        own.call("cloudformation", "create_stack", StackName=name, TemplateBody=template, Tags=[tag])
        account.ensure_bucket(name, own, OWNER)
        own.call("s3", "put_bucket_tagging", Bucket=name, Tagging={"TagSet": [tag]})
        own.call("s3", "put_object", Bucket=name, Key="model", Body=b"1")
    place_of = {"CreateBucketConfiguration": {"LocationConstraint": "eu-central-1"}}
    own.call("s3", "create_bucket", Bucket="without-tags", **place_of)
    left = [thing for thing in cleanup.find(own)[0] if thing not in before[0]]
    assert {(thing.kind, thing.name) for thing in left} == {
        *((kind, "ours") for kind in ("bucket", "stack", "notebook instance")),
        ("image repository", "workshop-ours"),
    }
    # What can only be removed from elsewhere, or takes long, comes last.
    assert [thing.kind for thing in left][-2:] == ["notebook instance", "stack"]
    assert str(left[-2]) == "notebook instance ours (costs money every second)"
    metadata = tmp_path / "resource-metadata.json"
    metadata.write_text('{"ResourceName": "ours"}')
    with monkeypatch.context() as patched:
        patched.setattr(cleanup, "NOTEBOOK", metadata)
        with pytest.raises(AwsError, match="you are on it"):
            cleanup.remove(left[-2], own)
    for thing in left:
        cleanup.remove(thing, own)
    assert cleanup.find(own) == before


def test_the_clean_up_stops_what_runs_and_names_what_it_may_not_see():
    aws, stubs = scripted("sagemaker", "s3", "ecr", "cloudformation")
    stubs["s3"].add_response("list_buckets", {"Buckets": [{"Name": "removed-meanwhile"}, {"Name": "closed"}]})
    stubs["s3"].add_client_error("get_bucket_tagging", "NoSuchBucket", "no")
    stubs["s3"].add_client_error("get_bucket_tagging", "AccessDenied", "no")
    stubs["ecr"].add_response("describe_repositories", {"repositories": []})
    stubs["cloudformation"].add_response("describe_stacks", {"Stacks": []})
    named = ("TrainingJobArn", "TrainingJobStatus")
    runs = {"TrainingJobName": "runs", **{name: TRAINING[name] for name in named}}
    listed = {
        "TrainingJobSummaries": [
            {**runs, "TrainingJobName": name, "CreationTime": NOW} for name in ("theirs", "runs")
        ]
    }
    stubs["sagemaker"].add_response("list_training_jobs", listed)
    stubs["sagemaker"].add_client_error(
        "list_tags", "AccessDeniedException", "no"
    )  # must not hide the next one
    stubs["sagemaker"].add_response("list_tags", {"Tags": [TAG]})
    stubs["sagemaker"].add_client_error("list_notebook_instances", "AccessDeniedException", "no")
    (left,), (jobs, buckets, unseen) = cleanup.find(aws)
    assert jobs == "jobs: you may not read the tags of theirs"
    assert buckets == "buckets: you may not read the tags of closed"
    assert unseen.startswith("notebooks: list_notebook_instances: AWS answers AccessDeniedException")
    assert str(left) == "running job runs (costs money every second)"
    stubs["sagemaker"].add_response("stop_training_job", {}, {"TrainingJobName": "runs"})
    cleanup.remove(left, aws)
    stubs["sagemaker"].assert_no_pending_responses()


def test_what_cannot_be_removed_does_not_keep_the_rest(monkeypatch):
    aws = account.connect("us-east-1")
    account.ensure_bucket("left-by-the-workshop", aws, OWNER)
    things = [cleanup.Remains("bucket", name, "") for name in ("not-there", "left-by-the-workshop")]
    monkeypatch.setattr(cleanup, "find", lambda aws: (things, ["stacks: you may not"]))
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(aws.endpoint))
    assert "nothing was removed" in CliRunner().invoke(cli.app, ["clean-up"], input="n\n").stdout
    cleaned = CliRunner().invoke(cli.app, ["clean-up", "--yes"])
    assert cleaned.exit_code == 1
    assert "could not remove bucket not-there: list_objects_v2: " in cleaned.output
    assert "removed bucket left-by-the-workshop" in cleaned.output
    assert "could not look at stacks: you may not" in cleaned.output
    things.clear()
    empty = CliRunner().invoke(cli.app, ["clean-up"])
    assert "nothing of the workshop was found where this could look" in empty.stdout
    assert empty.exit_code == 0


# Stacks, zones, and the role of a notebook


def stack_of(status, **outputs):
    listed = [{"OutputKey": key, "OutputValue": value} for key, value in outputs.items()]
    stack = {"StackName": "workshop-network", "CreationTime": NOW, "StackStatus": status}
    return {"Stacks": [stack | ({"Outputs": listed} if listed else {})]}


def test_a_stack_is_made_once_and_one_that_is_there_is_left_as_somebody_chose_it():
    aws = account.connect("us-west-2")
    first = account.deploy(NETWORK, aws, Zone="us-west-2a")
    assert set(first) == {"Subnet", "SecurityGroup"}
    assert account.deploy(NETWORK, aws, Zone="us-west-2b") == first
    aws, stubs = scripted("cloudformation")  # any call but this one raises
    stubs["cloudformation"].add_response("describe_stacks", stack_of("UPDATE_COMPLETE", Subnet="subnet-1"))
    assert account.deploy(NETWORK, aws, Zone="us-east-1a") == {"Subnet": "subnet-1"}


def test_a_stack_that_has_failed_is_an_error_that_says_what_to_do():
    aws, stubs = scripted("cloudformation")
    stubs["cloudformation"].add_response("describe_stacks", stack_of("ROLLBACK_COMPLETE"))
    with pytest.raises(AwsError, match=r"is ROLLBACK_COMPLETE and has no outputs: .* delete it, then try"):
        account.deploy(NETWORK, aws, Zone="us-east-1a")
    absent = ("ValidationError", "Stack with id workshop-network does not exist")
    stubs["cloudformation"].add_client_error("describe_stacks", *absent)
    stubs["cloudformation"].add_response("create_stack", {"StackId": "x"})
    stubs["cloudformation"].add_response("describe_stacks", stack_of("ROLLBACK_COMPLETE"))
    with pytest.raises(AwsError, match=r"stack_create_complete did not come: .*console"):
        account.deploy(NETWORK, aws, Zone="us-east-1a")


def test_an_own_image_that_was_never_built_is_refused_before_anything_is_sent(make_job):
    image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/workshop-horovod:cpu"
    job = make_job("import horovod.torch", strategy="horovod", workers=2, image=image)
    aws, stubs = scripted("ecr", "s3")
    stubs["ecr"].add_response("batch_get_image", {"images": []})
    place = SageMaker(aws, role=ROLE, region="us-east-1", confirm=True)
    with pytest.raises(AwsError, match=r"no image .*workshop-horovod:cpu: jobs/images/build\.sh makes it"):
        place.launch(job)
    stubs["ecr"].add_client_error("batch_get_image", "RepositoryNotFoundException", "it does not exist")
    with pytest.raises(AwsError, match=r"no image .*: jobs/images/build\.sh makes it"):
        place.launch(job)
    # SageMaker's role takes the image; whoever launches may not be allowed to look at it.
    stubs["ecr"].add_client_error("batch_get_image", "AccessDeniedException", "no")
    stubs["s3"].add_client_error("head_bucket", "403", "no")
    with pytest.raises(AwsError, match=r"the bucket .* closed to you"):
        place.launch(job)


def test_only_zones_that_have_the_instance_type_are_named():
    aws = account.connect("us-east-1")
    zones = account.zones("ml.p4d.24xlarge", aws)
    assert zones
    assert len(zones) < len(account.zones("ml.c5.xlarge", aws))
    with pytest.raises(AwsError, match=r"no zone of us-east-1 has ml\.nothing\.large: take another"):
        account.zones("ml.nothing.large", aws)


def test_on_a_notebook_instance_the_account_is_that_of_its_role(monkeypatch, tmp_path):
    metadata = tmp_path / "resource-metadata.json"
    monkeypatch.setattr(account, "NOTEBOOK", metadata)
    assert account.connect("us-east-1").is_emulated
    metadata.write_text("{}")
    assert str(account.connect("us-east-1")).startswith(
        "AWS itself, region us-east-1, the role of this notebook"
    )
