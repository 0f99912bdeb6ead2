"""The manifests that would be sent, checked without a cluster."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from conftest import MakeJob, write_idx
from resource_schemas import needs_schemas, schema_of

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes, check, files, manifest, rendered, rules
from workshop_utils.launchers.kubernetes.operators import pods_of
from workshop_utils.launchers.kubernetes.quantity import is_quantity
from workshop_utils.launchers.kubernetes.settings import KINDS, Elastic, Settings

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "jobs"
ELASTIC = Elastic(min_workers=1, max_workers=3)
POD = "spec.tfReplicaSpecs.Worker.template.spec"


def load(name: str) -> TrainingJob:
    return TrainingJob.load(JOBS / name)


def resource_of(name: str, **settings: Any) -> dict[str, Any]:
    return copy.deepcopy(Kubernetes(**settings).render(load(name)).resource)


def refusal(job: TrainingJob, **settings: Any) -> str:
    with pytest.raises(JobError) as refused:
        Kubernetes(**settings).render(job)
    return str(refused.value)


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
        ({"namespcae": "a"}, "namespcae: unknown field; did you mean namespace?"),
        ({"kind": "Deployment"}, "kind is 'Deployment'; it must be one of 'TFJob', 'PyTorchJob', 'MPIJob'"),
        (
            {"elastic": {"min_workers": 3, "max_workers": 2}},
            "min_workers is 3; it may be at most max_workers, 2",
        ),
        ({"image": ""}, "image is ''"),
        ({"keep": "soon"}, "keep is 'soon'; it must be a duration"),
    ],
)
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


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("digits_horovod_elastic", "its driver starts the workers itself, on its own machine"),
        ("spark_sgd", "Spark makes its pods itself"),
        ("digits_ring", "its message passing listens on one machine alone"),
        ("digits_parameter_server", "its message passing listens on one machine alone"),
    ],
)
def test_a_strategy_that_lives_on_one_machine_is_refused_with_the_reason(name: str, why: str) -> None:
    assert why in refusal(load(name))


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
    assert message in refusal(load(name), **settings)


# What is rendered


@pytest.mark.parametrize(("job", "settings"), list(each_manifest()))
def test_what_is_rendered_reads_back_as_the_same_objects(job: TrainingJob, settings: Settings) -> None:
    made = manifest.build(job, settings)
    assert manifest.read(str(made)).objects == made.objects
    assert "null" not in str(made)
    assert "&id" not in str(made)
    assert str(ROOT) not in str(made)


@pytest.mark.parametrize("strategy", sorted({load(p.parent.name).strategy for p in JOBS.glob("*/job.yaml")}))
def test_every_strategy_has_a_kind_or_a_reason(strategy: Any) -> None:
    from workshop_utils.launchers.kubernetes.settings import WITHOUT_KIND

    assert (strategy in KINDS) != (strategy in WITHOUT_KIND)


def test_the_rendered_files_beside_the_jobs_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wanted = rendered.rendered(Path("jobs"))
    kept = {path.relative_to(ROOT): path.read_text() for path in JOBS.glob("*/kubernetes.yaml")}
    assert kept == wanted, "run `python -m workshop_utils.launchers.kubernetes.rendered`"


def test_the_files_are_written_where_they_differ_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "jobs" / "one"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text("")
    (folder / "job.yaml").write_text("name: one\n")
    monkeypatch.setattr("sys.argv", ["rendered", str(tmp_path / "jobs")])
    rendered.main()
    assert capsys.readouterr().out == f"wrote {folder / 'kubernetes.yaml'}\n"
    rendered.main()
    assert capsys.readouterr().out == ""


def test_the_comment_names_every_file_that_the_pods_mount(make_job: MakeJob) -> None:
    job = make_job("")
    (job.folder / "model.py").write_text("width = 3\n")
    made = Kubernetes().render(job)
    volume = made.resource["spec"]["template"]["spec"]["volumes"][0]["configMap"]
    keys = [item["key"] for item in volume["items"]]
    assert keys == ["train.py", "model.py", "place.py", "checkpoints.py"]
    assert all(f"{key}" in made.comment for key in keys)
    assert f"# kubectl create configmap {job.name} " in made.comment


def test_resources_are_written_as_kubernetes_reads_them() -> None:
    job = load("mnist_single").replace(resources={"cpu": 0.5, "memory": "1GB", "gpu": 2})
    made = Kubernetes().render(job).resource["spec"]["template"]["spec"]["containers"][0]
    assert made["resources"] == {"limits": {"cpu": "500m", "memory": "1000000000", "nvidia.com/gpu": 2}}


@pytest.mark.parametrize("amount", ["2Gi", "500m", "1e3", 1, 0.5, "1.5", "12E"])
def test_an_amount_is_known(amount: object) -> None:
    assert is_quantity(amount)


@pytest.mark.parametrize("amount", ["2GB", "2 Gi", "", "Gi", True, None, "1e", "two"])
def test_what_is_no_amount_is_known_too(amount: object) -> None:
    assert not is_quantity(amount)


def test_an_image_of_the_job_comes_before_that_of_the_place() -> None:
    def image(job: TrainingJob, **settings: Any) -> str:
        found = Kubernetes(**settings).render(job).resource["spec"]["template"]["spec"]["containers"][0]
        return str(found["image"])

    job = load("mnist_single")
    assert image(job) == "workshop-horovod:cpu"
    assert image(job, image="mine:1") == "mine:1"
    assert image(job.replace(image="jobs:2"), image="mine:1") == "jobs:2"


# What travels


def test_small_data_travels_in_a_config_map_and_large_data_is_refused(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("")
    code, content = files.config_maps(job, with_data=True)
    assert code["data"]["train.py"] == job.script_path.read_text()
    assert sorted(content["binaryData"]) == [
        "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte", "train-images-idx3-ubyte", "train-labels-idx1-ubyte",
    ]  # fmt: skip
    for described in (code, content):
        check.body(described)
    large = tmp_path / "large"
    large.mkdir()
    for path in Path(job.data).iterdir():
        (large / path.name).write_bytes(path.read_bytes())
    count = 300_000
    images, labels = (count, 2, 2), (count,)
    write_idx(large / "train-images-idx3-ubyte", images, bytes(4 * count))
    write_idx(large / "train-labels-idx1-ubyte", labels, bytes(count))
    with pytest.raises(JobError, match=r"a ConfigMap holds 1 MiB: put it on a volume"):
        files.config_maps(job.replace(data=str(large)), with_data=True)


# What is wrong with a manifest, by its path


def changed(name: str, path: str, value: Any, **settings: Any) -> dict[str, Any]:
    """The resource of a job with one field set; a path ends in the field's name."""
    found = resource_of(name, **settings)
    at: Any = found
    *parents, last = path.split(".")
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[last] = value
    return found


CONTAINER = f"{POD}.containers.0"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{CONTAINER}.imagee", "x", f"{POD}.containers[0].imagee: unknown field; did you mean image?"),
        (f"{CONTAINER}.image", 1, f"{POD}.containers[0].image is 1; it must be a text; put it in quotes"),
        (f"{CONTAINER}.command", "python", f"{POD}.containers[0].command is 'python'; it must be a list"),
        (f"{CONTAINER}.args", [1], f"{POD}.containers[0].args[0] is 1; it must be a text; put it in quotes"),
        (f"{CONTAINER}.env", None, f"{POD}.containers[0].env has no value"),
        (f"{CONTAINER}.env", [{"value": "x"}], f"{POD}.containers[0].env[0].name is missing"),
        (f"{CONTAINER}.resources.limits.memory", "2GB", "limits.memory is '2GB'; it must be an amount"),
        (f"{CONTAINER}.resources.limit", {}, "resources.limit: unknown field; did you mean limits?"),
        (f"{POD}.containers", [], None),
        ("spec.tfReplicaSpecs.Worker.replicas", "2", "replicas is '2'; it must be a whole number"),
        ("spec.tfReplicaSpecs.Worker.replicas", True, "replicas is True; it must be a whole number"),
        (
            "spec.runPolicy.cleanPodsPolicy",
            "All",
            "cleanPodsPolicy: unknown field; did you mean cleanPodPolicy?",
        ),
        ("spec.enableDynamicWorker", "yes", "enableDynamicWorker is 'yes'; it must be true or false"),
        ("metadata.lables", {}, "metadata.lables: unknown field; did you mean labels?"),
        ("kind", "TFjob", "apiVersion and kind are 'kubeflow.org/v1' and 'TFjob'; they must be one of"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(path: str, value: Any, message: str | None) -> None:
    said = list(check.problems_of(changed("mnist_multi_worker_mirrored", path, value)))
    assert len(said) == (0 if message is None else 1)
    assert message is None or message in said[0]


@pytest.mark.parametrize(
    ("name", "settings", "path", "value", "message"),
    [
        ("mnist_mpi", {}, "spec.slotsPerWorkers", 1, "did you mean slotsPerWorker?"),
        ("mnist_mpi", {}, "spec.mpiReplicaSpecs.Worker.template.spec.nodeselector", {}, "did you mean nodeSelector?"),
        ("mnist_torch_ddp", {"kind": "TrainJob"}, "spec.trainer.numNode", 1, "did you mean numNodes?"),
        ("mnist_torch_ddp", {"kind": "TrainJob"}, "spec.trainer.numNodes", "2", "it must be a whole number"),
        ("mnist_torch_ddp", {"elastic": ELASTIC}, "spec.elasticPolicy.minReplica", 1, "did you mean minReplicas?"),
        ("mnist_single", {}, "spec.template.spec.volumes.0.configMapp", {}, "did you mean configMap?"),
    ],
)  # fmt: skip
def test_each_kind_has_a_table(
    name: str, settings: dict[str, Any], path: str, value: Any, message: str
) -> None:
    said = list(check.problems_of(changed(name, path, value, **settings)))
    assert len(said) == 1
    assert message in said[0]


TRAIN = {"kind": "TrainJob"}


@pytest.mark.parametrize(
    ("name", "settings", "path", "value", "message"),
    [
        (
            "mnist_parameter_server",
            {},
            "metadata.name",
            "1st",
            "metadata.name is '1st'; it must be lower-case",
        ),
        ("mnist_parameter_server", {}, "spec.tfReplicaSpecs.Chief.replicas", 2, "at most one may be"),
        (
            "mnist_parameter_server",
            {},
            "spec.tfReplicaSpecs.Server",
            {"template": {}},
            "Server: unknown role",
        ),
        ("mnist_parameter_server", {}, f"{CONTAINER}.name", "tf", "none is named 'tensorflow'"),
        ("mnist_parameter_server", {}, f"{CONTAINER}.image", "", "containers[0].image is missing"),
        ("mnist_parameter_server", {}, "spec.tfReplicaSpecs.PS.restartPolicy", "No", "restartPolicy is 'No'"),
        ("mnist_parameter_server", {}, "spec.runPolicy.cleanPodPolicy", "Yes", "cleanPodPolicy is 'Yes'"),
        ("mnist_parameter_server", {}, "spec.tfReplicaSpecs", {}, "spec.tfReplicaSpecs is empty"),
        ("mnist_torch_ddp", {}, "spec.pytorchReplicaSpecs.Master.replicas", 2, "there must be 1"),
        ("mnist_torch_ddp", {}, "spec.pytorchReplicaSpecs.Worker.replicas", 0, "there must be at least 1"),
        (
            "mnist_torch_ddp",
            {"elastic": ELASTIC},
            "spec.pytorchReplicaSpecs",
            {},
            "an elasticPolicy needs it",
        ),
        ("mnist_mpi", {}, "spec.mpiReplicaSpecs.Launcher.replicas", 2, "there must be 1"),
        ("mnist_mpi", {}, "spec.mpiReplicaSpecs.Worker.replicas", 0, "there must be at least 1"),
        ("mnist_mpi", {}, "spec.mpiReplicaSpecs.Worker.restartPolicy", "Always", "one of OnFailure, Never"),
        ("mnist_mpi", {}, "spec.mpiReplicaSpecs", {}, "Launcher is missing"),
        ("mnist_mpi", {}, "metadata.name", "a" * 60, "would have more than 63 characters"),
        ("mnist_mpi", {}, "spec.mpiImplementation", "Open", "mpiImplementation is 'Open'"),
        ("mnist_mpi", {}, "spec.runPolicy.backoffLimit", -1, "must not be less than 0"),
        (
            "mnist_torch_ddp",
            TRAIN,
            "spec.trainer.env",
            [{"name": "PET_NNODES", "value": "2"}],
            "sets it itself",
        ),
        ("mnist_torch_ddp", TRAIN, "spec.trainer.numNodes", 0, "there must be at least 1"),
    ],
)
def test_what_only_an_operator_knows_is_checked_too(
    name: str, settings: dict[str, Any], path: str, value: Any, message: str
) -> None:
    assert list(rules.problems_of(resource_of(name, **settings))) == []
    assert message in "\n".join(rules.problems_of(changed(name, path, value, **settings)))


def test_a_runtime_that_the_trainer_would_not_use_is_refused() -> None:
    runtime = copy.deepcopy(Kubernetes(kind="TrainJob").render(load("mnist_torch_ddp")).before[0])
    replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    del replicated["template"]["metadata"]
    replicated["template"]["spec"]["template"]["spec"]["containers"][0]["name"] = "trainer"
    said = "\n".join(rules.problems_of(runtime))
    assert "without it the trainer starts nothing" in said
    assert "no container is named 'node'" in said


@pytest.mark.parametrize("text", ["a: [", "", "- 1\n", "kind: TFJob\n"])
def test_a_text_that_is_no_manifest_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(JobError):
        manifest.read(text)


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
    assert [pod.name for pod in pods] == [
        f"mnist-torch-ddp-{name}" for name in ("master-0", "worker-0", "worker-1")
    ]
    assert [pod.variables["RANK"] for pod in pods] == ["0", "1", "2"]
    assert {pod.variables["WORLD_SIZE"] for pod in pods} == {"3"}
    assert {pod.variables["MASTER_ADDR"] for pod in pods} == {"mnist-torch-ddp-master-0"}
    assert {pod.variables["MASTER_PORT"] for pod in pods} == {"23456"}
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


# The resources' own schemas


@needs_schemas
@pytest.mark.parametrize(("job", "settings"), list(each_manifest()))
def test_the_resources_own_schemas_accept_what_is_rendered(job: TrainingJob, settings: Settings) -> None:
    for described in yaml.safe_load_all(str(manifest.build(job, settings))):
        schema = schema_of(described)
        if schema is not None:
            jsonschema.Draft202012Validator(schema).validate(described)
