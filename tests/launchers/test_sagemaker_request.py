"""The request that would be sent, checked without an account."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeJob

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.sagemaker import SageMaker, check, images, toolkit
from workshop_utils.launchers.sagemaker.hosts import host_names, layout, members_by_host, order_of
from workshop_utils.launchers.sagemaker.source import driver_files, packed

JOBS = Path(__file__).parents[2] / "jobs"
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


# What is said of the place


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"role": "workshop"},
            "role is 'workshop'; it must be a role's ARN, such as arn:aws:iam::123456789012:role/",
        ),
        ({"region": "europe"}, "region is 'europe'; it must be a region's code, such as us-east-1"),
        ({"subnets": ("subnet-1",)}, "subnets is given without security_groups"),
        ({"subnets": ("my-subnet",), "security_groups": ("sg-1",)}, "subnets.0 is 'my-subnet'"),
        ({"spot": True, "keep_alive": "10min"}, "keep_alive and spot exclude each other"),
        ({"max_wait": "1h"}, "max_wait is for spot instances"),
        ({"keep_alive": "7h"}, "keep_alive is '7h'; it may be at most 6h"),
        ({"processes_per_host": 0}, "processes_per_host is 0"),
        ({"instance_tpye": "ml.c5.xlarge"}, "instance_tpye: unknown field; did you mean instance_type?"),
        ({"input_mode": "Pipe"}, "input_mode is 'Pipe'; it must be one of 'File' or 'FastFile'"),
        ({"bucket": "My_Bucket"}, "bucket is 'My_Bucket'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_be_right(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as refused:
        place(**settings)
    assert message in str(refused.value)


def test_settings_come_from_a_file_and_its_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "place.yaml"
    file.write_text(f"role: {ROLE}\nregion: us-east-1\nsubnets: [subnet-0a1]\nsecurity_groups: [sg-0b2]\n")
    assert SageMaker.load(file).subnets == ("subnet-0a1",)
    file.write_text("role: nobody\n")
    with pytest.raises(JobError, match=r"place.yaml: role is 'nobody'"):
        SageMaker.load(file)
    for text in ("- a list\n", "a: [", "1: 2\n"):
        file.write_text(text)
        with pytest.raises(JobError, match=r"place\.yaml|no field"):
            SageMaker.load(file)
    with pytest.raises(JobError, match="there is no file"):
        SageMaker.load(tmp_path / "none.yaml")


def test_without_a_region_the_environment_s_is_used_and_without_that_it_is_asked_for(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert "region is missing" in refusal(make_job(TORCH), region=None)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-south-1")
    assert "ap-south-1" in body_of(make_job(TORCH), region=None)["AlgorithmSpecification"]["TrainingImage"]


def test_the_example_of_a_place_is_one(make_job: MakeJob) -> None:
    example = SageMaker.load(JOBS / "clusters" / "sagemaker" / "place.yaml")
    assert example.render(make_job(TORCH)).body["VpcConfig"]["Subnets"] == ["subnet-0123456789abcdef0"]


# The hosts


def test_hosts_are_sorted_as_text_so_that_the_tenth_stands_before_the_second() -> None:
    assert order_of(host_names(11)) == [1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("strategy", "workers", "per_host", "mode", "hosts"),
    [
        ("single", 1, 1, "toolkit", 1),
        ("torch_ddp", 4, 2, "toolkit", 2),
        ("mpi", 8, 4, "toolkit", 2),
        ("multi_worker_mirrored", 3, 1, "toolkit", 3),
        ("parameter_server", 2, 1, "toolkit", 3),
        ("ring", 4, 2, "drivers", 2),
        ("parameter_server", 2, 1, "drivers", 3),
    ],
)
def test_each_strategy_takes_its_hosts(
    make_job: MakeJob, strategy: str, workers: int, per_host: int, mode: str, hosts: int
) -> None:
    job = make_job(TORCH, strategy=strategy, workers=workers)
    body = body_of(job, processes_per_host=per_host, mode=mode)
    assert body["ResourceConfig"]["InstanceCount"] == hosts


def test_own_drivers_spread_servers_and_keep_neighbours_in_rank_on_one_host(make_job: MakeJob) -> None:
    job = make_job(TORCH, strategy="workshop_parameter_server", workers=4, parameter_servers=3)
    settings = place(mode="drivers", processes_per_host=2)
    placed = {
        host: [member.name for member in listed]
        for host, listed in members_by_host(job, layout(job, settings)).items()
    }
    assert placed == {
        "algo-1": ["server-0", "server-2", "worker-0", "worker-1"],
        "algo-2": ["server-1", "worker-2", "worker-3"],
    }


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        (
            {"strategy": "ring", "workers": 2},
            {},
            "the toolkit in SageMaker's images does not know it: set mode: drivers",
        ),
        ({"strategy": "mpi", "workers": 2}, {"mode": "drivers"}, "set mode: toolkit"),
        ({"strategy": "torch_ddp", "workers": 3}, {"processes_per_host": 2}, "the first must be a multiple"),
        (
            {"strategy": "multi_worker_mirrored", "workers": 2},
            {"processes_per_host": 2},
            "with strategy 'multi_worker_mirrored' the toolkit starts one on each host",
        ),
        (
            {"strategy": "parameter_server", "workers": 4, "parameter_servers": 2},
            {},
            "the toolkit runs one on each of the 5 hosts: leave it out, or set mode: drivers",
        ),
    ],
)
def test_what_the_toolkit_cannot_do_is_said_with_a_way_out(
    make_job: MakeJob, fields: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    assert message in refusal(make_job(TORCH, **fields), **settings)


# The body


def test_the_body_of_a_parameter_server_job_is_this_one(make_job: MakeJob) -> None:
    job = make_job(
        KERAS,
        strategy="parameter_server",
        workers=2,
        arguments={"epochs": 3, "rate": 0.5, "mode": "fast", "flag": True},
        environment={"COLOUR": "red"},
        timeout="90s",
    )
    body = body_of(job, subnets=("subnet-0a1",), security_groups=("sg-0b2",), tags={"team": "red"})
    name = body["TrainingJobName"]
    bucket = "s3://sagemaker-workshop-eu-west-1-123456789012/workshop"
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": f"{bucket}/data/folder-job-1/",
        "S3DataDistributionType": "FullyReplicated",
    }
    assert body == {
        "TrainingJobName": name,
        "AlgorithmSpecification": {
            "TrainingImage": "763104351884.dkr.ecr.eu-west-1.amazonaws.com/tensorflow-training:2.19-cpu-py312",
            "TrainingInputMode": "File",
        },
        "RoleArn": ROLE,
        "InputDataConfig": [
            {"ChannelName": "training", "DataSource": {"S3DataSource": source}, "InputMode": "File"}
        ],
        "OutputDataConfig": {"S3OutputPath": f"{bucket}/models"},
        "ResourceConfig": {"InstanceType": "ml.c5.xlarge", "InstanceCount": 3, "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 90},
        "Environment": {"PYTHONUNBUFFERED": "1", "COLOUR": "red"},
        "Tags": [
            {"Key": "made-by", "Value": "distributed-training-workshop"},
            {"Key": "team", "Value": "red"},
        ],
        "HyperParameters": {
            "epochs": "3",
            "flag": "true",
            "mode": '"fast"',
            "rate": "0.5",
            "sagemaker_container_log_level": "20",
            "sagemaker_job_name": f'"{name}"',
            "sagemaker_parameter_server_enabled": "true",
            "sagemaker_program": '"train.py"',
            "sagemaker_region": '"eu-west-1"',
            "sagemaker_submit_directory": f'"{bucket}/source/{name}/sourcedir.tar.gz"',
        },
        "VpcConfig": {"Subnets": ["subnet-0a1"], "SecurityGroupIds": ["sg-0b2"]},
    }


def test_mpi_and_torchrun_are_told_how_many_processes_a_host_has(make_job: MakeJob) -> None:
    fields = {"workers": 4, "strategy": "mpi"}
    mpi = body_of(make_job(TORCH, **fields), processes_per_host=2)["HyperParameters"]
    assert (mpi["sagemaker_mpi_enabled"], mpi["sagemaker_mpi_num_of_processes_per_host"]) == ("true", "2")
    torch = body_of(make_job(TORCH, **fields | {"strategy": "torch_ddp"}), processes_per_host=2)[
        "HyperParameters"
    ]
    assert torch["sagemaker_torch_distributed_enabled"] == "true"
    assert torch["sagemaker_mpi_num_of_processes_per_host"] == "2"
    assert torch["sagemaker_instance_type"] == '"ml.c5.xlarge"'
    mirrored = body_of(make_job(KERAS, strategy="multi_worker_mirrored", workers=2))["HyperParameters"]
    assert mirrored["sagemaker_multi_worker_mirrored_strategy_enabled"] == "true"


def test_the_script_gets_no_argument_that_the_job_does_not_have(make_job: MakeJob) -> None:
    job = make_job(KERAS, strategy="parameter_server", workers=2, arguments={"epochs": 1})
    own = {name for name in body_of(job)["HyperParameters"] if not name.startswith("sagemaker_")}
    assert own == {"epochs"}


def test_spot_instances_wait_longer_than_they_run_and_keep_checkpoints(make_job: MakeJob) -> None:
    body = body_of(make_job(TORCH, timeout="10min"), spot=True)
    assert body["EnableManagedSpotTraining"] is True
    assert body["StoppingCondition"] == {"MaxRuntimeInSeconds": 600, "MaxWaitTimeInSeconds": 1200}
    assert body["CheckpointConfig"] == {
        "S3Uri": "s3://sagemaker-workshop-eu-west-1-123456789012/workshop/checkpoints/job-1",
        "LocalPath": "/opt/ml/checkpoints",
    }
    assert "must be at least MaxRuntimeInSeconds" in refusal(make_job(TORCH), spot=True, max_wait="30s")


def test_warm_pools_encryption_fast_file_mode_and_data_on_s3_have_their_fields(make_job: MakeJob) -> None:
    job = make_job(TORCH).replace(data="s3://elsewhere/mnist")
    body = body_of(
        job, keep_alive="15min", encrypt_traffic=True, input_mode="FastFile", volume_gb=50, retries=3
    )
    assert body["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 900
    assert body["ResourceConfig"]["VolumeSizeInGB"] == 50
    assert body["RetryStrategy"] == {"MaximumRetryAttempts": 3}
    assert body["EnableInterContainerTrafficEncryption"] is True
    assert body["AlgorithmSpecification"]["TrainingInputMode"] == "FastFile"
    (channel,) = body["InputDataConfig"]
    assert channel["InputMode"] == "FastFile"
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == "s3://elsewhere/mnist"


def test_own_drivers_come_as_channels_and_are_the_container_s_entry_point(make_job: MakeJob) -> None:
    job = make_job(TORCH, strategy="horovod", workers=2, image="mine")
    request = place(mode="drivers", input_mode="FastFile").render(job)
    algorithm = request.body["AlgorithmSpecification"]
    assert algorithm["ContainerEntrypoint"] == ["python3"]
    assert algorithm["ContainerArguments"] == ["/opt/ml/input/data/drivers/container.py"]
    modes = {channel["ChannelName"]: channel["InputMode"] for channel in request.body["InputDataConfig"]}
    assert modes == {"training": "FastFile", "code": "File", "drivers": "File"}
    assert request.members is not None
    first, second = request.members["algo-1"], request.members["algo-2"]
    assert [member["name"] for member in first] == ["rendezvous-0", "worker-0"]
    variables = second[0]["environment"]
    assert variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "algo-1"
    assert variables["HOROVOD_GLOO_IFACE"] == "{interface}"
    assert (variables["HOROVOD_RANK"], variables["HOROVOD_LOCAL_RANK"]) == ("1", "0")
    assert (variables["HOROVOD_CROSS_RANK"], variables["HOROVOD_CROSS_SIZE"]) == ("1", "2")


def test_a_secret_of_the_run_is_sent_and_not_shown(make_job: MakeJob) -> None:
    request = place(mode="drivers").render(make_job(TORCH, strategy="ring", workers=2))
    assert request.members is not None
    secret = request.members["algo-1"][0]["environment"]["WORKSHOP_SECRET"]
    assert len(secret) == 32
    assert secret not in str(request)
    assert secret not in json.dumps(request.body)


def test_names_of_jobs_are_short_enough_and_never_the_same(make_job: MakeJob) -> None:
    job = make_job(TORCH).replace(name="a" * 50)
    names = {body_of(job)["TrainingJobName"] for _ in range(3)}
    assert len(names) == 3
    assert all(len(name) <= 63 for name in names)


@pytest.mark.parametrize("path", sorted(JOBS.glob("*/job.yaml")), ids=lambda path: path.parent.name)
def test_every_job_of_the_workshop_renders_in_one_of_the_modes(path: Path) -> None:
    job = TrainingJob.load(path).replace(
        image="123456789012.dkr.ecr.eu-west-1.amazonaws.com/workshop-all:cpu"
    )
    modes = []
    for mode in ("toolkit", "drivers"):
        try:
            place(mode=mode).render(job)
        except JobError:
            continue
        modes.append(mode)
    assert modes or job.strategy in ("horovod_elastic", "spark")


# What the service model knows, and what it does not


def altered(make_job: MakeJob, **changes: Any) -> dict[str, Any]:
    return {**body_of(make_job(TORCH, strategy="torch_ddp", workers=2)), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TrainingJobNmae": "x"}, 'Unknown parameter in input: "TrainingJobNmae"'),
        ({"RoleArn": 7}, "Invalid type for parameter RoleArn"),
        ({"OutputDataConfig": {}}, 'Missing required parameter in OutputDataConfig: "S3OutputPath"'),
        (
            {"TrainingJobName": "under_score"},
            "CreateTrainingJob.TrainingJobName is 'under_score'; it must match",
        ),
        ({"TrainingJobName": "x" * 64}, "has a length of 64; at most 63"),
        (
            {"ResourceConfig": {"InstanceType": "ml.c5.xlarg", "InstanceCount": 1}},
            "InstanceType is 'ml.c5.xlarg'; it must be one that SageMaker has: did you mean ml.c5.xlarge?",
        ),
        (
            {"ResourceConfig": {"InstanceType": "ml.c5.xlarge", "KeepAlivePeriodInSeconds": 30_000}},
            "KeepAlivePeriodInSeconds is 30000; at most 21600",
        ),
        ({"VpcConfig": {"Subnets": ["a b"], "SecurityGroupIds": ["sg-1"]}}, "VpcConfig.Subnets[0] is 'a b'"),
        ({"Environment": {"A B": "1"}}, "Environment (the name 'A B') is 'A B'; it must match"),
        (
            {"HyperParameters": {str(i): "" for i in range(101)}},
            "HyperParameters has a length of 101; at most 100",
        ),
    ],
)
def test_what_the_service_model_forbids_is_found(
    make_job: MakeJob, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError) as refused:
        check.body(altered(make_job, **changes))
    assert message in str(refused.value)


def test_tags_may_hold_letters_of_any_alphabet(make_job: MakeJob) -> None:
    check.body(altered(make_job, Tags=[{"Key": "größe", "Value": "très grand"}]))


@pytest.mark.parametrize(
    ("parameters", "count", "message"),
    [
        (
            {toolkit.PARAMETER_SERVER: "true", toolkit.MPI: "true"},
            2,
            "are both set; the toolkit obeys one of them",
        ),
        ({toolkit.PARAMETER_SERVER: '"true"'}, 1, "a parameter server needs at least 2 hosts"),
    ],
)
def test_requests_that_would_do_something_else_are_refused(
    make_job: MakeJob, parameters: dict[str, str], count: int, message: str
) -> None:
    resources = {"InstanceType": "ml.c5.xlarge", "InstanceCount": count}
    with pytest.raises(JobError, match=message):
        check.rules(altered(make_job, HyperParameters=parameters, ResourceConfig=resources))


def test_a_request_without_a_time_limit_or_with_one_of_a_week_is_refused(make_job: MakeJob) -> None:
    with pytest.raises(JobError, match="MaxRuntimeInSeconds is missing"):
        check.rules(altered(make_job, StoppingCondition={}))
    with pytest.raises(JobError, match="5 days"):
        check.rules(altered(make_job, StoppingCondition={"MaxRuntimeInSeconds": 7 * 86_400}))


def test_mpi_on_an_image_of_aws_without_horovod_is_refused(make_job: MakeJob) -> None:
    image = images.uri(images.TENSORFLOW, "eu-west-1", "ml.c5.xlarge")
    job = make_job(KERAS, strategy="mpi", workers=2).replace(image=image)
    assert "neither Horovod nor mpirun in it" in refusal(job)


# Images


@pytest.mark.parametrize(
    ("script", "kind", "tail"),
    [
        ("import torch", "ml.c5.xlarge", "pytorch-training:2.8-cpu-py312"),
        ("import torch", "ml.g5.xlarge", "pytorch-training:2.8-gpu-py312"),
        ("from tensorflow import keras", "ml.p3.2xlarge", "tensorflow-training:2.19-gpu-py312"),
        ("import keras", "ml.m5.large", "tensorflow-training:2.19-cpu-py312"),
        ("import numpy", "ml.c5.xlarge", "pytorch-training:2.8-cpu-py312"),
        ("import horovod.tensorflow as hvd", "ml.c5.xlarge", "tensorflow-training:2.12-cpu-py310"),
        ("this is no Python", "ml.c5.xlarge", "pytorch-training:2.8-cpu-py312"),
    ],
)
def test_the_image_follows_from_what_the_script_imports(
    make_job: MakeJob, script: str, kind: str, tail: str
) -> None:
    assert images.image_for(make_job(script), "us-east-1", kind).endswith(f"/{tail}")


def test_a_script_with_horovod_for_pytorch_needs_an_image_of_one_s_own(make_job: MakeJob) -> None:
    job = make_job("import horovod.torch as hvd", strategy="horovod", workers=2)
    assert "no image of AWS has the Horovod that this script imports" in refusal(job)
    assert "has no Horovod in it" in refusal(
        job.replace(image=images.uri(images.PYTORCH, "eu-west-1", "ml.c5.xlarge"))
    )
    own = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/workshop-horovod:cpu"
    assert body_of(job.replace(image=own))["AlgorithmSpecification"]["TrainingImage"] == own


def test_a_job_that_needs_a_gpu_is_not_sent_to_instances_without_one(make_job: MakeJob) -> None:
    job = make_job(TORCH, resources={"gpu": 1})
    assert "ml.c5.xlarge has no NVIDIA GPU; take one such as ml.g5.xlarge" in refusal(job)
    assert body_of(job, instance_type="ml.g5.xlarge")["ResourceConfig"]["InstanceType"] == "ml.g5.xlarge"


def test_images_of_other_regions_and_of_china_have_their_own_registries() -> None:
    assert images.uri(images.PYTORCH, "eu-south-1", "ml.c5.xlarge").startswith(
        "692866216735.dkr.ecr.eu-south-1."
    )
    assert ".amazonaws.com.cn/" in images.uri(images.PYTORCH, "cn-north-1", "ml.c5.xlarge")


# What travels


def test_the_same_job_is_packed_into_the_same_bytes_with_what_its_script_imports(
    make_job: MakeJob, tmp_path: Path
) -> None:
    import io
    import tarfile

    job = make_job(TORCH, strategy="ring", workers=2)
    (job.folder / "__pycache__").mkdir()
    (job.folder / "__pycache__" / "train.pyc").write_bytes(b"")
    (job.folder / "extra").mkdir()
    (job.folder / "extra" / "words.txt").write_text("hello")
    archive = packed(job)
    assert archive == packed(job)
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        names = set(file.getnames())
    assert {"train.py", "extra/words.txt", "workshop_utils/place.py", "workshop_utils/comm/ring.py"} <= names
    assert not any("pycache" in name for name in names)


def test_own_drivers_need_the_standard_library_alone() -> None:
    import ast
    import sys

    for name, text in driver_files().items():
        for node in ast.walk(ast.parse(text)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for module in modules:
                own = module in (
                    "contract",
                    "tensorflow",
                )  # beside it, and in the server that needs it anyway
                assert own or module.split(".")[0] in sys.stdlib_module_names, f"{name} imports {module}"


def test_a_profile_that_does_not_exist_keeps_nobody_from_looking_at_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    check.service_model.cache_clear()
    assert check.service_model().operation_model("CreateTrainingJob").input_shape is not None
