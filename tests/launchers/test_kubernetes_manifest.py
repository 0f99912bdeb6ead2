"""The manifests that would be sent, and what an operator would make of them, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import MakeJob, write_idx

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes, check, files, manifest, rules
from workshop_utils.launchers.kubernetes.operators import pods_of
from workshop_utils.launchers.kubernetes.settings import KINDS, WITHOUT_KIND, Elastic, Settings

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "jobs"
ELASTIC = Elastic(min_workers=1, max_workers=3)


def load(name: str) -> TrainingJob:
    return TrainingJob.load(JOBS / name)


def each_manifest() -> Iterator[Any]:
    for path in sorted(JOBS.glob("*/job.yaml")):
        job = TrainingJob.load(path)
        for kind in KINDS.get(job.strategy, ()):
            yield pytest.param(job, Settings(kind=kind), id=f"{job.name}-{kind}")
    yield pytest.param(load("digits_resumable"), Settings(elastic=ELASTIC), id="elastic")
    yield pytest.param(
        load("mnist_single").replace(resources={"cpu": 0.5, "memory": "1GB", "gpu": 1}),
        Settings(data_claim="mnist", node_selector={"disk": "ssd"}, namespace="team-a"),
        id="claim-and-node-selector",
    )


# What is said of the place


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"namespace": "Team A"}, "namespace is 'Team A'"),
        ({"kind": "Deployment"}, "kind is 'Deployment'; it must be one of 'TFJob', 'PyTorchJob', 'MPIJob'"),
        ({"elastic": {"min_workers": 3, "max_workers": 2}}, "min_workers is 3; it may be at most max_workers, 2"),
        ({"image": ""}, "image is ''"),
        ({"keep": "soon"}, "keep is 'soon'; it must be a duration"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_with_what_would_be_right(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as refused:
        Kubernetes(**settings)
    assert message in str(refused.value)


def test_settings_come_from_a_file_whose_name_stands_in_every_complaint(tmp_path: Path) -> None:
    file = tmp_path / "place.yaml"
    file.write_text("namespace: team-a\nkind: TrainJob\n")
    assert Kubernetes.load(file) == Kubernetes(namespace="team-a", kind="TrainJob")
    for text in ("- a\n", "1: 2\n", "kind: [", "kinf: TFJob\n"):
        file.write_text(text)
        with pytest.raises(JobError, match=r"place\.yaml"):
            Kubernetes.load(file)
    with pytest.raises(JobError, match="there is no file"):
        Kubernetes.load(tmp_path / "none.yaml")


def test_every_strategy_has_a_kind_or_a_reason_that_is_given() -> None:
    for job in map(TrainingJob.load, JOBS.glob("*/job.yaml")):
        assert (job.strategy in KINDS) != (job.strategy in WITHOUT_KIND)
        if job.strategy in WITHOUT_KIND:
            with pytest.raises(JobError, match=WITHOUT_KIND[job.strategy].partition("(")[0]):
                Kubernetes().render(job)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mnist_mpi", {"kind": "TFJob"}, "kind is 'TFJob'; strategy 'mpi' needs MPIJob"),
        ("mnist_mpi", {"elastic": ELASTIC}, "elastic is for PyTorchJob; a MPIJob has no such policy"),
        (
            "mnist_torch_ddp",
            {"elastic": Elastic(max_workers=1)},
            "workers is 2; it must be between elastic.min_workers, 1, and elastic.max_workers, 1",
        ),
    ],
)
def test_settings_that_do_not_fit_the_job_are_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError) as refused:
        Kubernetes(**settings).render(load(name))
    assert message in str(refused.value)


# What is rendered


@pytest.mark.parametrize(("job", "settings"), list(each_manifest()))
def test_what_is_rendered_is_yaml_of_objects_that_a_cluster_takes(
    job: TrainingJob, settings: Settings
) -> None:
    made = manifest.build(job, settings)
    written = tuple(yaml.safe_load_all(str(made)))
    assert written == made.objects
    for described in written:
        assert [*check.problems_of(described), *rules.problems_of(described)] == []
    for unwanted in ("null", "&id", str(ROOT)):
        assert unwanted not in str(made)


def test_the_example_that_is_kept_beside_its_job_is_what_is_rendered() -> None:
    kept = JOBS / "mnist_torch_ddp" / files.RENDERED
    assert kept.read_text() == str(Kubernetes().render(load("mnist_torch_ddp"))), (
        f"run `workshop launch jobs/mnist_torch_ddp --on kubernetes --render` and keep what it shows in {kept}"
    )


def test_the_comment_names_every_file_that_the_pods_mount(make_job: MakeJob) -> None:
    job = make_job("")
    (job.folder / "model.py").write_text("width = 3\n")
    made = Kubernetes().render(job)
    volume = made.resource["spec"]["template"]["spec"]["volumes"][0]["configMap"]
    keys = [item["key"] for item in volume["items"]]
    assert keys[:2] == ["train.py", "model.py"]
    assert "place.py" in keys
    assert all(f"{key}" in made.comment for key in keys)
    assert f"# kubectl create configmap {job.name} " in made.comment


def test_resources_are_written_as_kubernetes_reads_them() -> None:
    job = load("mnist_single").replace(resources={"cpu": 0.5, "memory": "1GB", "gpu": 2})
    made = Kubernetes().render(job).resource["spec"]["template"]["spec"]["containers"][0]
    assert made["resources"] == {"limits": {"cpu": "500m", "memory": "1000000000", "nvidia.com/gpu": 2}}


def test_an_image_of_the_job_comes_before_that_of_the_place() -> None:
    def image(job: TrainingJob, **settings: Any) -> str:
        spec = Kubernetes(**settings).render(job).resource["spec"]["template"]["spec"]
        return str(spec["containers"][0]["image"])

    job = load("mnist_single")
    assert image(job) == "workshop-horovod:cpu"
    assert image(job, image="mine:1") == "mine:1"
    assert image(job.replace(image="jobs:2"), image="mine:1") == "jobs:2"


def test_small_data_travels_in_a_config_map_and_large_data_is_refused(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("")
    code, content = files.config_maps(job, with_data=True)
    assert code["data"]["train.py"] == job.script_path.read_text()
    assert sorted(content["binaryData"]) == sorted(path.name for path in Path(job.data).iterdir())
    for described in (code, content):
        check.body(described)
    large = tmp_path / "large"
    large.mkdir()
    for path in Path(job.data).iterdir():
        (large / path.name).write_bytes(path.read_bytes())
    count = 300_000
    write_idx(large / "train-images-idx3-ubyte", (count, 2, 2), bytes(4 * count))
    write_idx(large / "train-labels-idx1-ubyte", (count,), bytes(count))
    with pytest.raises(JobError, match=r"a ConfigMap holds 1 MiB: put it on a volume"):
        files.config_maps(job.replace(data=str(large)), with_data=True)


# The operators' variables


def test_tensorflow_is_told_its_cluster_by_the_services_names() -> None:
    pods = pods_of(Kubernetes(namespace="team-a").render(load("mnist_parameter_server")))
    assert [pod.worker for pod in pods] == ["chief-0", "ps-0", "worker-0", "worker-1"]
    assert [pod.awaited for pod in pods] == [True, False, False, False]
    config = json.loads(pods[3].variables["TF_CONFIG"])
    assert config["task"] == {"type": "worker", "index": 1}
    assert config["cluster"]["ps"] == ["mnist-parameter-server-ps-0.team-a.svc:2222"]
    mirrored = pods_of(Kubernetes().render(load("mnist_multi_worker_mirrored")))
    assert [pod.awaited for pod in mirrored] == [True, True]


def test_pytorch_is_told_its_rank_and_the_master() -> None:
    pods = pods_of(Kubernetes().render(load("mnist_torch_ddp").replace(workers=3)))
    names = ["mnist-torch-ddp-master-0", "mnist-torch-ddp-worker-0", "mnist-torch-ddp-worker-1"]
    assert [pod.name for pod in pods] == names
    assert [pod.variables["RANK"] for pod in pods] == ["0", "1", "2"]
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "mnist-torch-ddp-master-0", "MASTER_PORT": "23456"}
    assert all(pod.variables.items() >= shared.items() for pod in pods)
    alone = pods_of(Kubernetes().render(load("mnist_torch_ddp").replace(workers=1)))
    assert [pod.variables["WORLD_SIZE"] for pod in alone] == ["1"]


def test_an_elastic_job_is_told_where_to_meet_and_how_few_suffice() -> None:
    pods = pods_of(Kubernetes(elastic=ELASTIC).render(load("digits_resumable")))
    assert [pod.worker for pod in pods] == ["worker-0", "worker-1"]
    assert pods[1].variables == {
        "PYTHONUNBUFFERED": "1",
        "PET_RDZV_ENDPOINT": "digits-resumable-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "1:3",
        "PET_MAX_RESTARTS": "3",
    }
