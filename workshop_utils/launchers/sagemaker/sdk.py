"""The SageMaker Python SDK, version 3: its ModelTrainer sends the workshop's jobs, with the workshop's own driver.

Its pins (rich below 15, protobuf below 7, MLflow and what that needs) do not go with the workshop's environment, so it
lives in one of its own, which sees the workshop's packages and adds what differs; the first use makes it, in a minute.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workshop_utils.environments import Environment, EnvironmentFailed
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.sagemaker import request as requests
from workshop_utils.launchers.sagemaker.calls import Aws, AwsError
from workshop_utils.launchers.sagemaker.request import Request
from workshop_utils.launchers.sagemaker.settings import Settings
from workshop_utils.launchers.sagemaker.source import driver_files
from workshop_utils.launchers.source import shipped
from workshop_utils.strategies import strategy_of

PROGRAM = Path(__file__).with_name("model_trainer.py")
ANSWER = "RESULT "
ENVIRONMENT = Environment("sagemaker_sdk", "The SageMaker SDK", sees_workshop=True)


def send(job: TrainingJob, settings: Settings, aws: Aws, render: bool) -> Request:
    """Have ModelTrainer send `job`, or with `render` only say what it would send; the request as it went out.

    Raises:
        JobError: as `request.build` does.
        EnvironmentFailed: if the SDK's environment cannot be made, as without a network.
        AwsError: where AWS, or the SDK, refuses.
    """
    ours = requests.build(job, settings)
    ENVIRONMENT.build()
    described = json.dumps(description(job, settings, aws, ours, render))
    variables = {"AWS_ENDPOINT_URL": aws.endpoint} if aws.endpoint else {}
    try:
        said = ENVIRONMENT.run("python", str(PROGRAM), variables=variables, text=described)
    except EnvironmentFailed as error:
        raise AwsError(
            f"ModelTrainer did not send {job.name}: {str(error).splitlines()[-1].strip()}"
        ) from None
    for line in said.splitlines():
        if line.startswith(ANSWER):
            return Request(json.loads(line.removeprefix(ANSWER))["body"], ours.members)
    raise AwsError(f"ModelTrainer did not send {job.name}: it gave no answer")


def description(
    job: TrainingJob, settings: Settings, aws: Aws, request: Request, render: bool
) -> dict[str, Any]:
    """What `model_trainer` is told: our own request with drivers, and the files that go with it."""
    source = {
        path.relative_to(job.folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(job.folder.rglob("*.py"))
    }
    return {
        "render": render,
        "body": request.body,
        "name": job.name,
        "script": job.script,
        "region": settings.region_name,
        "bucket": settings.bucket_name,
        "credentials": aws.credentials or {},
        "source": {**source, **shipped(strategy_of(job))},
        "drivers": {**driver_files(), requests.MEMBERS_FILE: json.dumps(request.members)},
    }
