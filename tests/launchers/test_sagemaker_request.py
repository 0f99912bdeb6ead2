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
from sagemaker.train.distributed import DistributedConfig

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.sagemaker import SageMaker, images
from workshop_utils.launchers.sagemaker.upload import packed

ROOT = Path(__file__).parents[2]
ROLE = "arn:aws:iam::123456789012:role/workshop"
TORCH = "import torch\n"


def place(**settings: Any) -> SageMaker:
    return SageMaker(**{"role": ROLE, "region": "eu-west-1", **settings})


def body_of(job: TrainingJob, **settings: Any) -> dict[str, Any]:
    return place(**settings).render(job).body


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"strategy": "horovod_elastic", "workers": 2}, {"mode": "drivers"}, "run it locally"),
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
    ],
)
def test_what_sagemaker_would_not_do_is_said_with_a_way_out(
    make_job: MakeJob, fields: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        place(**settings).render(make_job(TORCH, **fields))


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ({"text": "a" * 2499}, {}, "HyperParameters.text has a length of 2501; at most 2500 is allowed"),
        (
            {},
            {"tags": {f"t{n}": "x" for n in range(60)}},
            "CreateTrainingJob.Tags has a length of 61; at most 50",
        ),
        ({}, {"max_runtime": "121h"}, r"MaxRuntimeInSeconds is 435600; at most 432000 \(5 days\)"),
        ({}, {"tags": {"a*": "b"}}, r"Tags\[1\].Key is 'a\*'; it must match "),
        (
            {},
            {"subnets": [f"subnet-{n}" for n in range(17)], "security_groups": ["sg-1"]},
            "VpcConfig.Subnets has a length of 17; at most 16 is allowed",
        ),
    ],
)
def test_what_the_service_model_forbids_is_found_though_botocore_would_send_it(
    make_job: MakeJob, arguments: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        body_of(make_job(TORCH).replace(arguments=arguments), **settings)


# The body


def test_traffic_between_instances_is_encrypted_on_request(make_job: MakeJob) -> None:
    body = body_of(make_job(TORCH), encrypt_traffic=True)
    assert body["EnableInterContainerTrafficEncryption"] is True


def test_the_driver_that_lesson_11_shows_is_one_of_the_sdk_s() -> None:
    lesson = json.loads((ROOT / "notebooks" / "11_sagemaker.ipynb").read_text())
    (text,) = ("".join(cell["source"]) for cell in lesson["cells"] if cell["id"] == "sm29")
    snippet = text.partition("```python\n")[2].partition("ModelTrainer(")[0]
    names: dict[str, Any] = {"DistributedConfig": DistributedConfig}
    exec(snippet, names)
    driver = names["WorkshopDriver"]()
    assert (driver.driver_dir, driver.driver_script) == ("drivers", "driver.py")


def test_instances_are_kept_warm_and_data_on_s3_is_read_where_it_lies(make_job: MakeJob) -> None:
    body = body_of(make_job(TORCH).replace(data="s3://elsewhere/mnist"), keep_alive="15min")
    assert body["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 900
    (channel,) = body["InputDataConfig"]
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == "s3://elsewhere/mnist"


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


def test_servers_are_spread_neighbours_in_rank_stay_on_one_host_and_no_secret_is_shown(
    make_job: MakeJob,
) -> None:
    job = make_job(TORCH, strategy="workshop_parameter_server", workers=4, parameter_servers=3)
    request = place(mode="drivers", processes_per_host=2).render(job)
    members = request.members
    assert members is not None
    assert {host: [member["name"] for member in listed] for host, listed in members.items()} == {
        "algo-1": ["server-0", "server-2", "worker-0", "worker-1"],
        "algo-2": ["server-1", "worker-2", "worker-3"],
    }
    secret = members["algo-1"][0]["environment"]["WORKSHOP_SECRET"]
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


# Images


@pytest.mark.parametrize(
    ("script", "region", "kind", "registry", "image"),
    [
        ("import torch", "us-east-1", "ml.c5.xlarge", "763104351884", "pytorch:2.8-cpu-py312"),
        ("import torch", "eu-south-1", "ml.g5.xlarge", "692866216735", "pytorch:2.8-gpu-py312"),
        ("import keras", "cn-north-1", "ml.m5.large", "727897471807", "tensorflow:2.19-cpu-py312"),
        (
            "import horovod.tensorflow",
            "us-east-1",
            "ml.c5.large",
            "763104351884",
            "tensorflow:2.12-cpu-py310",
        ),
    ],
)
def test_the_image_follows_from_what_the_script_imports(
    make_job: MakeJob, script: str, region: str, kind: str, registry: str, image: str
) -> None:
    found = images.image_for(make_job(script), region, kind)
    assert found.startswith(f"{registry}.dkr.ecr.{region}.amazonaws.com")
    assert found.endswith("/" + image.replace(":", "-training:"))


def test_an_image_of_one_s_own_is_taken_unless_it_is_known_to_lack_horovod(make_job: MakeJob) -> None:
    job = make_job("import horovod.torch as hvd", strategy="horovod", workers=2, image="mine:1")
    assert body_of(job)["AlgorithmSpecification"]["TrainingImage"] == "mine:1"
    with pytest.raises(JobError, match="has no Horovod in it"):
        body_of(job.replace(image=images.uri(images.PYTORCH, "eu-west-1", "ml.c5.xlarge")))


def test_a_job_is_packed_with_what_its_script_imports(make_job: MakeJob) -> None:
    job = make_job(TORCH, strategy="ring", workers=2)
    for name in ("__pycache__/train.pyc", "extra/words.txt"):
        (job.folder / name).parent.mkdir()
        (job.folder / name).write_text("hello")
    with tarfile.open(fileobj=io.BytesIO(packed(job))) as file:
        names = set(file.getnames())
    assert {"train.py", "extra/words.txt", "workshop_utils/place.py", "workshop_utils/comm/ring.py"} <= names
    assert not any("pycache" in name for name in names)
