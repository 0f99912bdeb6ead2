"""What is wrong with an object before a cluster sees it: by its kind's fields, and by its operator's rules.

What learners are likely to mistype is in tests/guards/bad_inputs.yaml.
"""

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


def manifest(**settings):
    return Kubernetes(**settings).render(TrainingJob.load(JOBS / "mnist_torch_ddp"))


TRAINJOB = manifest(kind="TrainJob")
OBJECTS = {
    "TrainJob": TRAINJOB.resource,
    "TrainingRuntime": TRAINJOB.before[0],
    "elastic PyTorchJob": manifest(elastic=Elastic(min_workers=1, max_workers=3)).resource,
}


@pytest.mark.parametrize(
    ("name", "path", "value", "problem"),
    [
        ("TrainJob", "spec.trainer.numNodes", "2", "spec.trainer.numNodes is '2'; it must be a whole number"),
        ("TrainJob", "spec.trainer.unknownField", 1, "spec.trainer.unknownField: unknown field; the fields are"),
        ("TrainingRuntime", "spec.template", {}, "spec.template is {}; it must not be empty"),
        ("TrainingRuntime", "spec.mlPolicy.torch.unknownField", 1, "spec.mlPolicy.torch.unknownField: unknown"),
        ("elastic PyTorchJob", "spec.elasticPolicy.unknownField", 1, "spec.elasticPolicy.unknownField: unknown"),
    ],
)  # fmt: skip
def test_what_is_rendered_would_be_taken_and_a_wrong_field_of_it_is_named(name, path, value, problem):
    check.require(OBJECTS[name])
    (found,) = check.problems_of(changed(OBJECTS[name], path, value))
    assert found.startswith(problem)


def test_everything_that_is_wrong_is_said_at_once():
    wrong = yaml.safe_load((EKS / "clusters" / "gpu.yaml").read_text())
    wrong["managedNodeGroups"][0]["minSize"] = "1"
    wrong["managedNodeGroups"][1]["efaEnabeld"] = True
    del wrong["metadata"]["region"]
    with pytest.raises(JobError) as refused:
        check.require(wrong)
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize(("amount", "is_one"), [
    ("2Gi", True), ("500m", True), ("1e3", True), (0.5, True), ("12E", True),
    ("2GB", False), ("2 Gi", False), (-1, False), ("", False), ("Gi", False), (True, False), ("1e", False),
])  # fmt: skip
def test_an_amount_is_what_kubernetes_can_read(amount, is_one):
    assert check.is_quantity(amount) is is_one


@pytest.mark.parametrize("path", sorted(EKS.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_object_of_the_cluster_s_files_would_be_taken(path):
    for described in yaml.safe_load_all(re.sub(r"\$\{\w+\}", "x", path.read_text())):
        if path.name not in ("kustomization.yaml", "place.yaml", "place-gpu.yaml"):  # kustomize's, and ours
            check.require(described)
