"""What AWS can answer that the stand-in does not: each is one clear message, and throttling is met with patience."""

from __future__ import annotations

import datetime
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import ReadTimeoutError
from botocore.stub import Stubber
from conftest import MakeJob, Watch

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.sagemaker import SageMaker, account, preflight, prices
from workshop_utils.launchers.sagemaker import run as run_module
from workshop_utils.launchers.sagemaker.account import StandInAccount
from workshop_utils.launchers.sagemaker.calls import THROTTLED, TRIES, Aws, AwsError
from workshop_utils.launchers.sagemaker.preflight import NotConfirmed
from workshop_utils.launchers.sagemaker.run import LATE_LOOKS, SageMakerRun
from workshop_utils.runs import RunFailed, RunState

ROLE = "arn:aws:iam::123456789012:role/workshop"
KEYS = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)


def scripted(*services: str) -> tuple[Aws, dict[str, Stubber]]:
    """AWS itself, in which each service's answers are those that its Stubber is given, in that order."""
    clients = {service: boto3.client(service, **KEYS) for service in services}  # type: ignore[call-overload]
    stubs = {service: Stubber(client) for service, client in clients.items()}
    for stub in stubs.values():
        stub.activate()
    return Aws("us-east-1", clients=clients), stubs


def refuse(stub: Stubber, operation: str, code: str, message: str = "said AWS") -> None:
    stub.add_client_error(operation, code, message)


# One message for each


@pytest.mark.parametrize(
    ("code", "said", "message"),
    [
        ("ExpiredTokenException", "expired", "your credentials have expired; log in with `aws configure`"),
        ("UnrecognizedClientException", "invalid", "AWS does not know these credentials"),
        (
            "AccessDeniedException",
            "not authorized",
            "you may not do that. AWS says: not authorized What a learner needs",
        ),
        (
            "ResourceLimitExceeded",
            "The account-level service limit 'ml.p3.2xlarge for training job usage' is 0 Instances.",
            "Ask for more under Service Quotas, Amazon SageMaker, '<instance type> for training job usage'",
        ),
        (
            "ValidationException",
            "Could not assume role arn:aws:iam::123456789012:role/x. Please ensure that the role exists",
            "SageMaker cannot act as the role. It must exist, and trust sagemaker.amazonaws.com",
        ),
        (
            "CapacityError",
            "Unable to provision",
            "AWS has no such instances left just now. Try again later, or",
        ),
        ("ResourceInUse", "names must be unique", "a job of that name exists already"),
        ("SomethingNew", "never seen", "AWS answered SomethingNew: never seen"),
    ],
)
def test_each_refusal_says_what_it_means_and_what_to_do(code: str, said: str, message: str) -> None:
    aws, stubs = scripted("sagemaker")
    refuse(stubs["sagemaker"], "describe_training_job", code, said)
    with pytest.raises(AwsError) as refused:
        aws.call("sagemaker", "describe_training_job", TrainingJobName="x")
    assert message in str(refused.value)
    assert str(refused.value).startswith("describe_training_job: ")
    assert refused.value.code == code


def test_without_credentials_the_message_says_how_to_log_in_and_that_there_is_a_stand_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(
        AwsError, match=r"there are no AWS credentials here; log in with .* use the local stand-in"
    ):
        Aws("us-east-1").call("sts", "get_caller_identity")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(AwsError, match=r"nobody.*AWS_PROFILE must name a profile"):
        Aws("us-east-1").call("sts", "get_caller_identity")


def test_a_service_that_cannot_be_reached_is_said_to_be_so() -> None:
    nowhere = Aws("us-east-1", "http://127.0.0.1:9", account.CREDENTIALS)
    with pytest.raises(AwsError, match=r"AWS cannot be reached .*region's name"):
        nowhere.call("sts", "get_caller_identity")


@pytest.mark.parametrize(
    ("endpoint", "stand_in", "said"),
    [
        ("http://127.0.0.1:4000", True, "a local stand-in for AWS at http://127.0.0.1:4000"),
        ("http://localhost:4000", True, "a local stand-in"),
        (None, False, "AWS itself, region us-east-1"),
        (
            "https://vpce-1.api.sagemaker.us-east-1.vpce.amazonaws.com",
            False,
            "AWS itself at https://vpce-1.api",
        ),
    ],
)
def test_only_this_machine_is_a_stand_in_and_every_other_endpoint_may_cost_money(
    endpoint: str | None, stand_in: bool, said: str
) -> None:
    aws = Aws("us-east-1", endpoint)
    assert aws.is_stand_in is stand_in
    assert str(aws).startswith(said)


# Patience


class Body(io.BytesIO):
    """The body of an answer, as urllib3 hands it out."""

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.read()


def answered_with(status: int, content: dict[str, Any]) -> AWSResponse:
    body = Body(json.dumps(content).encode())
    return AWSResponse("https://api.sagemaker.us-east-1.amazonaws.com", status, HTTPHeaders(), body)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long botocore would have waited, each time."""
    found: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=found.append))
    return found


def throttling(code: str, times: int) -> tuple[Aws, list[str]]:
    """AWS that first refuses with `code`, `times` times; and what it is asked, each time."""
    aws = Aws("us-east-1", credentials=account.CREDENTIALS)
    asked: list[str] = []

    def answer(request: Any, **_: Any) -> AWSResponse:
        asked.append(request.headers["X-Amz-Target"].decode())
        if len(asked) > times:
            return answered_with(200, {"TrainingJobSummaries": []})
        return answered_with(400, {"__type": code, "message": "Rate exceeded"})

    aws.client("sagemaker").meta.events.register("before-send.sagemaker", answer)
    return aws, asked


@pytest.mark.parametrize("code", sorted(THROTTLED))
def test_a_throttled_call_is_tried_again_more_and_more_slowly(code: str, pauses: list[float]) -> None:
    aws, asked = throttling(code, 3)
    assert aws.call("sagemaker", "list_training_jobs")["TrainingJobSummaries"] == []
    assert asked == ["SageMaker.ListTrainingJobs"] * 4
    assert len(pauses) == 3
    assert all(pause <= 2**tries for tries, pause in enumerate(pauses))


def test_patience_has_an_end(pauses: list[float]) -> None:
    aws, asked = throttling("ThrottlingException", TRIES)
    with pytest.raises(AwsError, match=f"still asks to slow down after {TRIES} tries"):
        aws.call("sagemaker", "list_training_jobs")
    assert len(asked) == TRIES
    assert len(pauses) == TRIES - 1


def test_a_job_whose_first_answer_was_lost_is_said_to_exist_perhaps(pauses: list[float]) -> None:
    aws = Aws("us-east-1", credentials=account.CREDENTIALS)
    asked: list[Any] = []

    def answer(request: Any, **_: Any) -> AWSResponse:
        asked.append(request)
        if len(asked) == 1:
            raise ReadTimeoutError(endpoint_url=request.url)
        return answered_with(400, {"__type": "ResourceInUse", "message": "names must be unique."})

    aws.client("sagemaker").meta.events.register("before-send.sagemaker", answer)
    with pytest.raises(AwsError, match=r"names must be unique\. It may be this very one"):
        aws.call("sagemaker", "stop_training_job", TrainingJobName="x")
    assert len(pauses) == 1


def test_a_listing_is_read_to_its_last_page_and_what_it_raises_is_explained() -> None:
    aws, stubs = scripted("sagemaker")
    tags = [[{"Key": "a", "Value": "1"}], [{"Key": "b", "Value": "2"}]]
    stubs["sagemaker"].add_response("list_tags", {"Tags": tags[0], "NextToken": "more"})
    stubs["sagemaker"].add_response(
        "list_tags", {"Tags": tags[1]}, {"ResourceArn": "x" * 20, "NextToken": "more"}
    )
    assert list(aws.pages("sagemaker", "list_tags", "Tags", ResourceArn="x" * 20)) == [*tags[0], *tags[1]]
    refuse(stubs["sagemaker"], "list_tags", "AccessDeniedException", "no")
    with pytest.raises(AwsError, match="list_tags: you may not do that"):
        list(aws.pages("sagemaker", "list_tags", "Tags", ResourceArn="x" * 20))


# A job's life, as only AWS lives it


def description(status: str, secondary: str, **more: Any) -> dict[str, Any]:
    return {
        "TrainingJobName": "x",
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


def started(aws: Aws, job: TrainingJob, poll_seconds: float = 0.01) -> SageMakerRun:
    """A run of a job that AWS has taken already."""
    request = SageMaker(role=ROLE, region="us-east-1").render(job)
    look = preflight.Preflight(1, "ml.c5.xlarge", "us-east-1", 60, None, "")
    return SageMakerRun(request, aws, look, ("algo-1",), poll_seconds)


@pytest.fixture(autouse=True)
def _late_lines_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "LATE_SECONDS", 0.001)


def no_logs(stub: Stubber, times: int) -> None:
    for _ in range(times):
        refuse(stub, "describe_log_streams", "ResourceNotFoundException")


def test_a_job_goes_through_its_stages_and_ends_well(make_job: MakeJob) -> None:
    aws, stubs = scripted("sagemaker", "logs")
    for stage in ("Starting", "Downloading", "Training"):
        stubs["sagemaker"].add_response("describe_training_job", description("InProgress", stage))
    done = description("Completed", "Completed", BillableTimeInSeconds=61)
    stubs["sagemaker"].add_response("describe_training_job", done)
    no_logs(stubs["logs"], 4 + LATE_LOOKS)
    run = started(aws, make_job("import torch")).wait(30)
    assert (run.state, run.billed_seconds, run.model_uri) == (
        RunState.SUCCEEDED,
        61,
        "s3://bucket/model.tar.gz",
    )


def test_a_job_for_which_there_is_no_capacity_fails_with_sagemaker_s_reason(make_job: MakeJob) -> None:
    aws, stubs = scripted("sagemaker", "logs")
    failed = description(
        "Failed", "Failed", FailureReason="CapacityError: Unable to provision requested ML compute"
    )
    stubs["sagemaker"].add_response("describe_training_job", failed)
    no_logs(stubs["logs"], 1 + LATE_LOOKS)
    with pytest.raises(RunFailed, match=r"CapacityError: Unable to provision .*\nIts log is empty"):
        started(aws, make_job("import torch")).wait(30)


def answered(stubs: dict[str, Stubber]) -> bool:
    """Whether everything that was to be answered has been asked."""
    return not any(stub._queue for stub in stubs.values())


def test_a_job_that_cannot_be_stopped_is_said_to_cost_money_and_stopping_can_be_tried_again(
    make_job: MakeJob, watch: Watch
) -> None:
    aws, stubs = scripted("sagemaker", "logs")
    training = description("InProgress", "Training")
    stubs["sagemaker"].add_response("describe_training_job", training)
    no_logs(stubs["logs"], 1)
    run = started(aws, make_job("import torch"), poll_seconds=1000)
    assert watch.eventually(lambda: answered(stubs))
    refuse(stubs["sagemaker"], "stop_training_job", "AccessDeniedException", "no")
    stubs["sagemaker"].add_response("describe_training_job", training)
    with pytest.raises(
        AwsError, match="could not be stopped and still costs money: stop it in SageMaker's console"
    ):
        run.stop()
    assert run.state is RunState.RUNNING
    stubs["sagemaker"].add_response("stop_training_job", {})
    stubs["sagemaker"].add_response("describe_training_job", description("Stopped", "Stopped"))
    no_logs(stubs["logs"], 1 + LATE_LOOKS)
    run.stop()
    assert run.state is RunState.STOPPED
    assert answered(stubs)


def test_a_job_that_somebody_else_is_stopping_may_be_stopped_too(make_job: MakeJob, watch: Watch) -> None:
    aws, stubs = scripted("sagemaker", "logs")
    stubs["sagemaker"].add_response("describe_training_job", description("InProgress", "Training"))
    no_logs(stubs["logs"], 1)
    run = started(aws, make_job("import torch"), poll_seconds=1000)
    assert watch.eventually(lambda: answered(stubs))
    refuse(stubs["sagemaker"], "stop_training_job", "ValidationException", "is in status Stopping")
    stubs["sagemaker"].add_response("describe_training_job", description("Stopping", "Stopping"))
    stubs["sagemaker"].add_response("describe_training_job", description("Stopped", "Stopped"))
    no_logs(stubs["logs"], 1 + LATE_LOOKS)
    run.stop()
    assert run.state is RunState.STOPPED


def test_logs_are_read_from_where_they_were_left_and_the_toolkit_s_marks_of_ranks_are_read(
    make_job: MakeJob,
) -> None:
    aws, stubs = scripted("sagemaker", "logs")
    stream = {"logStreams": [{"logStreamName": "x/algo-2-1700000000"}]}
    metric = '{"workshop": "metric", "worker": "worker-3", "rank": 3, "time": 1.0, "step": 1, "loss": 0.5}'
    pages = [["one"], [f"[1,mpirank:3,algo-2]<stdout>:{metric}", "[1,mpirank:3,algo-2]<stdout>:two"]]
    for number, page in enumerate(pages):
        final = number == len(pages) - 1
        status = ("Completed", "Completed") if final else ("InProgress", "Training")
        stubs["sagemaker"].add_response("describe_training_job", description(*status))
        stubs["logs"].add_response("describe_log_streams", stream)
        events = [{"timestamp": 1, "message": message} for message in page]
        token = {"nextForwardToken": f"f/{number}"}
        stubs["logs"].add_response("get_log_events", {"events": events, **token})
        stubs["logs"].add_response("get_log_events", {"events": [], **token})
    late = {"events": [{"timestamp": 1, "message": "late"}], "nextForwardToken": "f/late"}
    stubs["logs"].add_response("describe_log_streams", stream)
    stubs["logs"].add_response("get_log_events", late)
    stubs["logs"].add_response("get_log_events", {**late, "events": []})
    no_logs(stubs["logs"], LATE_LOOKS - 1)
    run = started(aws, make_job("import torch")).wait(30)
    assert [(line.worker, line.text) for line in run.logs()] == [
        ("algo-2", "one"),
        ("worker-3", "two"),
        ("algo-2", "late"),
    ]
    assert list(run.metrics["loss"]) == [0.5]


@pytest.mark.usefixtures("pauses")
def test_a_run_that_nobody_answers_for_is_given_up_and_says_that_it_may_still_run(
    make_job: MakeJob, nothing_is_left: Path
) -> None:
    with StandInAccount() as server:
        aws = server.aws()
        account.ensure_role(ROLE, aws)
        script = "print('up', flush=True)\nimport time\ntime.sleep(1000)"
        run = SageMaker(aws, role=ROLE, region="us-east-1").launch(make_job(script))
        assert next(run.logs(follow=True)).text == "up"
    # The account is gone, and with it all that it had started.
    with pytest.raises(RunFailed, match="cannot be seen any more, and may still run"):
        run.wait(60)


# Before anything is paid for


def look_at(make_job: MakeJob, aws: Aws, **settings: Any) -> preflight.Preflight:
    job = make_job("import torch", strategy="torch_ddp", workers=2)
    return SageMaker(aws, role=ROLE, region="us-east-1", **settings).preflight(job)


def identify(stubs: dict[str, Stubber], number: str = "123456789012") -> None:
    stubs["sts"].add_response("get_caller_identity", {"Account": number})


def quote(stubs: dict[str, Stubber], price: str | None) -> None:
    if price is None:
        refuse(stubs["pricing"], "get_products", "AccessDeniedException")
        return
    terms = {"OnDemand": {"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": price}}}}}}
    stubs["pricing"].add_response("get_products", {"PriceList": [json.dumps({"terms": terms})]})


def grant(stubs: dict[str, Stubber], name: str, value: float) -> None:
    quotas = [{"QuotaName": "something else", "Value": 7.0}, {"QuotaName": name, "Value": value}]
    stubs["service-quotas"].add_response("list_service_quotas", {"Quotas": quotas})


def test_the_most_that_a_job_can_cost_is_instances_times_price_times_limit(make_job: MakeJob) -> None:
    aws, stubs = scripted("sts", "pricing", "service-quotas")
    identify(stubs)
    quote(stubs, "0.25")
    grant(stubs, "ml.c5.xlarge for training job usage", 4.0)
    found = look_at(make_job, aws, max_runtime="30min", keep_alive="30min")
    assert (found.instances, found.seconds, found.dollars_an_hour, found.quota) == (2, 3600, 0.25, 4.0)
    assert found.most_dollars == 0.5
    assert "price: 2 × 0.25 $/h × 60 min = at most 0.50 $ (AWS's price list for us-east-1, today)" in str(
        found
    )
    assert "quota: 'ml.c5.xlarge for training job usage' must be at least 2; it is 4" in str(found)


def test_without_permission_for_prices_and_quotas_the_table_stands_in(make_job: MakeJob) -> None:
    aws, stubs = scripted("sts", "pricing", "service-quotas")
    identify(stubs)
    quote(stubs, None)
    refuse(stubs["service-quotas"], "list_service_quotas", "AccessDeniedException")
    found = look_at(make_job, aws)
    assert found.dollars_an_hour == prices.DOLLARS_AN_HOUR["ml.c5.xlarge"]
    assert "it could not be read" in str(found)
    assert found.quota_suffices


def test_an_instance_type_without_a_known_price_is_said_to_have_none(make_job: MakeJob) -> None:
    found = preflight.Preflight(1, "ml.trn1.32xlarge", "us-east-1", 60, None, "")
    assert found.most_dollars is None
    assert "price: not known here" in str(found)


def test_a_quota_of_zero_is_found_before_the_launch_even_where_the_cost_is_agreed_to(
    make_job: MakeJob,
) -> None:
    aws, stubs = scripted("sts", "pricing", "service-quotas")
    identify(stubs)
    quote(stubs, "3.825")
    grant(stubs, "ml.p3.2xlarge for spot training job usage", 0.0)
    found = look_at(make_job, aws, instance_type="ml.p3.2xlarge", spot=True)
    with pytest.raises(AwsError, match="is 0, and the job needs 2: ask for more under Service Quotas"):
        preflight.agree(found, confirmed=True)


def test_credentials_of_another_account_than_the_role_s_are_found(make_job: MakeJob) -> None:
    aws, stubs = scripted("sts")
    identify(stubs, "999999999999")
    with pytest.raises(
        AwsError, match="of account 123456789012, but your credentials are of account 999999999999"
    ):
        look_at(make_job, aws)


@pytest.mark.parametrize(("answer", "agreed"), [("y", True), (" YES ", True), ("n", False), ("", False)])
def test_only_a_yes_is_a_yes_and_the_question_holds_the_cost(answer: str, agreed: bool) -> None:
    questions: list[str] = []

    def ask(question: str) -> str:
        questions.append(question)
        return answer

    found = preflight.Preflight(2, "ml.c5.xlarge", "us-east-1", 3600, 0.204, "table")
    if agreed:
        preflight.agree(found, confirmed=False, ask=ask)
    else:
        with pytest.raises(NotConfirmed, match="nothing was started"):
            preflight.agree(found, confirmed=False, ask=ask)
    assert "at most 0.41 $" in questions[0]
    preflight.agree(found, confirmed=True, ask=None)
    assert len(questions) == 1


def test_where_nobody_can_be_asked_nothing_is_started(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws, stubs = scripted("sts", "pricing", "service-quotas", "s3", "sagemaker")
    identify(stubs)
    quote(stubs, "0.25")
    refuse(stubs["service-quotas"], "list_service_quotas", "AccessDeniedException")
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(NotConfirmed, match=r"Set confirm to true to agree to:\n1 × ml\.c5\.xlarge"):
        SageMaker(aws, role=ROLE, region="us-east-1").launch(make_job("import torch"))
    # Neither S3 nor SageMaker was asked for anything: their Stubbers have no answers, and would have raised.
