"""The SageMaker Python SDK, version 3: its ModelTrainer sends the workshop's jobs, with the workshop's own driver.

It runs in a process of its own: importing it takes seconds, and it changes logging and reads settings for its process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def send(job: TrainingJob, settings: Settings, aws: Aws, render: bool) -> Request:
    """Have ModelTrainer send `job`, or with `render` only say what it would send; the request as it went out.

    Raises:
        JobError: as `request.build` does.
        AwsError: where AWS, or the SDK, refuses.
    """
    ours = requests.build(job, settings)
    answer = subprocess.run(
        # -P: the modules beside it are not to be found as top-level ones.
        [sys.executable, "-P", str(PROGRAM)],
        input=json.dumps(description(job, settings, aws, ours, render)),
        capture_output=True,
        text=True,
        env={**os.environ, **({"AWS_ENDPOINT_URL": aws.endpoint} if aws.endpoint else {})},
    )
    if answer.returncode != 0:
        lines = answer.stderr.strip().splitlines() or [f"it ended with code {answer.returncode}"]
        raise AwsError(f"ModelTrainer did not send {job.name}: {lines[-1].strip()}")
    for line in answer.stdout.splitlines():
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
