"""The request that ModelTrainer makes of a job, what is refused before, and what a launch sends to moto.

All tests that import the SageMaker SDK are here, since the import takes seconds. What is rendered for the workshop's
own jobs, and wrong settings, are among the guards.
"""

import gzip
import io
import json
import socket
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from conftest import save
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.jobs import JobError
from workshop_utils.launchers import instances
from workshop_utils.launchers.sagemaker import EmulatedSageMaker, SageMaker, account, submission, toolkit
from workshop_utils.launchers.sagemaker.account import TAG, Aws
from workshop_utils.launchers.sagemaker.price import NotConfirmed
from workshop_utils.launchers.source import packed
from workshop_utils.runs import RunState
from workshop_utils.training import data

ROOT = Path(__file__).parents[2]
ROLE = "arn:aws:iam::123456789012:role/workshop"
TORCH = "import torch\n"


def place(**settings):
    return SageMaker(**{"role": ROLE, "region": "eu-west-1", **settings})


def body_of(job, **settings):
    return place(**settings).render(job).body


# The body


def test_a_driver_s_job_installs_the_requirements_in_its_folder(make_job):
    job = make_job(TORCH, strategy="torch_ddp")
    (job.folder / "requirements.txt").write_text("einops\n")
    uploads = place().render(job).uploads
    (starts,) = [content.decode() for key, content in uploads.items() if key.endswith("/sm_train.sh")]
    assert "install_requirements.py requirements.txt" in starts


@pytest.mark.parametrize("strategy", ["mpi", "horovod"])
def test_there_are_as_many_ranks_as_hosts_times_processes_on_each(make_job, strategy):
    rendered = place().render(
        make_job(TORCH, strategy=strategy, nodes=3, processes_per_node=2, image="mine:1")
    )
    assert rendered.body["ResourceConfig"]["InstanceCount"] == 3
    # The SDK's own MPI would pass the 2 of a host as the number of all ranks.
    assert not rendered.uploads
    assert rendered.body["HyperParameters"]["sagemaker_mpi_num_of_processes_per_host"] == "2"
    mpirun = toolkit.script(rendered.submission, 0, {}).argv
    assert mpirun[mpirun.index("-n") + 1] == "6"


def members(request):
    """The files of the source that `request` sends, by name."""
    with tarfile.open(fileobj=io.BytesIO(request.source)) as file:
        return {name: file.extractfile(name).read() for name in file.getnames()}


@pytest.mark.parametrize(
    ("strategy", "arguments", "values"),
    [
        (
            "torch_ddp",
            {"epochs": 3, "rate": 1e-05, "amp": True, "mode": "a-b"},
            ["true", "3", '"a-b"', "1e-05"],
        ),
        ("torch_ddp", {"epochs": float("inf")}, None),
        ("torch_ddp", {"no": 3}, None),  # torchrun would take it for one of its own options
        ("single", {"no": 3}, ["3"]),
        ("single", {"n": 3}, None),  # the driver would make it --n
        ("mpi", {"n": 3, "text": "7"}, ["3", '"7"']),
        ("mpi", {"sagemaker_program": "x"}, None),  # which the toolkit takes for itself
        *(("mpi", {"text": text}, None) for text in ("$HOME", "a b", "it's", "[1]", "1e5", "", "*")),
        *(("single", {"text": each}, None) for each in (None, [1, 2], "{rank}")),
        ("single", ["--text", 1], None),
    ],
)
def test_hyperparameters_carry_arguments_that_they_do_not_change_and_a_file_the_others(
    make_job, strategy, arguments, values
):
    job = make_job(TORCH, strategy=strategy, arguments=arguments)
    request = place().render(job)
    told, files = request.body.get("HyperParameters", {}), members(request)
    own = [told[name].replace('"True"', "true") for name in sorted(told) if name in job.named_arguments]
    if values is not None:
        assert own == values
        assert "workshop_utils/start.json" not in files
        return
    command = [*(["-m", "mpi4py"] if strategy == "mpi" else []), "train.py", *job.command_line_arguments]
    assert json.loads(files["workshop_utils/start.json"]) == command
    assert "workshop_utils/start.py" in files
    assert "start.json" in str(request)
    started = told.get("sagemaker_program") or next(
        text.decode() for name, text in request.uploads.items() if name.endswith("sourcecode.json")
    )
    assert "workshop_utils/start.py" in started


def test_what_the_toolkit_would_install_of_itself_stays_where_it_is_not_wanted(make_job):
    job = make_job(TORCH, strategy="mpi", requirements=False)
    for name in ("setup.py", "requirements.txt"):
        (job.folder / name).touch()
    assert not {"setup.py", "requirements.txt"} & members(place().render(job)).keys()
    assert "requirements.txt" in members(place().render(job.replace(requirements=True)))


def test_a_mapping_of_data_becomes_channels_each_with_a_place_of_its_own(make_job, tmp_path):
    own = {"train": str(tmp_path), "dev": str(tmp_path / "dev"), "test": "s3://elsewhere/x", "more": "digits"}
    body = body_of(make_job(TORCH, data=own), input_mode="FastFile")
    uris = {
        each["ChannelName"]: each["DataSource"]["S3DataSource"]["S3Uri"] for each in body["InputDataConfig"]
    }
    assert len({*uris.values()}) == len(uris) == len({"code", "sm_drivers", *own})
    assert (uris["test"], uris["more"].partition("/data/")[2]) == ("s3://elsewhere/x", "digits/")
    modes = {each["ChannelName"]: each["InputMode"] for each in body["InputDataConfig"]}
    assert modes == {**dict.fromkeys(own, "FastFile"), "code": "File", "sm_drivers": "File"}
    assert body["Environment"]["WORKSHOP_DATA"] == "/opt/ml/input/data"
    for name in ("code", "a-b"):
        with pytest.raises(JobError, match=f"data.{name} cannot be a channel's name"):
            body_of(make_job(TORCH, data={name: "digits"}))


def test_secrets_and_what_exceeds_the_service_s_limits_are_no_hyperparameters(make_job):
    arguments = {"note": "a b", "api_key": "abc", "ids": "x" * 3000, **{f"a{n}": n for n in range(150)}}
    request = place().render(make_job(TORCH, strategy="torch_ddp", arguments=arguments))
    hyperparameters = request.body["HyperParameters"]
    assert {"a0", "a1"} <= hyperparameters.keys()
    assert not {"api_key", "ids", "note"} & hyperparameters.keys()
    assert len(hyperparameters) <= 100
    assert "api_key" in request.submission.texts["workshop_utils/start.json"]


def test_a_folder_that_is_called_like_named_data_is_not_read(make_job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "back").symlink_to(tmp_path)  # which would be refused
    assert place().render(make_job(TORCH, data="mnist")).channels["training"].endswith("/data/mnist/")


def test_instances_have_the_processors_memory_and_gpus_that_are_said(make_job):
    """Compared with what EC2 answers of its types, as moto keeps it."""
    import moto

    with gzip.open(Path(moto.__file__).parent / "ec2/resources/instance_types.json.gz") as file:
        types = json.load(file)
    known = 0
    for name in submission._instance_types():
        if there := types.get(name.removeprefix("ml.")):
            known += 1
            cpus, mebibytes = there["VCpuInfo"]["DefaultVCpus"], there["MemoryInfo"]["SizeInMiB"]
            assert instances.size_of(name) == (cpus, mebibytes / 1024), name
            gpus = [
                each for each in there.get("GpuInfo", {}).get("Gpus", ()) if each["Manufacturer"] == "NVIDIA"
            ]
            assert (instances.gpus_of(name) or 0) == sum(each["Count"] for each in gpus), name
    assert known > 200
    submission._check_size(
        make_job("", resources={"memory": "9Ti"}), "ml.p2.xlarge"
    )  # of which nothing is known
    for resources, kind in (({"memory": "190Gi"}, "ml.c5n.18xlarge"), ({"cpu": 36}, "ml.c4.8xlarge")):
        submission._check_size(make_job("", resources=resources), kind)
    with pytest.raises(JobError, match="has 4: take a larger instance, or ask for less"):
        submission._check_size(make_job("", resources={"cpu": 8}), "ml.c5.xlarge")


def test_the_job_s_own_modules_stay_on_the_path(make_job):
    job = make_job(TORCH, strategy="torch_ddp", environment={"PYTHONPATH": "/mine"})
    assert body_of(job)["Environment"]["PYTHONPATH"] == "/mine"
    (job.folder / "sub").mkdir()
    (job.folder / "sub" / "train.py").write_text(TORCH)
    below = body_of(job.replace(script="sub/train.py"))
    assert below["Environment"]["PYTHONPATH"] == "/opt/ml/input/data/code:/mine"
    started = body_of(job.replace(script="sub/train.py", arguments=[1]))
    assert started["Environment"] == below["Environment"]


def test_nothing_of_the_user_s_own_configuration_gets_into_a_request(make_job, monkeypatch, tmp_path):
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
        ("import torch", "us-east-1", "ml.c5.xlarge", "763104351884", "pytorch:2.13-cpu-amzn2023-sagemaker"),
        ("import torch", "eu-south-1", "ml.g5.xlarge", "692866216735", "pytorch:2.13-cu133-amzn2023-sagemaker"),
        ("import keras", "cn-north-1", "ml.m5.large", "727897471807", "tensorflow-training:2.21-cpu-py312-sagemaker"),
    ],
)  # fmt: skip
def test_the_image_follows_from_what_the_script_imports(make_job, script, region, kind, registry, image):
    chosen = submission.image_for(make_job(script), place(region=region, instance_type=kind))
    assert chosen.startswith(f"{registry}.dkr.ecr.{region}.amazonaws.com")
    assert chosen.endswith("/" + image)
    repository = chosen.partition("/")[2].partition(":")[0]
    roles = (ROOT / "jobs/clusters/sagemaker/templates/roles.yaml").read_text()
    assert f":ecr:${{AWS::Region}}:*:repository/{repository}\n" in roles, "the role may not pull it"


def test_an_image_of_one_s_own_may_have_horovod(make_job):
    body = body_of(make_job("import horovod.torch", strategy="horovod", workers=2, image="mine:1"))
    assert body["AlgorithmSpecification"]["TrainingImage"] == "mine:1"
    assert body["Environment"]["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "1800"


@pytest.mark.parametrize(
    ("image", "lacks"),
    [
        ("763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch:2.13-cpu-amzn2023-sagemaker", True),
        ("763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.4-cpu-py311", True),
        ("871362719292.dkr.ecr.ap-east-1.amazonaws.com/tensorflow-training:2.21-cpu-py312", True),
        ("763104351884.dkr.ecr.us-east-1.amazonaws.com/tensorflow-training:2.12.0-cpu-py310", False),
        ("763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:1.13.1-gpu-py39-cu117", False),
        ("123456789012.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.4-mine", False),
        ("123456789012.dkr.ecr.xx-north-1.amazonaws.com/pytorch-training:2.4-mine", False),
    ],
)
def test_an_image_of_aws_without_horovod_is_refused_to_a_script_that_needs_it(make_job, image, lacks):
    job = make_job("import horovod.torch", strategy="horovod", workers=2, image=image)
    if lacks:
        with pytest.raises(JobError, match="has no Horovod in it"):
            body_of(job)
    else:
        assert body_of(job)["AlgorithmSpecification"]["TrainingImage"] == image


def test_the_workshop_s_own_images_have_no_toolkit_for_tensorflow_s_strategies(make_job):
    own = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/workshop-horovod:cpu"
    with pytest.raises(JobError, match="leave it out, and AWS's is taken"):
        body_of(make_job("import tensorflow", strategy="parameter_server", workers=2, image=own))


def test_with_a_role_emulated_instances_refuse_what_sagemaker_would(make_job, monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert EmulatedSageMaker().region_name == "us-east-1"
    with pytest.raises(JobError, match="region is missing"):
        EmulatedSageMaker(role=ROLE).launch(make_job(TORCH))
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    algorithm = EmulatedSageMaker(role=ROLE).render(make_job(TORCH)).body["AlgorithmSpecification"]
    assert ".eu-west-1." in algorithm["TrainingImage"]


# What is sent to moto


@pytest.fixture
def aws(monkeypatch):
    """The account on this machine."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return account.connect("eu-west-1")


def test_below_a_channel_s_address_lies_what_is_in_its_folder_and_nothing_else(make_job, aws, tmp_path):
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    for name in ("more/x.bin", "old.txt"):
        (folder / name).write_text(name)
    launcher = place(aws=aws, bucket="bucket-for-data")
    job = make_job(TORCH, data={"train": str(folder), "test": str(folder / "old.txt")})
    uris = []
    for name in ("more/x.bin", "more/y.bin"):
        uri = launcher.render(job).channels["train"]
        uris.append(uri)
        launcher.launch(job).wait(60)
        bucket, prefix = account.split_uri(uri)
        listed = aws.pages("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix)
        assert sorted(each["Key"].removeprefix(prefix) for each in listed) == [name, "old.txt"]
        if name == "more/x.bin":
            (folder / name).rename(folder / "more/y.bin")
    assert list(
        aws.pages("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=account.split_uri(uris[0])[1])
    )


def test_data_that_changes_after_the_request_goes_where_the_request_names_it(
    make_job, aws, tmp_path, monkeypatch
):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "log.txt").write_text("one")
    prepare = data.prepare

    def meanwhile(source):
        (folder / "log.txt").write_text("one, two")
        return prepare(source)

    monkeypatch.setattr(data, "prepare", meanwhile)
    run = place(aws=aws, bucket="bucket-for-changes").launch(make_job(TORCH, data=str(folder))).wait(60)
    described = aws.call("sagemaker", "describe_training_job", TrainingJobName=run.name)
    (uri,) = [
        each["DataSource"]["S3DataSource"]["S3Uri"]
        for each in described["InputDataConfig"]
        if each["ChannelName"] == "training"
    ]
    bucket, prefix = account.split_uri(uri)
    listed = aws.pages("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix)
    assert [each["Key"].removeprefix(prefix) for each in listed] == ["log.txt"]


@pytest.mark.parametrize("strategy", ["torch_ddp", "mpi"])
def test_a_launch_stores_source_drivers_and_data_once_and_tells_no_one_else(
    make_job, aws, strategy, monkeypatch
):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        # Whatever is not for this machine, such as the SDK's telemetry, would go through here.
        for name in ("HTTPS_PROXY", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        stored = []
        aws.client("s3").meta.events.register(
            "before-call.s3.PutObject", lambda params, **_: stored.append(params["url_path"])
        )
        job = make_job(TORCH, strategy=strategy, arguments={"x": 1}, name="a" * 50)
        bucket = f"bucket-for-{strategy.replace('_', '-')}"
        launcher = place(aws=aws, tags={"team": "red"}, bucket=bucket)
        runs = [launcher.launch(job).wait(60) for _ in range(2)]
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):  # no one has called
            proxy.accept()
    assert len({run.name for run in runs}) == 2
    for run in runs:
        assert len(run.name) <= 63
        assert (run.state, run.stage, run.workers) == (RunState.SUCCEEDED, "Completed", ("algo-1",))
        assert run.answered_by.startswith("an emulator of AWS at ")
        assert [path for path in stored if path.endswith(f"/{run.name}/sourcedir.tar.gz")]
        drivers = [path for path in stored if run.name in path and path.endswith("/torchrun_driver.py")]
        assert len(drivers) == (strategy == "torch_ddp")
        described = aws.call("sagemaker", "describe_training_job", TrainingJobName=run.name)
        tags = aws.call("sagemaker", "list_tags", ResourceArn=described["TrainingJobArn"])["Tags"]
        assert tags == [TAG, {"Key": "team", "Value": "red"}]
    data = [path for path in stored if "/data/" in path]
    assert len(data) == len(set(data)) == 4


def test_a_job_is_packed_with_what_its_script_imports(make_job):
    job = make_job(TORCH, strategy="ring", workers=2)
    for name in ("__pycache__/train.pyc", "extra/words.txt"):
        (job.folder / name).parent.mkdir()
        (job.folder / name).write_text("hello")
    with tarfile.open(fileobj=io.BytesIO(packed(job))) as file:
        names = set(file.getnames())
    assert {"train.py", "extra/words.txt", "workshop_utils/place.py", "workshop_utils/comm/ring.py"} <= names
    assert not any("pycache" in name for name in names)


def test_aws_gets_nothing_before_someone_has_agreed(make_job, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    nowhere = Aws("eu-west-1", clients={"s3": None})  # any call raises
    with pytest.raises(NotConfirmed, match=r"Set confirm to true to agree to:\n1 × ml\.c5"):
        place(aws=nowhere).launch(make_job(TORCH))
    with pytest.raises(AttributeError, match="head_bucket"):
        place(aws=nowhere, confirm=True).launch(make_job(TORCH))


@pytest.mark.processes
def test_the_command_line_launches_in_the_account_and_on_emulated_instances(
    make_job, aws, tmp_path, monkeypatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(aws.endpoint))
    job = make_job("from workshop_utils import place\nplace.report(step=1, loss=0.5)\n")
    save(job)
    config = tmp_path / "place.yaml"
    config.write_text(yaml.safe_dump({"role": ROLE, "region": "ap-southeast-2"}))
    words = ["launch", str(job.folder), "--config", str(config), "--on"]
    launched = CliRunner().invoke(cli.app, [*words, "sagemaker"])
    assert launched.exit_code == 0, launched.output
    assert "answered by: an emulator of AWS" in launched.stdout
    emulated = CliRunner().invoke(cli.app, [*words, "sagemaker-local"])
    assert "answered by: emulated instances on this machine" in emulated.stdout
    assert "step 1, loss 0.5000" in emulated.stdout


def test_the_emulator_renders_a_job_whose_model_and_checkpoints_go_to_folders(make_job, tmp_path):
    job = make_job("import torch", strategy="torch_ddp", workers=2)
    folders = job.replace(outputs=str(tmp_path / "models"), checkpoints=str(tmp_path / "saved"))
    assert str(tmp_path) not in str(EmulatedSageMaker().render(folders))
