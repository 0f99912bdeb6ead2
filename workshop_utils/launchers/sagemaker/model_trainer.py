"""A program that sends a job through the SageMaker Python SDK's `ModelTrainer`, with the workshop's own drivers.

It reads a description on standard input (see `sdk.description`) and prints one JSON line: the training job's name, and
the CreateTrainingJob request as it went out. With `"render": true` nothing goes out at all: the calls that the SDK
makes are answered here, in the events in which botocore lets others answer, before any connection.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

DRIVER = "container.py"
NOBODY = "000000000000"  # the account that answers where nothing is sent
ANSWER = "RESULT "  # before the line that counts; the SDK prints others


def silence(folder: Path) -> None:
    """No telemetry, no colours, no look at roles that the workshop's own checks do better."""
    config = folder / "config.yaml"
    config.write_text(
        "SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n"
    )
    os.environ["SAGEMAKER_USER_CONFIG_OVERRIDE"] = str(config)
    os.environ["SAGEMAKER_VALIDATE_ROLE"] = "false"
    logging.disable(logging.INFO)


def listen(session: Any, render: bool, bucket: str, sent: list[dict[str, Any]]) -> None:
    """Keep every CreateTrainingJob request of `session`; with `render`, answer all calls in AWS's place."""
    answers: dict[str, dict[str, Any]] = {
        "CreateTrainingJob": {
            "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:{NOBODY}:training-job/rendered"
        },
        "GetCallerIdentity": {"Account": NOBODY},
        "ListBuckets": {"Buckets": [{"Name": bucket, "CreationDate": datetime.datetime.now(datetime.UTC)}]},
    }

    def before_call(model: Any, params: dict[str, Any], **_: Any) -> Any:
        if model.name == "CreateTrainingJob":
            sent.append(json.loads(params["body"]))
        if not render:
            return None
        if model.name == "DescribeTrainingJob":  # the SDK asks at once for what it has just started
            answers["DescribeTrainingJob"] = {"TrainingJobName": sent[-1]["TrainingJobName"]}
        answer = {"ResponseMetadata": {"HTTPStatusCode": 200}, **answers.get(model.name, {})}
        return _Answered(), answer

    session._session.register("before-call", before_call)


class _Answered:
    """As much of an HTTP answer as botocore looks at."""

    status_code = 200


def send(description: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build the ModelTrainer that `description` asks for, and let it send the job."""
    import boto3
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.shapes import (
        CheckpointConfig,
        OutputDataConfig,
        RetryStrategy,
        StoppingCondition,
        Tag,
    )
    from sagemaker.core.training.configs import Compute, InputData, Networking, SourceCode
    from sagemaker.train import ModelTrainer
    from sagemaker.train.distributed import DistributedConfig

    body = description["body"]
    sent: list[dict[str, Any]] = []
    source, drivers = folder / "source", folder / "drivers"
    for place, files in ((source, description["source"]), (drivers, description["drivers"])):
        for name, text in files.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    class WorkshopDriver(DistributedConfig):
        """The workshop's own entry point as one of the SDK's drivers."""

        @property
        def driver_dir(self) -> str:
            return str(drivers)

        @property
        def driver_script(self) -> str:
            return DRIVER

    session = boto3.Session(region_name=description["region"], **description["credentials"])
    listen(session, description["render"], description["bucket"], sent)
    resources, vpc, kept = body["ResourceConfig"], body.get("VpcConfig"), body.get("CheckpointConfig")
    (data,) = (each for each in body["InputDataConfig"] if each["ChannelName"] == "training")
    trainer = ModelTrainer(
        sagemaker_session=Session(boto_session=session, default_bucket=description["bucket"]),
        training_image=body["AlgorithmSpecification"]["TrainingImage"],
        training_input_mode=body["AlgorithmSpecification"]["TrainingInputMode"],
        role=body["RoleArn"],
        base_job_name=description["name"],
        source_code=SourceCode(source_dir=str(source), entry_script=description["script"]),
        distributed=WorkshopDriver(),
        compute=Compute(
            instance_type=resources["InstanceType"],
            instance_count=resources["InstanceCount"],
            volume_size_in_gb=resources["VolumeSizeInGB"],
            keep_alive_period_in_seconds=resources.get("KeepAlivePeriodInSeconds"),
            enable_managed_spot_training=body.get("EnableManagedSpotTraining"),
        ),
        networking=vpc
        and Networking(
            subnets=vpc["Subnets"],
            security_group_ids=vpc["SecurityGroupIds"],
            enable_inter_container_traffic_encryption=body.get("EnableInterContainerTrafficEncryption"),
        ),
        stopping_condition=StoppingCondition(
            max_runtime_in_seconds=body["StoppingCondition"]["MaxRuntimeInSeconds"],
            max_wait_time_in_seconds=body["StoppingCondition"].get("MaxWaitTimeInSeconds"),
        ),
        checkpoint_config=kept and CheckpointConfig(s3_uri=kept["S3Uri"], local_path=kept["LocalPath"]),
        output_data_config=OutputDataConfig(s3_output_path=body["OutputDataConfig"]["S3OutputPath"]),
        hyperparameters={name: json.loads(text) for name, text in body["HyperParameters"].items()},
        environment=body["Environment"],
        tags=[Tag(key=tag["Key"], value=tag["Value"]) for tag in body["Tags"]],
    )
    if "RetryStrategy" in body:
        attempts = body["RetryStrategy"]["MaximumRetryAttempts"]
        trainer = trainer.with_retry_strategy(RetryStrategy(maximum_retry_attempts=attempts))
    uri = data["DataSource"]["S3DataSource"]["S3Uri"]
    trainer.train([InputData(channel_name="training", data_source=uri)], wait=False, logs=False)
    (request,) = sent
    return {"name": request["TrainingJobName"], "body": request}


def main() -> None:
    """Read, send, answer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        silence(folder)
        result = send(json.load(sys.stdin), folder)
    print(ANSWER + json.dumps(result))


if __name__ == "__main__":
    main()
