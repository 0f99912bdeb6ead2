"""What AWS alone can answer: refusals, throttling, and a job's life; and the question before anything is paid for."""

from __future__ import annotations

import datetime
import io
import sys
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from conftest import MakeJob, Watch

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.sagemaker import SageMaker, cleanup
from workshop_utils.launchers.sagemaker import run as run_module
from workshop_utils.launchers.sagemaker.account import Aws
from workshop_utils.launchers.sagemaker.errors import AwsError
from workshop_utils.launchers.sagemaker.preflight import NotConfirmed
from workshop_utils.launchers.sagemaker.request import plan
from workshop_utils.launchers.sagemaker.run import LATE_LOOKS, SageMakerRun
from workshop_utils.runs import RunFailed, RunState

ROLE = "arn:aws:iam::123456789012:role/workshop"
NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
NAME = {"TrainingJobName": "x"}


@pytest.fixture(autouse=True)
def _aws_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(run_module, "LATE_SECONDS", 0.001)


def scripted(*services: str) -> tuple[Aws, dict[str, Stubber]]:
    """AWS itself, in which each service's answers are those that its Stubber is given, in that order."""
    clients = {service: boto3.client(service, region_name="us-east-1") for service in services}  # type: ignore[call-overload]
    stubs = {service: Stubber(client) for service, client in clients.items()}
    for stub in stubs.values():
        stub.activate()
    return Aws("us-east-1", clients=clients), stubs


# One message for each refusal


@pytest.mark.parametrize(
    ("code", "said", "message"),
    [
        ("ExpiredTokenException", "expired", "your credentials have expired; log in with `aws configure`"),
        ("AccessDeniedException", "no", "you may not do that; what a learner needs is in jobs/clusters/"),
        ("ValidationException", "Could not assume role x.", "SageMaker cannot act as the role"),
        ("SomethingNew", "never seen", "AWS answered SomethingNew. AWS says: never seen"),
    ],
)
def test_each_refusal_says_what_it_means_and_what_to_do(code: str, said: str, message: str) -> None:
    aws, stubs = scripted("sagemaker")
    stubs["sagemaker"].add_client_error("describe_training_job", code, said)
    with pytest.raises(AwsError) as refused:
        aws.call("sagemaker", "describe_training_job", **NAME)
    assert message in str(refused.value)
    assert said in str(refused.value)
    assert str(refused.value).startswith("describe_training_job: ")
    assert refused.value.code == code


def test_where_nobody_answers_the_message_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(AwsError, match=r"cannot be reached: .*region's name right"):
            Aws("us-east-1").call("sts", "get_caller_identity")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(AwsError, match=r"profile \(nobody\) could not be found; log in .*sagemaker-stand-in"):
        Aws("us-east-1").call("sts", "get_caller_identity")


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("http://localhost:4000", "a local stand-in for AWS at http://localhost:4000"),
        (None, "AWS itself, region us-east-1, profile default: what is started here is paid for"),
        ("https://vpce-1.api.sagemaker.us-east-1.vpce.amazonaws.com", "AWS itself at https://vpce-1"),
    ],
)
def test_only_this_machine_is_a_stand_in(endpoint: str | None, said: str) -> None:
    aws = Aws("us-east-1", endpoint)
    assert str(aws).startswith(said)
    assert aws.is_stand_in is ("stand-in" in said)


# A job's life


def description(status: str, secondary: str, **more: Any) -> dict[str, Any]:
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


def started(aws: Aws, job: TrainingJob, poll_seconds: float = 0.01) -> SageMakerRun:
    """A run of a job that AWS has taken already."""
    return SageMakerRun(plan(job, SageMaker(role=ROLE, region="us-east-1")), aws, poll_seconds)


def no_logs(stub: Stubber, times: int) -> None:
    for _ in range(times):
        stub.add_client_error("describe_log_streams", "ResourceNotFoundException")


def test_a_job_that_cannot_be_stopped_is_said_to_cost_money_and_stopping_can_be_tried_again(
    make_job: MakeJob, watch: Watch
) -> None:
    aws, stubs = scripted("sagemaker", "logs")
    stubs["sagemaker"].add_response("describe_training_job", TRAINING)
    no_logs(stubs["logs"], 1)
    run = started(aws, make_job("import torch"), poll_seconds=1000)
    assert watch.eventually(lambda: run.stage == "Training")
    stubs["sagemaker"].add_client_error("stop_training_job", "AccessDeniedException", "no")
    stubs["sagemaker"].add_response("describe_training_job", TRAINING)
    with pytest.raises(AwsError, match="could not be stopped and still costs money: stop it in SageMaker's"):
        run.stop()
    assert run.state is RunState.RUNNING
    # One that somebody else stops already may be stopped, too.
    stubs["sagemaker"].add_client_error("stop_training_job", "ValidationException", "is in status Stopping")
    stubs["sagemaker"].add_response("describe_training_job", description("Stopping", "Stopping"))
    stubs["sagemaker"].add_response("describe_training_job", description("Stopped", "Stopped"))
    no_logs(stubs["logs"], 1 + LATE_LOOKS)
    run.stop()
    assert run.state is RunState.STOPPED
    with pytest.raises(AwsError, match="has no model: its state is stopped"):
        run.download_model("nowhere")


def test_logs_are_read_from_where_they_were_left_and_end_with_sagemaker_s_reason(make_job: MakeJob) -> None:
    aws, stubs = scripted("sagemaker", "logs")
    failed = description("Failed", "Failed", FailureReason="CapacityError: Unable to provision")
    for state in (TRAINING, failed):
        stubs["sagemaker"].add_response("describe_training_job", state)
    metric = '{"workshop": "metric", "worker": "worker-3", "rank": 3, "time": 1.0, "step": 1, "loss": 0.5}'
    rank = "[1,mpirank:3,algo-2]<stdout>:"  # the toolkit's mark
    for number, page in enumerate((["one"], [f"{rank}{metric}", f"{rank}two"], ["late"])):
        stream = {"logStreamName": "x/algo-2-1700000000"}
        stubs["logs"].add_response("describe_log_streams", {"logStreams": [stream]})
        for messages in (page, []):
            events = [{"timestamp": 1, "message": message} for message in messages]
            answer = {"events": events, "nextForwardToken": f"f/{number}"}
            stubs["logs"].add_response("get_log_events", answer)
    no_logs(stubs["logs"], LATE_LOOKS - 1)
    run = started(aws, make_job("import torch"))
    last = r"  \[algo-2\] one\n  \[worker-3\] two\n  \[algo-2\] late"
    with pytest.raises(RunFailed, match=rf"Unable to provision\nIts last lines:\n{last}$"):
        run.wait(30)
    assert list(run.metrics["loss"]) == [0.5]


def test_a_run_that_nobody_answers_for_is_given_up_and_says_that_it_may_still_run(make_job: MakeJob) -> None:
    aws, stubs = scripted("sagemaker", "logs")
    for _ in range(run_module.BLIND_POLLS):
        stubs["sagemaker"].add_client_error("describe_training_job", "ExpiredTokenException", "expired")
    with pytest.raises(RunFailed, match=r"may still run\. .*your credentials have expired"):
        started(aws, make_job("import torch")).wait(30)


def test_the_clean_up_stops_what_runs_and_cools_what_is_warm() -> None:
    aws, stubs = scripted("sagemaker", "logs", "s3", "ecr", "cloudformation")
    stubs["s3"].add_response("list_buckets", {"Buckets": []})
    stubs["ecr"].add_response("describe_repositories", {"repositories": []})
    stubs["cloudformation"].add_response("describe_stacks", {"Stacks": []})
    arn = "arn:aws:sagemaker:us-east-1:123456789012:training-job/"
    listed = [
        {
            "TrainingJobName": name,
            "TrainingJobArn": arn + name,
            "CreationTime": NOW,
            "TrainingJobStatus": status,
            "WarmPoolStatus": {"Status": warm},
        }
        for name, status, warm in (("runs", "InProgress", "InUse"), ("warm", "Completed", "Available"))
    ]
    stubs["sagemaker"].add_response("list_training_jobs", {"TrainingJobSummaries": listed})
    for _ in listed:
        stubs["sagemaker"].add_response("list_tags", {"Tags": [cleanup.TAG]})
    no_logs(stubs["logs"], 1)
    found = cleanup.find(aws)
    assert list(map(str, found)) == [
        "running job runs (costs money every second)",
        "warm instances warm (cost money every second)",
    ]
    stubs["sagemaker"].add_response("stop_training_job", {}, {"TrainingJobName": "runs"})
    cold = {"TrainingJobName": "warm", "ResourceConfig": {"KeepAlivePeriodInSeconds": 0}}
    stubs["sagemaker"].add_response("update_training_job", {"TrainingJobArn": arn + "warm"}, cold)
    for thing in found:
        cleanup.remove(thing, aws)
    stubs["sagemaker"].assert_no_pending_responses()


# Before anything is paid for


class Terminal(io.StringIO):
    """Somebody who answers."""

    def isatty(self) -> bool:
        return True


def place(aws: Aws, **settings: Any) -> SageMaker:
    return SageMaker(aws, role=ROLE, region="us-east-1", **settings)


@pytest.mark.parametrize("answer", ["n", "", "yes please"])
def test_only_a_yes_is_a_yes_and_the_question_holds_the_most_that_it_can_cost(
    make_job: MakeJob, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    aws, _ = scripted("s3", "sagemaker")  # whoever asked them anything would be told that it has no answer
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    job = make_job("import torch", strategy="torch_ddp", workers=2)
    with pytest.raises(NotConfirmed, match="nothing was started"):
        place(aws, max_runtime="30min", keep_alive="30min").launch(job)
    question = capsys.readouterr().out
    assert "price: 2 × 0.204 $/h × 60 min = at most 0.41 $" in question
    assert "quota: 'ml.c5.xlarge for training job usage' must be at least 2" in question


@pytest.mark.parametrize(("answer", "confirm"), [(" YES \n", False), ("", True)])
def test_who_agrees_is_asked_once_or_not_at_all(
    make_job: MakeJob, answer: str, confirm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws, stubs = scripted("s3", "sagemaker")
    stubs["s3"].add_client_error("head_bucket", "AccessDenied", "reached S3")
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    with pytest.raises(AwsError, match="reached S3"):
        place(aws, confirm=confirm).launch(make_job("import torch"))


def test_where_nobody_can_be_asked_nothing_is_started(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws, _ = scripted("s3", "sagemaker")
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(
        NotConfirmed, match=r"Set confirm to true to agree to:\n1 × ml\.c6i(.|\n)*not known here"
    ):
        place(aws, instance_type="ml.c6i.xlarge").launch(make_job("import torch"))
