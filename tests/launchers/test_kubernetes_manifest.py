"""The manifests that would be sent, and what an operator would make of them, without a cluster.

What is rendered for each job is kept in tests/guards/rendered, and what is refused in tests/guards/bad_inputs.yaml.
"""

import re
from pathlib import Path

import pytest
from conftest import write_idx

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes, check, pods
from workshop_utils.launchers.kubernetes.operators import pods_of, workers_in

JOBS = Path(__file__).parents[2] / "jobs"
ON_GPU = "import torch\ntorch.cuda.init()"


def load(name):
    return TrainingJob.load(JOBS / name)


def container_of(job, **settings):
    """The container of a single worker's pod."""
    return Kubernetes(**settings).render(job).resource["spec"]["template"]["spec"]["containers"][0]


def test_the_example_that_is_kept_beside_its_job_is_what_is_rendered():
    kept = JOBS / "mnist_torch_ddp" / pods.RENDERED
    assert kept.read_text() == str(Kubernetes().render(load("mnist_torch_ddp"))), (
        f"run `workshop launch jobs/mnist_torch_ddp --on kubernetes --render` and keep what it shows in {kept}"
    )


def test_the_comment_names_every_file_that_the_pods_mount(make_job):
    job = make_job("")
    (job.folder / "model.py").write_text("width = 3\n")
    made = Kubernetes().render(job)
    volume = made.resource["spec"]["template"]["spec"]["volumes"][0]["configMap"]
    keys = [item["key"] for item in volume["items"]]
    assert keys[:2] == ["train.py", "model.py"]
    assert "place.py" in keys
    assert all(f"{key}" in made.comment for key in keys)
    assert f"# kubectl create configmap {job.name} " in made.comment


def test_resources_are_written_as_kubernetes_reads_them_and_the_job_s_image_comes_first(make_job):
    resources = {"cpu": 0.5, "memory": "1GB", "gpu": 2}
    job = make_job(ON_GPU, resources=resources, image="jobs:2")
    made = container_of(job, image="mine:1")
    assert made["resources"] == {"limits": {"cpu": "500m", "memory": "1000000000", "nvidia.com/gpu": 2}}
    assert made["image"] == "jobs:2"


def test_pods_that_hold_parameters_or_hand_out_steps_get_no_gpu(make_job):
    script = "import tensorflow"
    made = Kubernetes().render(make_job(script, strategy="parameter_server", workers=2, resources={"gpu": 1}))
    on_gpu = {
        role
        for role, replica in made.resource["spec"]["tfReplicaSpecs"].items()
        if "nvidia.com/gpu" in replica["template"]["spec"]["containers"][0]["resources"]["limits"]
    }
    assert on_gpu == {"Worker"}


def test_the_pods_of_a_pytorchjob_are_not_told_that_all_are_the_first_node(make_job):
    assert "GROUP_RANK" not in str(Kubernetes().render(make_job("", strategy="torch_ddp", workers=2)))


def test_small_data_travels_in_a_config_map_and_large_data_is_refused(make_job, tmp_path):
    job = make_job("")
    code, content = pods.config_maps(job, with_data=True)
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
        pods.config_maps(job.replace(data=str(large)), with_data=True)


# What the operators add


def test_a_tfjob_ends_with_its_chief_or_else_with_all_of_its_workers():
    made = pods_of(Kubernetes().render(load("mnist_parameter_server")))
    assert [pod.worker for pod in made] == ["chief-0", "ps-0", "worker-0", "worker-1"]
    assert [pod.awaited for pod in made] == [True, False, False, False]
    mirrored = pods_of(Kubernetes().render(load("mnist_multi_worker_mirrored")))
    assert [pod.awaited for pod in mirrored] == [True, True]


# Several processes a pod


@pytest.mark.parametrize(
    ("strategy", "kind", "count"),
    [
        ("torch_ddp", "PyTorchJob", "spec.nprocPerNode"),
        ("torch_ddp", "TrainJob", "spec.trainer.numProcPerNode"),
        ("horovod", "MPIJob", "spec.slotsPerWorker"),
    ],
)
def test_a_pod_with_several_processes_is_one_node_and_has_the_resources_of_all(
    strategy, kind, count, make_job
):
    resources = {"cpu": 2, "memory": "1Gi", "gpu": 1}
    job = make_job(ON_GPU, strategy=strategy, nodes=2, processes_per_node=3, resources=resources)
    manifest = Kubernetes(kind=kind).render(job)
    value = manifest.resource
    for field in count.split("."):
        value = value[field]
    assert int(value) == 3
    made = pods_of(manifest)
    assert workers_in(made) == tuple(f"worker-{rank}" for rank in range(6))
    text = str(manifest)
    assert "cpu: 6\n" in text
    assert f"memory: '{3 << 30}'" in text
    assert text.count("nvidia.com/gpu: 3") == (
        2 if kind == "PyTorchJob" else 1
    )  # mpirun's own pod needs none
    if kind != "MPIJob":
        assert [pod.worker for pod in made] == ["node-0", "node-1"]
        assert {pod.variables["PET_NPROC_PER_NODE"] for pod in made} == {"3"}
        assert re.search(r"- torchrun\n +- --\n +- /workshop/job/train\.py\n", text)
        assert "LOCAL_RANK" not in text  # torchrun sets it


# Where the model and the checkpoints stay


def storage_of(job, **settings):
    """By path in the container: the mount, and the claim that is mounted there."""
    pod = Kubernetes(**settings).render(job).resource["spec"]["template"]["spec"]
    claims = {each["name"]: each.get("persistentVolumeClaim") for each in pod["volumes"]}
    mounts = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
    return mounts, {path: claims[mount["name"]] for path, mount in mounts.items()}


def test_model_and_checkpoints_go_to_sub_folders_of_the_claims_that_the_job_names():
    job = load("mnist_single").replace(outputs="claim:models", checkpoints="claim:scratch")
    mounts, claims = storage_of(job)
    assert claims["/workshop/model"] == {"claimName": "models"}
    assert claims["/workshop/checkpoints"] == {"claimName": "scratch"}
    assert mounts["/workshop/model"]["subPath"] == "mnist-single/model"
    variables = {each["name"]: each["value"] for each in container_of(job)["env"]}
    assert variables["WORKSHOP_CHECKPOINTS"] == "/workshop/checkpoints"


def test_a_claim_that_is_named_three_times_is_one_volume_whose_data_is_only_read():
    job = load("mnist_single").replace(outputs="claim:all", checkpoints="claim:all")
    mounts, claims = storage_of(job, data_claim="all")
    assert [claims[f"/workshop/{name}"] for name in ("data", "model", "checkpoints")] == [
        {"claimName": "all"}
    ] * 3
    assert len({mounts[f"/workshop/{name}"]["name"] for name in ("data", "model", "checkpoints")}) == 1
    assert mounts["/workshop/data"]["readOnly"]
    assert "readOnly" not in mounts["/workshop/model"]
