"""Figures of lesson 12 agree with what the manifests say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes
from workshop_utils.launchers.kubernetes.operators import pods_of
from workshop_utils.plots import kubernetes as figures

matplotlib.use("Agg")

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.fixture(autouse=True)
def _no_figure_is_left() -> Iterator[None]:
    yield
    plt.close("all")


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


@pytest.mark.parametrize("name", figures.DRAWINGS)
def test_every_drawing_is_drawn_and_has_a_title(name: str) -> None:
    assert name.startswith("12_")
    assert len(words(figures.DRAWINGS[name]())[0]) > 20


def test_both_planes_are_drawn_and_each_of_the_five_steps_has_its_number() -> None:
    said = words(figures.planes())
    assert {"control plane", "data plane"} <= set(said)
    assert sorted(text for text in said if text.isdecimal()) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("kind", "job", "workers"),
    [
        ("TFJob", "mnist_parameter_server", 2),
        ("PyTorchJob", "mnist_torch_ddp", 2),
        ("TrainJob", "mnist_torch_ddp", 2),
    ],
)
def test_the_pods_of_a_kind_are_those_that_its_operator_makes(kind: str, job: str, workers: int) -> None:
    wanted = TrainingJob.load(JOBS / job).replace(workers=workers)
    made = pods_of(Kubernetes(kind=kind).render(wanted))
    drawn = [name.partition(" ")[0] for name, _ in figures.KINDS[kind][0]]
    assert [pod.name.removeprefix(f"{wanted.name}-") for pod in made] == drawn
    told = figures.KINDS[kind][1].replace(",", " ").split()
    for name in told:
        assert any(variable.startswith(name.rstrip("…")) for variable in made[0].variables)
