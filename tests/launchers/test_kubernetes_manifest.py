"""The manifests that would be sent, and what an operator would make of them, without a cluster.

What is rendered for each job is kept in tests/guards/rendered, and what is refused in tests/guards/bad_inputs.yaml.
"""

import base64
import io
import json
import random
import shlex
import tarfile
from pathlib import Path

import pytest

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import EmulatedKubernetes, Kubernetes, check, config_maps, settings
from workshop_utils.launchers.kubernetes.operators import pods_of
from workshop_utils.launchers.template import expanded, relocated

JOBS = Path(__file__).parents[2] / "jobs"


def load(name):
    return TrainingJob.load(JOBS / name)


def test_the_example_that_is_kept_beside_its_job_is_what_is_rendered():
    kept = JOBS / "mnist_torch_ddp" / config_maps.RENDERED
    assert kept.read_text() == str(Kubernetes().render(load("mnist_torch_ddp"))), (
        f"run `workshop launch jobs/mnist_torch_ddp --on kubernetes --render` and keep what it shows in {kept}"
    )


def test_resources_are_written_as_kubernetes_reads_them_and_the_job_s_image_comes_first(make_job):
    resources = {"cpu": 0.5, "memory": "1GB", "gpu": 2}
    job = make_job("import torch\ntorch.cuda.init()", resources=resources, image="jobs:2")
    (made,) = Kubernetes(image="mine:1").render(job).resource["spec"]["template"]["spec"]["containers"]
    assert made["resources"] == {"limits": {"cpu": "500m", "memory": "1000000000", "nvidia.com/gpu": 2}}
    assert made["image"] == "jobs:2"


def test_no_dollar_is_read_by_the_kubelet(make_job):
    texts = ["a$$b", "--x=$(PYTHONPATH)", "$", "$x$$$(", "$()"]
    job = make_job("", arguments=texts, environment={"P": "pa$$word$(P)"})
    (made,) = Kubernetes().render(job).resource["spec"]["template"]["spec"]["containers"]
    assert made["args"][:2] == ["a$$$b", "--x=$$(PYTHONPATH)"]
    assert [expanded(word, {"PYTHONPATH": "/x"}) for word in made["args"]] == texts
    own = {each["name"]: each["value"] for each in made["env"]}
    assert expanded(own["P"], own) == "pa$$word$(P)"


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("/opt/mlflow/x /opt/ml-x /opt/ml.x", "/opt/mlflow/x /opt/ml-x /opt/ml.x"),
        ("/opt/ml", "/r\\1"),
        ("--a=/opt/ml/x:/opt/ml", "--a=/r\\1/x:/r\\1"),
        ('{"a": "/opt/ml", "b": "/opt/ml/data/x"}', '{"a": "/r\\1", "b": "/d/x"}'),
    ],
)
def test_the_path_of_a_folder_is_replaced_where_it_ends(text, replaced):
    assert relocated(text, {"/opt/ml": "/r\\1", "/opt/ml/data": "/d"}) == replaced
    assert relocated(text, {}) == text
    text = "s3://mine/opt/ml x=/opt/ml a:/opt/ml: file:///opt/ml/model"
    assert relocated(text, {"/opt/ml": "/r"}) == "s3://mine/opt/ml x=/r a:/r: file:///r/model"


def carried(job, place=None):
    """What unpacks in a pod: the names in each archive, by the ConfigMap."""
    made = config_maps.config_maps(job, (place or Kubernetes()).render(job).archive, with_data=True)
    archives = {each["metadata"]["name"]: each["binaryData"] for each in made}
    for described in made:
        check.require(described)
    names = {}
    for name, values in archives.items():
        (content,) = values.values()
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(content))) as file:
            names[name] = set(file.getnames())
    return names


def test_folder_and_data_travel_as_an_archive_each(make_job, data_folder, tmp_path):
    job = make_job("", data={"train": str(data_folder), "test": str(tmp_path / "test.csv")})
    (tmp_path / "test.csv").write_text("1,2")
    (job.folder / "lib").mkdir()
    (job.folder / "lib" / "weights.bin").write_bytes(b"\xff")
    names = carried(job)
    assert names["job-1"] > {"train.py", "lib/weights.bin", "workshop_utils/place.py"}
    training = {f"train/{path.name}" for path in data_folder.iterdir()}
    assert names["job-1-data"] == {"train", "test", "test/test.csv"} | training


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("job-1/weights.bin", None, r"^folder is '.*job-1'; packed it has 1\.[12] MB \(weights\.bin 1\.1 MB\), "),
        ("large/corpus.txt", "large", r"^data is '.*large'; packed it has 1\.[12] MB \(corpus\.txt 1\.1 MB\), and a "),
        ("large/corpus.txt", {"a": "digits", "b": "large"}, r"\(b/corpus\.txt 1\.1 MB, a/train\S+ 0\.1 MB\), .*claim$"),
        ("large/corpus.txt", {"a": "mnist"}, r"^data\.a is 'mnist'; it has 12 MB, and a ConfigMap holds 1 MiB: put it"),
        ("large/corpus.txt", {"a": "s3://bucket/x"}, r"^data\.a is 's3://bucket/x': .*; or put it on a volume"),
    ],
)  # fmt: skip
def test_what_a_config_map_cannot_hold_is_refused_before_it_is_sent(
    make_job, tmp_path, monkeypatch, file, data, message
):
    monkeypatch.chdir(tmp_path)
    job = make_job("", data=data)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(random.Random(0).randbytes(1_100_000))
    with pytest.raises(JobError, match=message):
        Kubernetes().render(job)
    if data is not None:
        assert "data.tgz" not in str(Kubernetes(data_claim="mine").render(job))


@pytest.mark.parametrize(
    ("fields", "claim"),
    [
        ({"data": "digits"}, None),
        ({"data": {"train": "own's"}, "script": "main.py"}, None),
        ({"data": None, "module": "lib.train", "arguments": ["{rank}"]}, None),
        ({"data": "job-1/lib"}, "mine"),
    ],
)
def test_the_command_by_hand_prints_what_is_sent(make_job, tmp_path, monkeypatch, capsys, fields, claim):
    monkeypatch.chdir(tmp_path)
    job = make_job("")
    for name in ("job-1/main.py", "job-1/lib/train.py", "own's/corpus.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    job = job.replace(**fields)
    rendered = Kubernetes(data_claim=claim).render(job)
    head = str(rendered).partition("apiVersion")[0].replace("# ", "")
    by_hand = head[head.index("python -c") : head.index(" | kubectl create -f -")]
    exec(shlex.split(by_hand)[2], {})
    assert json.loads(capsys.readouterr().out)["items"] == config_maps.config_maps(
        job, rendered.archive, claim is None
    )


def test_packages_must_be_in_an_image_of_the_user_s_own(make_job):
    job = make_job("")
    (job.folder / "requirements.txt").write_text("no-such-package\n")
    with pytest.raises(
        JobError, match=r"^requirements\.txt asks for packages; REGISTRY/workshop-horovod:cpu may lack"
    ):
        Kubernetes().render(job)
    with pytest.raises(JobError, match="no-such-package"):
        EmulatedKubernetes(image="mine:1").render(job)
    for place, allowed in (
        (Kubernetes(image="mine:1"), job),
        (Kubernetes(), job.replace(requirements=False)),
    ):
        assert place.render(allowed).archive


# What a place adds


def test_a_job_s_own_claim_comes_before_the_place_s(make_job):
    pods = Kubernetes(storage_claim="ours").render(make_job("", outputs="claim:mine")).resource["spec"]
    volumes = pods["template"]["spec"]["volumes"]
    claims = [each["persistentVolumeClaim"] for each in volumes if "persistentVolumeClaim" in each]
    assert claims == [{"claimName": "mine"}]


def test_an_image_that_was_pushed_from_here_is_named_with_its_digest(tmp_path, monkeypatch):
    name, digest = "registry.example.com/workshop-pytorch:cpu", f"sha256:{'0' * 64}"
    assert settings.workshop_image("workshop-pytorch:cpu", "registry.example.com") == name
    pushed = tmp_path / "pushed.yaml"
    pushed.write_text(f'"{name}": "{digest}"\n')
    monkeypatch.setattr(settings, "PUSHED", pushed)
    assert settings.workshop_image("workshop-pytorch:cpu", "registry.example.com") == f"{name}@{digest}"
    assert settings.workshop_image("workshop-pytorch:cpu", None) == "REGISTRY/workshop-pytorch:cpu"


# What the operators add


def test_a_tfjob_ends_with_its_chief_or_else_with_all_of_its_workers():
    made = pods_of(Kubernetes().render(load("mnist_tensorflow/parameter_server.yaml")))
    assert [pod.worker for pod in made] == ["chief-0", "ps-0", "worker-0", "worker-1"]
    assert [pod.required for pod in made] == [True, False, False, False]
    mirrored = pods_of(Kubernetes().render(load("mnist_tensorflow")))
    assert [pod.required for pod in mirrored] == [True, True]
