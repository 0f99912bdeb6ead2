"""The Python SDK's ModelTrainer sends what we send, but for how it wraps drivers; and it tells nobody."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeJob

from workshop_utils.launchers.sagemaker import SageMaker, account, images, sdk
from workshop_utils.launchers.sagemaker.account import StandInAccount
from workshop_utils.launchers.sagemaker.calls import AwsError
from workshop_utils.runs import RunState

ROLE = "arn:aws:iam::123456789012:role/workshop"
NETWORK = {"subnets": ("subnet-0a1",), "security_groups": ("sg-0b2",)}


def place(**settings: Any) -> SageMaker:
    return SageMaker(**{"role": ROLE, "region": "us-east-1", "mode": "model_trainer", **settings})


def test_model_trainer_sends_what_we_send_but_for_its_own_wrapping(make_job: MakeJob) -> None:
    options = {**NETWORK, "spot": True, "encrypt_traffic": True, "tags": {"team": "red"}, "retries": 2}
    job = make_job("import torch", strategy="ring", workers=2, arguments={"epochs": 3, "mode": "fast"})
    theirs, ours = place(**options).render(job).body, place(**options, mode="drivers").render(job).body
    # Its own names; its own folders in the bucket; sm_train.sh, which runs our container.py as its driver.
    for body in (theirs, ours):
        body.pop("TrainingJobName")
    assert theirs["AlgorithmSpecification"].pop("ContainerEntrypoint") == ["/bin/bash"]
    assert "sm_train.sh" in theirs["AlgorithmSpecification"].pop("ContainerArguments")[1]
    for name in ("ContainerEntrypoint", "ContainerArguments"):
        ours["AlgorithmSpecification"].pop(name)
    channels = [
        {each["ChannelName"]: each for each in body.pop("InputDataConfig")} for body in (theirs, ours)
    ]
    assert [sorted(listed) for listed in channels] == [
        ["code", "sm_drivers", "training"],
        ["code", "drivers", "training"],
    ]
    assert channels[0]["training"] == channels[1]["training"]
    # Texts without quotation marks; the container reads both forms.
    decoded = {name: json.loads(text) for name, text in ours.pop("HyperParameters").items()}
    assert theirs.pop("HyperParameters") == {name: str(value) for name, value in decoded.items()}
    assert theirs == ours


@pytest.mark.parametrize(
    ("program", "said"),
    [("", "it gave no answer"), ("raise SystemExit('the SDK says no')", "the SDK says no")],
)
def test_without_an_answer_the_message_says_why(
    program: str, said: str, make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(sdk, "PROGRAM", tmp_path / "program.py")
    with pytest.raises(AwsError, match=f"ModelTrainer did not send .*: {said}"):
        place().render(make_job("import torch"))


def test_a_job_that_model_trainer_sends_runs_on_the_stand_in_and_no_telemetry_leaves(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy, StandInAccount() as server:
        # Whatever is not for this machine would go through here.
        threading.Thread(target=_record, args=(proxy, calls), daemon=True).start()
        for name in ("HTTPS_PROXY", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        aws = server.aws()
        account.ensure_role(ROLE, aws)
        script = (
            "from workshop_utils import place\nhere = place.here()\nplace.report(step=1, loss=here.rank)\n"
        )
        job = make_job(script, strategy="ring", workers=2)
        run = SageMaker(aws, role=ROLE, region="us-east-1", mode="model_trainer").launch(job).wait(120)
        assert run.state is RunState.SUCCEEDED
        assert sorted(run.metrics["loss"]) == [0, 1]
    assert calls == []


def _record(proxy: socket.socket, calls: list[bytes]) -> None:
    while True:
        try:
            connection, _ = proxy.accept()
        except OSError:
            return  # the test is over
        with connection:
            calls.append(connection.recv(4096))


def test_the_table_of_images_is_what_the_sdk_answers() -> None:
    from sagemaker.core import image_uris

    frameworks = (images.TENSORFLOW, images.TENSORFLOW_WITH_HOROVOD, images.PYTORCH)
    cases = [
        (framework, region, kind)
        for framework in frameworks
        for region in ("us-east-1", *images.REGISTRIES)
        for kind in ("ml.c5.xlarge", "ml.g5.xlarge")
    ]

    def answer(framework: images.Framework, region: str, kind: str) -> str | None:
        options = {"version": framework.version, "py_version": framework.python, "instance_type": kind}
        try:
            return str(image_uris.retrieve(framework.name, region, image_scope="training", **options))
        except ValueError:
            return None  # this framework is not in this region

    theirs = [answer(*case) for case in cases]
    known = [(case, uri) for case, uri in zip(cases, theirs, strict=True) if uri is not None]
    assert len(known) > 60
    assert [images.uri(*case) for case, _ in known] == [uri for _, uri in known]
