"""The BERT job on Trainium, as far as it can be tried without: what would be sent, and that all its parts fit.

What TorchX sends for it is kept in `tests/guards/rendered/options.txt`.
"""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.torchx import TorchX

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "bert_pretraining"
TRAINIUM = JOB / "trainium"
EKS = ROOT / "jobs" / "clusters" / "eks"
VOLCANO = ("volcano.yaml", "volcano-precompile.yaml")


def objects(path):
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def pod(name):
    (described,) = objects(TRAINIUM / name)
    return dict(described["spec"]["tasks"][0]["template"]["spec"])


@pytest.mark.slow
@pytest.mark.parametrize("name", VOLCANO)
def test_the_files_are_what_torchx_would_send(name):
    rendered = runpy.run_path(str(TRAINIUM / "render.py"))["rendered"]
    assert (TRAINIUM / name).read_text(encoding="utf-8") == rendered(name)


def test_queue_meeting_point_claim_and_instances_are_those_of_the_cluster():
    cluster = [described for path in EKS.rglob("*.yaml") for described in objects(path)]
    named = {(each["kind"], each["metadata"]["name"]) for each in cluster if "metadata" in each}
    (volcano,) = objects(TRAINIUM / "volcano.yaml")
    assert ("Queue", volcano["spec"]["queue"]) in named
    (host,) = re.findall(r"--rdzv-endpoint=([\w-]+):2379", pod("volcano.yaml")["containers"][0]["command"][2])
    assert ("Service", host) in named
    prepare = objects(TRAINIUM / "prepare.yaml")[0]["spec"]["template"]["spec"]
    for described in (pod("volcano.yaml"), pod("volcano-precompile.yaml"), prepare):
        (claim,) = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in described["volumes"]
            if "persistentVolumeClaim" in volume
        ]
        assert ("PersistentVolumeClaim", claim) in named
    (cluster,) = objects(EKS / "clusters" / "trainium.yaml")
    groups = {group["instanceType"]: group["desiredCapacity"] for group in cluster["managedNodeGroups"]}
    assert groups["trn1.32xlarge"] == len(volcano["spec"]["tasks"]) == 2


def test_the_graphs_that_are_compiled_before_are_those_of_the_training():
    training, before = TrainingJob.load(JOB / "trainium.yaml"), TrainingJob.load(JOB / "precompile.yaml")
    apart = {"steps-this-run", "checkpoint-steps"}  # neither is part of a graph
    ours, theirs = (
        {name: value for name, value in job.arguments.items() if name not in apart}
        for job in (training, before)
    )
    assert ours == theirs
    assert (training.workers, training.image) == (before.workers, before.image)
    for name in ("NEURON_CC_FLAGS", "XLA_TRANSFER_SEED_ASYNC"):
        assert training.environment[name] == before.environment[name]
    places = [TorchX.load(TRAINIUM / name) for name in ("place.yaml", "place-precompile.yaml")]
    assert places[1].model_dump() == {**places[0].model_dump(), "wrapper": "neuron_parallel_compile"}


def test_a_graph_holds_one_forward_pass_however_many_are_accumulated(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--layers=1", "--hidden=8", "--sequence=8", "--steps=2",
                                      "--batch-size=1", "--grad-accumulation=4"])  # fmt: skip
    script = runpy.run_path(str(JOB / "train.py"))
    given = script["options"]()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        training = script["Training"](300, 0, torch.device("cpu"), given)
        passes, graphs = [], []
        training.model.register_forward_hook(lambda *_: passes.append(1))

        def mark():
            graphs.append(len(passes))
            passes.clear()

        rows = np.full((3, given.sequence - 2), 7, np.int32)
        script["train"](training, rows, mark, given, None)
    finally:
        dist.destroy_process_group()
    # Four forward passes, each in a graph of its own, then the optimizer's step; and so in both steps.
    assert graphs == [1, 1, 1, 1, 0] * 2
    assert not passes
