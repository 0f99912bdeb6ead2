"""The checks of lesson 12, and what its notebook says of kubectl."""

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
    assert exercises.pods_made_and_awaited((made, ...)).state == "not yet"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((4, 1), "the 4 workers alone"),
        ((6, 1), "A chief, a third role"),
        ((8, 1), "a TFJob has no launcher"),
        ((12, 1), "a chief, 2 parameter servers and 4 workers"),
        ((7, 0), "one of them runs a command that has an end"),
        ((7, 4), "the workers, which run sshd"),
        ((7, 5), "all of them; an sshd"),
        ((7, 2), "an sshd has nothing to wait for"),
    ],
)
def test_a_wrong_number_of_pods_is_told_how_one_comes_to_it(answer: tuple[int, int], message: str) -> None:
    verdict = exercises.pods_made_and_awaited(answer)
    assert verdict.state == "wrong"
    assert message in verdict.text


def by_the_operator(name: str, workers: int, index: int) -> dict[str, Any]:
    job = TrainingJob.load(ROOT / "jobs/mnist_multi_worker_mirrored").replace(name=name, workers=workers)
    found: dict[str, Any] = json.loads(pods_of(Kubernetes().render(job))[index].variables["TF_CONFIG"])
    return found


def _other_index(config: dict[str, Any]) -> object:
    return config.update(task={"type": "worker", "index": "1"})


def _from_one(config: dict[str, Any]) -> object:
    return config.update(task={"type": "worker", "index": config["task"]["index"] + 1})


def _one_address(config: dict[str, Any]) -> object:
    return config.update(cluster={"worker": config["cluster"]["worker"][0]})


def _short_names(config: dict[str, Any]) -> object:
    addresses = [address.replace(".default.svc", "") for address in config["cluster"]["worker"]]
    return config.update(cluster={"worker": addresses})


def _sorted_as_text(config: dict[str, Any]) -> object:
    return config.update(cluster={"worker": sorted(config["cluster"]["worker"])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_index, "digits-worker-1, one of 2: task is {'type': 'worker', 'index': '1'}"),
        (_from_one, "digits-worker-1, one of 2: task.index is 2; indices begin with 0"),
        (_one_address, "cluster.worker is 'digits-worker-0.default.svc:2222'; it must be a list"),
        (
            _short_names,
            "cluster.worker[0] is 'digits-worker-0:2222'; it must be 'digits-worker-0.default.svc:2222'",
        ),
        (_sorted_as_text, "cluster.worker[2] is 'other-worker-10.default.svc:2222'"),
        (lambda config: config["cluster"]["worker"].pop(), "cluster.worker has 1 addresses"),
        (lambda config: config["cluster"].update(ps=[]), "it has one role, worker"),
        (lambda config: config.pop("task"), "it must be a dictionary with cluster and task"),
    ],
)
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
    assert exercises.tf_config(lambda *_: ...).state == "not yet"


def test_an_exception_in_the_learner_s_function_is_named_with_its_line() -> None:
    def broken(name: str, workers: int, index: int) -> dict[str, Any]:
        addresses = [f"{name}-worker-{number}.default.svc:2222" for number in range(index)]
        return {"cluster": {"worker": addresses[workers]}}

    verdict = exercises.tf_config(broken)
    assert verdict.state == "wrong"
    assert "IndexError: list index out of range (line 3 of your function)" in verdict.text


def mend(manifest: dict[str, Any], steps: int) -> dict[str, Any]:
    worker = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    if steps > 0:
        worker["image"] = worker.pop("imagee")
    if steps > 1:
        worker["name"] = "pytorch"
    if steps > 2:
        worker["command"][1] = "/workshop/job/train.py"
    return manifest


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (0, "Worker.template.spec.containers[0].imagee: unknown field; did you mean image?"),
        (1, "none is named 'pytorch'"),
        (
            2,
            "pod mnist-torch-ddp-worker-0 ended with exit code 2. Its last lines:   python: can't open file",
        ),
    ],
)
@pytest.mark.usefixtures("nothing_is_left")
def test_each_mistake_that_is_left_in_the_manifest_is_named(steps: int, message: str) -> None:
    verdict = exercises.mended(lambda manifest: mend(manifest, steps))
    assert verdict.state == "wrong"
    assert message in verdict.text


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
def test_a_mended_manifest_runs() -> None:
    assert exercises.mended(lambda manifest: mend(manifest, 3)).state == "right"


def test_a_manifest_without_the_worker_is_not_mended() -> None:
    def without(manifest: dict[str, Any]) -> dict[str, Any]:
        del manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
        return manifest

    assert "it has 1 pod(s) now" in exercises.mended(without).text
    assert exercises.mended(lambda manifest: None).state == "not yet"


def test_the_notebook_s_lines_of_kubectl_are_those_of_its_job() -> None:
    notebook = nbformat.read(str(ROOT / "notebooks/12_eks_and_kubeflow.ipynb"), as_version=4)
    manifest = Kubernetes().render(TrainingJob.load(ROOT / "jobs/mnist_torch_ddp"))
    pairs = {(step.kubectl, step.python) for step in side_by_side(manifest, "jobs/mnist_torch_ddp")}
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    written = set(re.findall(r"^\| `(kubectl [^`]+)` \| `([^`]+)` \|", text, flags=re.MULTILINE))
    assert written == pairs
