"""The manifests that would be sent, and what an operator would make of them, without a cluster.

What is rendered for each job is kept in tests/guards/rendered, and what is refused in tests/guards/bad_inputs.yaml.
"""

from pathlib import Path

import pytest
from conftest import write_idx

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import settings
from workshop_utils.launchers.kubernetes import Kubernetes, check, pods
from workshop_utils.launchers.kubernetes.operators import pods_of

JOBS = Path(__file__).parents[2] / "jobs"


def load(name):
    return TrainingJob.load(JOBS / name)


def test_the_example_that_is_kept_beside_its_job_is_what_is_rendered():
    kept = JOBS / "mnist_torch_ddp" / pods.RENDERED
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


# What a place adds

PLACE = Kubernetes.load(JOBS / "clusters" / "eks" / "place-gpu.yaml")


def pods_in(described):
    """Each specification of a pod in `described`."""
    if isinstance(described, dict):
        if "containers" in described:
            yield described
        for each in described.values():
            yield from pods_in(each)
    for each in described if isinstance(described, list) else ():
        yield from pods_in(each)


def place(**settings):
    return Kubernetes(**{**{name: getattr(PLACE, name) for name in PLACE.model_fields_set}, **settings})


@pytest.mark.parametrize(
    ("name", "kind", "processes", "image"),
    [
        ("mnist_torch_ddp", "PyTorchJob", ("nprocPerNode", "8"), "workshop-pytorch:gpu"),
        ("mnist_torch_ddp", "TrainJob", ("numProcPerNode", 8), "workshop-pytorch:gpu"),
        ("mnist_horovod", "MPIJob", ("slotsPerWorker", 8), "workshop-horovod:gpu"),
    ],
)
def test_all_gpus_of_a_node_are_one_pod_which_has_shared_memory_efa_and_nccl_s_variables(
    name, kind, processes, image
):
    job = load(name).replace(
        nodes=2, processes_per_node=8, resources={"gpu": 1, "cpu": 10, "memory": "100Gi"}
    )
    manifest = place(kind=kind).render(job)
    field, count = processes
    assert manifest.resource["spec"].get("trainer", manifest.resource["spec"])[field] == count
    objects = list(manifest.objects)
    training = [pod for pod in pods_in(objects) if pod["containers"][0]["command"][0] != "mpirun"]
    assert training
    for pod in training:
        limits = pod["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == 8
        assert (limits["vpc.amazonaws.com/efa"], limits["hugepages-2Mi"]) == (4, "5120Mi")
        shared = next(each for each in pod["volumes"] if each["name"] == "shm")
        assert shared["emptyDir"]["medium"] == "Memory"
        assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    assert {pod["containers"][0]["image"] for pod in pods_in(objects)} == {f"{PLACE.registry}/{image}"}
    variables = [pod["containers"][0].get("env", []) for pod in pods_in(objects)]
    assert {"name": "FI_PROVIDER", "value": "efa"} in variables[0]


def test_the_pods_of_every_kind_start_together_or_not_at_all():
    gang = {"gang": "volcano", "queue": "workshop"}
    counts = {
        "mnist_torch_ddp": 2,
        "mnist_multi_worker_mirrored": 2,
        "mnist_parameter_server": 4,  # a chief, a server and two workers
        "mnist_horovod": 2,  # without the launcher, which is made only once these run
    }
    for name, least in counts.items():
        made = Kubernetes(**gang).render(load(name)).resource
        assert made["spec"]["runPolicy"]["schedulingPolicy"] == {"minAvailable": least, "queue": "workshop"}
        assert {pod["schedulerName"] for pod in pods_in(made)} == {"volcano"}
    elastic = Kubernetes(**gang, elastic={"min_workers": 1, "max_workers": 4}).render(load("mnist_torch_ddp"))
    assert elastic.resource["spec"]["runPolicy"]["schedulingPolicy"]["minAvailable"] == 1
    (runtime,) = Kubernetes(**gang, kind="TrainJob").render(load("mnist_torch_ddp")).before
    assert runtime["spec"]["podGroupPolicy"] == {"volcano": {}}
    assert runtime["spec"]["template"]["metadata"]["annotations"] == {
        "scheduling.volcano.sh/queue-name": "workshop"
    }
    assert [pod["schedulerName"] for pod in pods_in(runtime)] == ["volcano"]
    alone = Kubernetes(gang="volcano").render(load("mnist_single")).resource  # a single pod needs no gang
    assert "schedulerName" not in str(alone)
    waits = Kubernetes().render(load("mnist_horovod")).resource["spec"]["runPolicy"]["schedulingPolicy"]
    assert waits == {"minAvailable": 2}  # or an operator that schedules gangs would wait for the launcher


def test_a_place_s_claim_keeps_the_model_unless_the_job_names_its_own_and_checkpoints_if_the_job_asks(
    make_job,
):
    def claims(**fields):
        target = Kubernetes(storage_claim="ours", namespace="ada")
        (pod,) = pods_in(target.render(make_job("", name="job", **fields)).resource)
        by_volume = {
            each["name"]: each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["volumes"]
        }
        mounts = pod["containers"][0]["volumeMounts"]
        return {mount["mountPath"]: (by_volume[mount["name"]], mount.get("subPath")) for mount in mounts}

    assert claims()["/workshop/model"] == ("ours", "ada/job/model")  # others have a file of that name, too
    assert "/workshop/checkpoints" not in claims()  # a finished job would resume, and train nothing
    own = claims(outputs="claim:mine", checkpoints="claim:ours")
    assert own["/workshop/model"] == ("mine", "ada/job/model")
    assert own["/workshop/checkpoints"] == ("ours", "ada/job/checkpoints")
    assert "The model goes with its pod" not in Kubernetes(storage_claim="ours").render(make_job("")).comment
    assert "The model goes with its pod" in Kubernetes().render(make_job("")).comment


def test_an_image_that_was_pushed_from_here_is_named_with_its_digest(tmp_path, monkeypatch):
    name, digest = "registry.example.com/workshop-pytorch:cpu", f"sha256:{'0' * 64}"
    assert settings.workshop_image("workshop-pytorch:cpu", "registry.example.com") == name
    pushed = tmp_path / "pushed.yaml"
    pushed.write_text(f'"{name}": "{digest}"\n')
    monkeypatch.setattr(settings, "PUSHED", pushed)
    assert settings.workshop_image("workshop-pytorch:cpu", "registry.example.com") == f"{name}@{digest}"
    assert settings.workshop_image("workshop-pytorch:cpu", None) == "REGISTRY/workshop-pytorch:cpu"


def test_the_account_of_the_examples_is_nobody_s():
    with pytest.raises(JobError, match="registry is that of the examples; no cluster"):
        PLACE.launch(load("mnist_torch_ddp"))


# What the operators add


def test_a_tfjob_ends_with_its_chief_or_else_with_all_of_its_workers():
    made = pods_of(Kubernetes().render(load("mnist_parameter_server")))
    assert [pod.worker for pod in made] == ["chief-0", "ps-0", "worker-0", "worker-1"]
    assert [pod.awaited for pod in made] == [True, False, False, False]
    mirrored = pods_of(Kubernetes().render(load("mnist_multi_worker_mirrored")))
    assert [pod.awaited for pod in mirrored] == [True, True]
