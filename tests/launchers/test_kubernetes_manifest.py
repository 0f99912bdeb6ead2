"""The manifests that would be sent, and what an operator would make of them, without a cluster.

What is rendered for each job is kept in tests/guards/rendered, and what is refused in tests/guards/bad_inputs.yaml.
"""

from pathlib import Path

import pytest
from conftest import write_idx

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes, check, config_maps, settings
from workshop_utils.launchers.kubernetes.operators import pods_of

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


def test_small_data_travels_in_a_config_map_and_large_data_is_refused(make_job, tmp_path):
    job = make_job("")
    files = Kubernetes().render(job).files
    code, content = config_maps.config_maps(job, files, with_data=True)
    assert code["data"]["train.py"] == job.script_path.read_text()
    assert sorted(content["binaryData"]) == sorted(path.name for path in Path(job.data).iterdir())
    for described in (code, content):
        check.require(described)
    large, count = tmp_path / "large", 300_000
    large.mkdir()
    for prefix in ("train", "t10k"):
        write_idx(large / f"{prefix}-images-idx3-ubyte", (count, 2, 2), bytes(4 * count))
        write_idx(large / f"{prefix}-labels-idx1-ubyte", (count,), bytes(count))
    with pytest.raises(JobError, match=r"a ConfigMap holds 1 MiB: put it on a volume"):
        config_maps.config_maps(job.replace(data=str(large)), files, with_data=True)


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
