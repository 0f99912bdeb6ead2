"""The figure of lesson 12 agrees with what the manifests say."""

from __future__ import annotations

from pathlib import Path

import pytest

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes
from workshop_utils.launchers.kubernetes.operators import pods_of
from workshop_utils.plots import kubernetes as figures

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.mark.parametrize(
    ("kind", "job"),
    [
        ("TFJob", "mnist_parameter_server"),
        ("PyTorchJob", "mnist_torch_ddp"),
        ("TrainJob", "mnist_torch_ddp"),
    ],
)
def test_the_pods_of_a_kind_are_those_that_its_operator_makes(kind: str, job: str) -> None:
    wanted = TrainingJob.load(JOBS / job).replace(workers=2)
    made = pods_of(Kubernetes(kind=kind).render(wanted))
    drawn = [name.partition(" ")[0] for name, _ in figures.KINDS[kind][0]]
    assert [pod.name.removeprefix(f"{wanted.name}-") for pod in made] == drawn
    for name in figures.KINDS[kind][1].replace(",", " ").split():
        assert any(variable.startswith(name.rstrip("…")) for variable in made[0].variables)
