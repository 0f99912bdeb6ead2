"""The checks of lesson 12, beyond the wrong answers of tests/guards, and what its notebook says of kubectl."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from workshop_utils.exercises import kubernetes as exercises
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes
from workshop_utils.launchers.kubernetes.kubectl import side_by_side
from workshop_utils.launchers.kubernetes.operators import pods_of

ROOT = Path(__file__).parents[1]


def test_the_pods_that_are_counted_are_those_of_the_manifest() -> None:
    job = TrainingJob.load(ROOT / "jobs/mnist_parameter_server").replace(workers=4, parameter_servers=2)
    made = len(pods_of(Kubernetes().render(job)))
    (launcher,) = pods_of(Kubernetes().render(TrainingJob.load(ROOT / "jobs/mnist_mpi").replace(workers=4)))
    assert launcher.awaited
    assert exercises.pods_made_and_awaited((made, 1)).state == "right"
    for wrong in ((4, 1), (8, 1), (12, 1), (7, 0), (7, 2)):
        assert exercises.pods_made_and_awaited(wrong).state == "wrong"


def by_the_operator(name: str, workers: int, index: int) -> dict[str, Any]:
    job = TrainingJob.load(ROOT / "jobs/mnist_multi_worker_mirrored").replace(name=name, workers=workers)
    config: dict[str, Any] = json.loads(pods_of(Kubernetes().render(job))[index].variables["TF_CONFIG"])
    return config


def _sorted_as_text(config: dict[str, Any]) -> object:
    return config.update(cluster={"worker": sorted(config["cluster"]["worker"])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config["task"].update(index="1"), "one of 2: task is {'type': 'worker', 'index': '1'}"),
        (_sorted_as_text, "cluster.worker[2] is 'other-worker-10.default.svc:2222'"),
        (lambda config: config["cluster"]["worker"].pop(), "cluster.worker has 1 addresses"),
        (lambda config: config["cluster"].update(worker="a:1"), "cluster.worker is 'a:1'; it must be a list"),
        (lambda config: config["cluster"].update(ps=[]), "it has one role, worker"),
        (lambda config: config.pop("task"), "it must be a dictionary with cluster and task"),
    ],
)  # fmt: skip
def test_a_wrong_tf_config_is_told_where_it_differs(change: Callable[..., object], message: str) -> None:
    def wrong(name: str, workers: int, index: int) -> dict[str, Any]:
        config = by_the_operator(name, workers, index)
        change(config)
        return config

    verdict = exercises.tf_config(wrong)
    assert verdict.state == "wrong"
    assert message in verdict.text


def test_the_operator_s_own_tf_config_is_right_and_a_text_is_not() -> None:
    assert exercises.tf_config(by_the_operator).state == "right"
    assert "is a text" in exercises.tf_config(lambda *asked: json.dumps(by_the_operator(*asked))).text


def test_a_manifest_without_the_worker_is_not_mended() -> None:
    def without(manifest: dict[str, Any]) -> dict[str, Any]:
        del manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
        return manifest

    assert "it has 1 pod(s) now" in exercises.mended(without).text


def test_the_notebook_s_lines_of_kubectl_are_those_of_its_job() -> None:
    notebook = nbformat.read(str(ROOT / "notebooks/12_eks_and_kubeflow.ipynb"), as_version=4)
    manifest = Kubernetes().render(TrainingJob.load(ROOT / "jobs/mnist_torch_ddp"))
    pairs = {(step.kubectl, step.python) for step in side_by_side(manifest, "jobs/mnist_torch_ddp")}
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    written = set(re.findall(r"^\| `(kubectl [^`]+)` \| `([^`]+)` \|", text, flags=re.MULTILINE))
    assert written == pairs
