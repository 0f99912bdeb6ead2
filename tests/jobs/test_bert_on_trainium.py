"""The BERT job on Trainium, as far as it can be tried without: what would be sent, and that all its parts fit."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.torchx import TorchX
from workshop_utils.scaling.catalogue import instance

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "bert_pretraining"
TRAINIUM = JOB / "trainium"
EKS = ROOT / "jobs" / "clusters" / "eks"
VOLCANO = ("volcano.yaml", "volcano-precompile.yaml")


def objects(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def eks() -> Iterator[dict[str, Any]]:
    for path in sorted(EKS.rglob("*.yaml")):
        yield from objects(path)


def pod(name: str, index: int = 0) -> dict[str, Any]:
    (described,) = objects(TRAINIUM / name)
    return dict(described["spec"]["tasks"][index]["template"]["spec"])


@pytest.fixture(scope="module")
def render() -> ModuleType:
    specification = importlib.util.spec_from_file_location("render_trainium", TRAINIUM / "render.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", VOLCANO)
def test_the_files_are_what_torchx_would_send(render: ModuleType, name: str) -> None:
    assert (TRAINIUM / name).read_text(encoding="utf-8") == render.rendered(name)


@pytest.mark.parametrize("name", VOLCANO)
def test_a_pod_takes_a_whole_machine_with_all_its_chips_and_interfaces(name: str) -> None:
    for index in (0, 1):
        described = pod(name, index)
        limits = described["containers"][0]["resources"]["limits"]
        assert (limits["aws.amazon.com/neuron"], limits["vpc.amazonaws.com/efa"]) == ("16", "8")
        assert described["nodeSelector"] == {"node.kubernetes.io/instance-type": "trn1.32xlarge"}
        command = described["containers"][0]["command"][2]
        for words in ("--nnodes=2", "--nproc-per-node=32", "--rdzv-backend=etcd-v2", "--max-restarts=3"):
            assert words in command


def test_queue_meeting_point_claim_and_instances_are_those_of_the_cluster() -> None:
    by_kind: dict[str, list[str]] = {}
    for described in eks():
        if "metadata" in described:
            by_kind.setdefault(described["kind"], []).append(described["metadata"]["name"])
    (volcano,) = objects(TRAINIUM / "volcano.yaml")
    assert volcano["spec"]["queue"] in by_kind["Queue"]
    (host,) = re.findall(r"--rdzv-endpoint=([\w-]+):2379", pod("volcano.yaml")["containers"][0]["command"][2])
    assert host in by_kind["Service"]
    prepare = objects(TRAINIUM / "prepare.yaml")[0]["spec"]["template"]["spec"]
    for described in (pod("volcano.yaml"), pod("volcano-precompile.yaml"), prepare):
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in described["volumes"]
            if "persistentVolumeClaim" in volume
        ]
        assert len(claims) == 1
        assert claims[0] in by_kind["PersistentVolumeClaim"]
    (cluster,) = objects(EKS / "clusters" / "trainium.yaml")
    groups = {group["instanceType"]: group["desiredCapacity"] for group in cluster["managedNodeGroups"]}
    assert groups["trn1.32xlarge"] == len(volcano["spec"]["tasks"]) == 2


def test_the_ranks_are_as_many_as_there_are_cores() -> None:
    job, place = TrainingJob.load(JOB / "trainium.yaml"), TorchX.load(TRAINIUM / "place.yaml")
    assert place.processes_per_node == instance("trn1.32xlarge").accelerators
    assert place.nodes(job) == 2
    given = job.arguments
    assert job.workers * int(given["batch-size"]) * int(given["grad-accumulation"]) == 32_768


def test_the_graphs_that_are_compiled_before_are_those_of_the_training() -> None:
    training, before = TrainingJob.load(JOB / "trainium.yaml"), TrainingJob.load(JOB / "precompile.yaml")
    ours, theirs = dict(training.arguments), dict(before.arguments)
    assert theirs.pop("steps-this-run") == 10
    assert ours.pop("checkpoint-steps") == 50
    assert ours == theirs
    assert (training.workers, training.image) == (before.workers, before.image)
    for name in ("NEURON_CC_FLAGS", "XLA_TRANSFER_SEED_ASYNC"):
        assert training.environment[name] == before.environment[name]
    command = pod("volcano-precompile.yaml")["containers"][0]["command"][2]
    assert command.startswith("exec neuron_parallel_compile torchrun ")
    places = [TorchX.load(TRAINIUM / name) for name in ("place.yaml", "place-precompile.yaml")]
    assert places[1].model_dump() == {**places[0].model_dump(), "wrapper": "neuron_parallel_compile"}


@pytest.mark.parametrize("name", VOLCANO)
def test_by_hand_every_file_that_a_pod_mounts_is_made(name: str) -> None:
    text = (TRAINIUM / name).read_text(encoding="utf-8")
    made = re.findall(r"--from-file=(\S+)", text)
    assert all((ROOT / path).is_file() for path in made)
    (mounted,) = [volume["configMap"] for volume in pod(name)["volumes"] if "configMap" in volume]
    assert sorted(Path(path).name for path in made) == sorted(item["key"] for item in mounted["items"])
    assert f"kubectl create configmap {mounted['name']} " in text
