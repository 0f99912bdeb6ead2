"""The SageMaker Python SDK, version 3: its ModelTrainer sends the workshop's jobs, with the workshop's own driver.

Its pins (rich below 15, protobuf below 7, MLflow and what that needs) do not go with the workshop's environment, so it
lives in one of its own, which sees the workshop's packages and adds what is missing: `workshop install-sagemaker-sdk`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from workshop_utils import data, horovod_build
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.sagemaker import request as requests
from workshop_utils.launchers.sagemaker.calls import Aws, AwsError
from workshop_utils.launchers.sagemaker.request import Request
from workshop_utils.launchers.sagemaker.settings import Settings
from workshop_utils.launchers.sagemaker.source import driver_files
from workshop_utils.launchers.source import shipped
from workshop_utils.strategies import strategy_of

REQUIREMENTS = ("sagemaker-core==2.27.0", "sagemaker-train==1.27.0")  # of SDK 3.27
PROGRAM = Path(__file__).with_name("model_trainer.py")
ANSWER = "RESULT "


def environment_folder() -> Path:
    """Where the SDK's environment belongs; another one for other requirements, and for another environment of ours."""
    seed = "\n".join([*REQUIREMENTS, sys.prefix, sys.version])
    return data.cache_folder() / f"sagemaker-sdk-{hashlib.sha256(seed.encode()).hexdigest()[:12]}"


def interpreter() -> Path:
    """The Python that has the SDK. Raises JobError where it is not installed; the message says how it is."""
    found = environment_folder() / "bin" / "python"
    if not (environment_folder() / ".ready").is_file():
        raise JobError(
            "the SageMaker SDK is not installed; `workshop install-sagemaker-sdk` does it, in about a minute"
        )
    return found


def install() -> None:
    """Make the SDK's environment, where it is not there yet.

    It finds the workshop's packages behind its own, so that pip adds only what is missing or must be another version.

    Raises:
        AwsError: if a step fails; the message names its log.
    """
    folder = environment_folder()
    if (folder / ".ready").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    log.write_text("")
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
    ]
    try:
        horovod_build.run_logged(
            [sys.executable, "-m", "venv", "--clear", str(folder)], log, label="SageMaker SDK: environment"
        )
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "workshop.pth").write_text(sysconfig.get_path("purelib") + "\n")
        horovod_build.run_logged([*pip, *REQUIREMENTS], log, label="SageMaker SDK: packages")
    except horovod_build.HorovodBuildError as error:
        raise AwsError(f"the SageMaker SDK could not be installed: {error}") from None
    (folder / ".ready").touch()


def send(job: TrainingJob, settings: Settings, aws: Aws, render: bool) -> Request:
    """Have ModelTrainer send `job`, or with `render` only say what it would send; the request as it went out.

    Raises:
        JobError: as `request.build` does, and if the SDK is not installed.
        AwsError: where AWS, or the SDK, refuses.
    """
    ours = requests.build(job, settings)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if aws.endpoint:
        environment["AWS_ENDPOINT_URL"] = aws.endpoint
    process = subprocess.run(
        [str(interpreter()), str(PROGRAM)],
        input=json.dumps(description(job, settings, aws, ours, render)),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    for line in process.stdout.splitlines():
        if line.startswith(ANSWER):
            return Request(json.loads(line.removeprefix(ANSWER))["body"], ours.members)
    last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise AwsError(f"ModelTrainer did not send {job.name}: {last}")


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
