"""What is found wrong with an object before a cluster sees it: by its kind's fields, and by its operator's rules.

What learners are likely to mistype is in tests/guards/bad_inputs.yaml.
"""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml
from kubernetes_api import changed

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes, check
from workshop_utils.launchers.kubernetes.settings import Elastic

JOBS = Path(__file__).parents[2] / "jobs"
EKS = JOBS / "clusters" / "eks"


def rendered(name, **settings):
    return Kubernetes(**settings).render(TrainingJob.load(JOBS / name))


def read(path):
    return yaml.safe_load(path.read_text())


# A copy of each without the same part twice, so that a change of one changes no other.
SAMPLES = {
    name: json.loads(json.dumps(described))
    for name, described in {
        "Job": rendered("mnist_single").resource,
        "TFJob": rendered("mnist_parameter_server").resource,
        "PyTorchJob": rendered("mnist_torch_ddp").resource,
        "Elastic": rendered("digits_resumable", elastic=Elastic(min_workers=1, max_workers=3)).resource,
        "MPIJob": rendered("mnist_mpi").resource,
        "TrainJob": rendered("mnist_torch_ddp", kind="TrainJob").resource,
        "Runtime": rendered("mnist_torch_ddp", kind="TrainJob").before[0],
        "Volcano": read(JOBS / "bert_pretraining" / "trainium" / "volcano.yaml"),
        "Queue": read(EKS / "queue.yaml"),
        "Cluster": read(EKS / "clusters" / "gpu.yaml"),
    }.items()
}
# Maps with free names, in which a misspelled one cannot be known.
FREE = {"labels", "annotations", "limits", "requests", "tags", "nodeSelector", "plugins", "torch", "emptyDir"}
FREE |= {"tfReplicaSpecs", "pytorchReplicaSpecs", "mpiReplicaSpecs"}


def objects_in(value, path=""):
    """Every object with fields in `value`, with its path."""
    if isinstance(value, dict):
        if path.rpartition(".")[2] not in FREE:
            yield path, value
        for name, each in value.items():
            if name != "attachPolicy":  # it is AWS's, and all of it is free
                yield from objects_in(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from objects_in(each, f"{path}[{index}]")


@pytest.mark.parametrize("name", SAMPLES)
def test_a_field_that_there_is_not_is_found_wherever_it_stands(name):
    described = copy.deepcopy(SAMPLES[name])
    check.require(described)
    for path, inner in objects_in(described):
        inner["unknownField"] = 1
        (problem,) = check.problems_of(described)
        assert problem.startswith(f"{path}.unknownField: unknown field; ".removeprefix("."))
        del inner["unknownField"]


GROUP = "managedNodeGroups.1"


@pytest.mark.parametrize(
    ("name", "path", "value", "said"),
    [
        ("TrainJob", "spec.trainer.numNodes", "2", " is '2'; it must be a whole number"),
        ("Runtime", "spec.template", {}, " is {}; it must not be empty"),
        ("Queue", "spec.type", "x" * 254, f" is {'x' * 254!r}; it must have at most 253 characters"),
        ("Elastic", "spec.pytorchReplicaSpecs", {}, " is {}; it must not be empty"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_by_its_path_with_what_would_be_right(name, path, value, said):
    wrong = changed(SAMPLES[name], path, value)
    assert check.problems_of(wrong) == [re.sub(r"\.(\d+)", r"[\1]", path) + said]


def test_a_name_from_which_a_pod_s_would_be_too_long_is_refused():
    (problem,) = check.problems_of(changed(SAMPLES["MPIJob"], "metadata.name", "a" * 60))
    assert "would have more than 63 characters" in problem


def test_everything_that_is_wrong_is_said_at_once():
    wrong = changed(SAMPLES["Cluster"], f"{GROUP}.efaEnabeld", True)
    wrong["managedNodeGroups"][0]["minSize"] = "1"
    del wrong["metadata"]["region"]
    with pytest.raises(JobError) as refused:
        check.require(wrong)
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize(("amount", "is_one"), [
    ("2Gi", True), ("500m", True), ("1e3", True), (0.5, True), ("12E", True),
    ("2GB", False), ("2 Gi", False), ("", False), ("Gi", False), (True, False), ("1e", False),
])  # fmt: skip
def test_an_amount_is_what_kubernetes_can_read(amount, is_one):
    assert check.is_quantity(amount) is is_one


@pytest.mark.parametrize("path", sorted(EKS.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_object_of_the_cluster_s_files_would_be_taken(path):
    for described in yaml.safe_load_all(path.read_text()):
        if path.name not in ("kustomization.yaml", "place.yaml"):  # kustomize's own, and the workshop's
            check.require(described)
