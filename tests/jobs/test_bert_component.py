"""The BERT job on Trainium, as far as it can be tried without: what `torchx` would send, runs here, and its graphs."""

import _thread
import json
import re
import runpy
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from workshop_utils.launchers.kubernetes import check
from workshop_utils.setup.environments import Environment

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "bert_pretraining"
EKS = ROOT / "jobs" / "clusters" / "eks"
TORCHX = Environment("torchx", "TorchX")
RANK = """
    import os, pathlib, sys, time
    import torch.distributed as dist
    from workshop_utils import place

    dist.init_process_group("gloo")
    place.report(step=int(sys.argv[1]), loss=dist.get_rank() + 0.5)
    pathlib.Path(f"ready-{dist.get_rank()}").touch()
    time.sleep(float(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
"""

pytestmark = pytest.mark.processes


def torchx(line, folder=ROOT):
    return TORCHX.run("torchx", *line.split(), folder=folder, timeout_seconds=240)


def objects(path):
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


@pytest.fixture(scope="module")
def sent():
    """By component, the Volcano Job that would be sent, with the component's name in place of the random one."""
    sent = {}
    for component in ("train --nodes 2", "trainium", "precompile"):
        line = f"run --dryrun --workspace= -s kubernetes -cfg queue=workshop {JOB}/component.py:{component}"
        request = torchx(line).partition("=== SCHEDULER REQUEST ===")[2]
        name = yaml.safe_load(request)["metadata"]["name"]
        sent[component.split()[0]] = yaml.safe_load(request.replace(name, name.rpartition("-")[0]))
    return sent


def container(job, task=0):
    return job["spec"]["tasks"][task]["template"]["spec"]["containers"][0]


def test_the_job_for_trainium_is_the_one_that_the_repository_shows(sent):
    assert [sent["trainium"]] == objects(JOB / "trainium" / "volcano.yaml")


def test_what_is_compiled_before_differs_only_in_when_to_stop_and_what_to_keep(sent):
    training, before = (container(sent[name])["command"][-1] for name in ("trainium", "precompile"))
    for old, new in (("neuron_parallel_compile ", ""), ("precompile", "trainium")):
        before = before.replace(old, new)
    assert before.replace("--steps-this-run 10", "--checkpoint-steps 50") == training
    named = [{each["name"]: each["value"] for each in container(sent[name])["env"]} for name in sent]
    assert {"WORKSHOP_CHECKPOINTS", "WORKSHOP_MODEL"} == {*named[1]} - {*named[2]}


def test_by_default_the_nodes_meet_at_the_first_one(sent):
    commands = [container(sent["train"], task)["command"][-1] for task in (0, 1)]
    hosts = [re.search(r"--rdzv-backend=c10d --rdzv-endpoint=(\S+)", command)[1] for command in commands]
    assert hosts == ["${TORCHX_RANK0_HOST:=localhost}:29500", "${VC_WORKER_0_HOSTS:=localhost}:29500"]


def test_a_cluster_would_accept_every_job(sent):
    assert [problem for job in sent.values() for problem in check.problems_of(job)] == []


def test_queue_meeting_point_claim_and_instances_are_those_of_the_cluster(sent):
    cluster = [described for path in EKS.rglob("*.yaml") for described in objects(path)]
    named = {(each["kind"], each["metadata"]["name"]) for each in cluster if "metadata" in each}
    job = sent["trainium"]
    assert ("Queue", job["spec"]["queue"]) in named
    (host,) = re.findall(r"--rdzv-endpoint=([\w-]+):2379", container(job)["command"][-1])
    assert ("Service", host) in named
    (prepare,) = objects(JOB / "trainium" / "prepare.yaml")
    for pod in (job["spec"]["tasks"][0]["template"]["spec"], prepare["spec"]["template"]["spec"]):
        claims = [each["persistentVolumeClaim"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
        assert [("PersistentVolumeClaim", each["claimName"]) in named for each in claims] == [True]
    (cluster,) = objects(EKS / "clusters" / "trainium.yaml")
    groups = {group["instanceType"]: group["desiredCapacity"] for group in cluster["managedNodeGroups"]}
    assert groups["trn1.32xlarge"] == len(job["spec"]["tasks"]) == 2


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text("\n".join(line[4:] for line in RANK.splitlines()))
    return f"run -s local_cwd -cfg log_dir={tmp_path}/logs {JOB}/component.py:train --script train.py --"


def test_two_processes_here_report_their_metrics(script, tmp_path):
    torchx(f"{script} 7 0", tmp_path)
    logs = [file.read_text() for file in tmp_path.glob("logs/**/attempt_0/*/stdout.log")]
    records = [json.loads(line) for log in logs for line in log.splitlines() if '"metric"' in line]
    assert sorted((each["rank"], each["step"], each["loss"]) for each in records) == [
        (0, 7, 0.5),
        (1, 7, 1.5),
    ]


def test_an_interrupted_run_leaves_no_process(script, tmp_path, watch, nothing_is_left):
    def interrupt():
        if watch.eventually(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 120):
            _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        torchx(f"{script} 7 1000", tmp_path)
    thread.join()


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
