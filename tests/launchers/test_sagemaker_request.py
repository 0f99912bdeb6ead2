"""The request that ModelTrainer would send, and what is refused before there is one; no account is needed.

What is rendered for the workshop's own jobs, and wrong settings, are among the guards.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeJob

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.sagemaker import SageMaker, check, images, toolkit
from workshop_utils.launchers.sagemaker.hosts import host_names, order_of
from workshop_utils.launchers.sagemaker.upload import packed

ROLE = "arn:aws:iam::123456789012:role/workshop"
TORCH = "import torch\n"
KERAS = "import tensorflow as tf\n"


def place(**settings: Any) -> SageMaker:
    return SageMaker(**{"role": ROLE, "region": "eu-west-1", **settings})


def body_of(job: TrainingJob, **settings: Any) -> dict[str, Any]:
    return place(**settings).render(job).body


def refusal(job: TrainingJob, **settings: Any) -> str:
    with pytest.raises(JobError) as refused:
        place(**settings).render(job)
    return str(refused.value)


# The hosts


def test_hosts_are_sorted_as_text_so_that_the_tenth_stands_before_the_second() -> None:
    assert order_of(host_names(11)) == [1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"strategy": "horovod_elastic", "workers": 2}, {"mode": "drivers"}, "run it locally"),
        (
            {"strategy": "multi_worker_mirrored", "workers": 2},
            {"processes_per_host": 2},
            "with strategy 'multi_worker_mirrored' the toolkit starts one on each host",
        ),
        (
            {"strategy": "parameter_server", "workers": 4},
            {"processes_per_host": 2, "mode": "drivers"},
            "with strategy 'parameter_server' the driver starts one on each host",
        ),
        (
            {"strategy": "parameter_server", "workers": 4, "parameter_servers": 2},
            {},
            "the toolkit runs one on each of the 5 hosts: leave it out, or set mode: drivers",
        ),
        ({}, {"instance_type": "ml.c5.xlarg"}, "must be one that SageMaker has: did you mean ml.c5.xlarge?"),
        ({"timeout": "7d"}, {}, "MaxRuntimeInSeconds is 604800; at most 432000 (5 days) is allowed"),
        ({}, {"spot": True, "max_wait": "30s"}, "it must be at least MaxRuntimeInSeconds, 60"),
        ({"resources": {"gpu": 1}}, {}, "ml.c5.xlarge has no NVIDIA GPU; take one such as ml.g5.xlarge"),
    ],
)
def test_what_sagemaker_would_not_do_is_said_with_a_way_out(
    make_job: MakeJob, fields: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    assert message in refusal(make_job(TORCH, **fields), **settings)


# The body


def test_mpi_and_torchrun_are_told_how_many_processes_a_host_has(make_job: MakeJob) -> None:
    switches = {"mpi": "sagemaker_mpi_enabled", "torch_ddp": "sagemaker_torch_distributed_enabled"}
    for strategy, switch in switches.items():
        body = body_of(make_job(TORCH, workers=4, strategy=strategy), processes_per_host=2)
        told = body["HyperParameters"]
        assert (told[switch], told["sagemaker_mpi_num_of_processes_per_host"]) == ("true", "2")
        assert body["ResourceConfig"]["InstanceCount"] == 2


def test_every_option_has_its_field(make_job: MakeJob) -> None:
    job = make_job(TORCH, timeout="10min").replace(data="s3://elsewhere/mnist")
    options = {
        "keep_alive": "15min",
        "encrypt_traffic": True,
        "input_mode": "FastFile",
        "tags": {"team": "größe"},
    }
    body = body_of(job, **options, volume_gb=50, retries=3)
    assert body["Tags"][1:] == [{"Key": "team", "Value": "größe"}]
    assert body["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 900
    assert body["ResourceConfig"]["VolumeSizeInGB"] == 50
    assert body["RetryStrategy"] == {"MaximumRetryAttempts": 3}
    assert body["EnableInterContainerTrafficEncryption"] is True
    (channel,) = body["InputDataConfig"]
    assert channel["InputMode"] == body["AlgorithmSpecification"]["TrainingInputMode"] == "FastFile"
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == "s3://elsewhere/mnist"
    spot = body_of(job, spot=True)
    assert spot["EnableManagedSpotTraining"] is True
    assert spot["StoppingCondition"] == {"MaxRuntimeInSeconds": 600, "MaxWaitTimeInSeconds": 1200}
    # Of the job, not of this launch: the next one goes on where an instance was taken away.
    checkpoints = "s3://sagemaker-workshop-eu-west-1-123456789012/workshop/checkpoints/job-1"
    assert spot["CheckpointConfig"] == {"S3Uri": checkpoints, "LocalPath": "/opt/ml/checkpoints"}


def test_the_driver_comes_as_one_of_the_sdk_s_with_what_each_host_starts(make_job: MakeJob) -> None:
    job = make_job(TORCH, strategy="horovod", workers=4, image="mine")
    request = place(mode="drivers", processes_per_host=2, input_mode="FastFile").render(job)
    assert "sm_train.sh" in request.body["AlgorithmSpecification"]["ContainerArguments"][1]
    modes = {channel["ChannelName"]: channel["InputMode"] for channel in request.body["InputDataConfig"]}
    assert modes == {"training": "FastFile", "code": "File", "sm_drivers": "File"}
    assert request.members is not None
    first, second = request.members["algo-1"], request.members["algo-2"]
    assert [member["name"] for member in first] == ["rendezvous-0", "worker-0", "worker-1"]
    assert first[0]["command"][-2:] == ["0.0.0.0", "7000"]
    variables = second[1]["environment"]
    assert variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "algo-1"
    assert variables["HOROVOD_GLOO_IFACE"] == "{interface}"
    found = [variables[f"HOROVOD_{name}"] for name in ("RANK", "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE")]
    assert found == ["3", "1", "1", "2"]


def test_servers_are_spread_and_neighbours_in_rank_stay_on_one_host(make_job: MakeJob) -> None:
    job = make_job(TORCH, strategy="workshop_parameter_server", workers=4, parameter_servers=3)
    members = place(mode="drivers", processes_per_host=2).render(job).members
    assert members is not None
    assert {host: [member["name"] for member in listed] for host, listed in members.items()} == {
        "algo-1": ["server-0", "server-2", "worker-0", "worker-1"],
        "algo-2": ["server-1", "worker-2", "worker-3"],
    }


def test_a_secret_of_the_run_is_sent_and_not_shown(make_job: MakeJob) -> None:
    request = place(mode="drivers").render(make_job(TORCH, strategy="ring", workers=2))
    assert request.members is not None
    secret = request.members["algo-1"][0]["environment"]["WORKSHOP_SECRET"]
    assert len(secret) == 32
    assert secret not in f"{request} {request!r} {json.dumps(request.body)}"


def test_names_of_jobs_are_short_enough_and_never_the_same(make_job: MakeJob) -> None:
    job = make_job(TORCH).replace(name="a" * 50)
    names = {body_of(job)["TrainingJobName"] for _ in range(3)}
    assert len(names) == 3
    assert all(len(name) <= 63 for name in names)


def test_nothing_of_the_user_s_own_configuration_gets_into_a_request(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    own = "SchemaVersion: '1.0'\nSageMaker: {TrainingJob: {VpcConfig: {Subnets: [subnet-1], SecurityGroupIds: [sg-1]}}}"
    config.write_text(own)
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "nobody")  # there is no such profile, and none is needed
    assert "VpcConfig" not in body_of(make_job(TORCH), region="ap-south-1")


# Rules that botocore does not know


def test_a_parameter_server_together_with_mpi_is_refused(make_job: MakeJob) -> None:
    both = {toolkit.PARAMETER_SERVER: "true", toolkit.MPI: "true"}
    with pytest.raises(JobError, match="are both set; the toolkit obeys one of them"):
        check.rules({**body_of(make_job(TORCH)), "HyperParameters": both})


# Images


@pytest.mark.parametrize(
    ("script", "region", "kind", "registry", "image"),
    [
        ("import torch", "us-east-1", "ml.c5.xlarge", "763104351884", "pytorch-training:2.8-cpu-py312"),
        ("import torch", "eu-south-1", "ml.g5.xlarge", "692866216735", "pytorch-training:2.8-gpu-py312"),
        ("import keras", "cn-north-1", "ml.m5.large", "727897471807", "tensorflow-training:2.19-cpu-py312"),
        (
            "import horovod.tensorflow as hvd",
            "us-east-1",
            "ml.c5.xlarge",
            "763104351884",
            "tensorflow-training:2.12-cpu-py310",
        ),
        ("no Python", "us-east-1", "ml.c5.xlarge", "763104351884", "pytorch-training:2.8-cpu-py312"),
    ],
)
def test_the_image_follows_from_what_the_script_imports(
    make_job: MakeJob, script: str, region: str, kind: str, registry: str, image: str
) -> None:
    found = images.image_for(make_job(script), region, kind)
    assert found.startswith(f"{registry}.dkr.ecr.{region}.amazonaws.com")
    assert found.endswith(f"/{image}")


def test_a_script_with_horovod_needs_an_image_that_has_it(make_job: MakeJob) -> None:
    job = make_job("import horovod.torch as hvd", strategy="horovod", workers=2)
    assert "no image of AWS has the Horovod that this script imports" in refusal(job)
    of_aws = images.uri(images.PYTORCH, "eu-west-1", "ml.c5.xlarge")
    assert "has no Horovod in it" in refusal(job.replace(image=of_aws))
    mpi = make_job(KERAS, strategy="mpi", workers=2)
    without = images.uri(images.TENSORFLOW, "eu-west-1", "ml.c5.xlarge")
    assert "neither Horovod nor mpirun in it" in refusal(mpi.replace(image=without))
    own = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/tensorflow-training:2.19"
    assert body_of(job.replace(image=own))["AlgorithmSpecification"]["TrainingImage"] == own


def test_a_job_is_packed_with_what_its_script_imports(make_job: MakeJob) -> None:
    job = make_job(TORCH, strategy="ring", workers=2)
    for name in ("__pycache__/train.pyc", "extra/words.txt"):
        (job.folder / name).parent.mkdir()
        (job.folder / name).write_text("hello")
    with tarfile.open(fileobj=io.BytesIO(packed(job))) as file:
        names = set(file.getnames())
    assert {"train.py", "extra/words.txt", "workshop_utils/place.py", "workshop_utils/comm/ring.py"} <= names
    assert not any("pycache" in name for name in names)
