"""TorchX, for real where it can be: its own environment, torchrun's processes, etcd; and a cluster that is played."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import MakeJob, Watch
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes
from workshop_utils.launchers.places import place
from workshop_utils.launchers.sagemaker import SageMaker
from workshop_utils.launchers.settings import PlaceSettings
from workshop_utils.launchers.spark.settings import Settings as SparkSettings
from workshop_utils.launchers.torchx import TorchX, etcd, launcher
from workshop_utils.launchers.torchx.launcher import ENVIRONMENT
from workshop_utils.launchers.torchx.run import NodeLog, TorchXRun
from workshop_utils.runs import RunFailed, RunState

pytestmark = pytest.mark.usefixtures("nothing_is_left")

ALL_REDUCE = """
    import torch
    import torch.distributed as dist
    from workshop_utils import place

    here = place.here()
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    print("hello from", here.name, "of", here.world_size)
    place.report(step=1, loss=total.item())
    dist.barrier()
    dist.destroy_process_group()
"""
# What each rank does is on its command line: "1:fail" makes rank 1 fail.
PLAIN = """
    import os, sys, time
    from workshop_utils import place

    here = place.here()
    rank, what = sys.argv[2].split(":")
    first = place.restart_count() == 0
    print("ready", os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"], flush=True)
    if what != "nothing" and here.rank == int(rank) and first:
        print("disk full", file=sys.stderr, flush=True)
        if what == "fail":
            sys.exit(3)
        if what == "kill":
            os.kill(os.getpid(), 9)
    if what != "nothing" and first:
        time.sleep(1000)
    place.report(step=1, loss=here.rank + 0.5)
"""


@pytest.fixture
def make(make_job: MakeJob) -> Callable[..., TrainingJob]:
    def make(script: str = PLAIN, what: str = "0:nothing", **fields: Any) -> TrainingJob:
        values = {"strategy": "torch_ddp", "workers": 2, "timeout": "4min", "arguments": {"what": what}}
        return make_job(script, **{**values, **fields})

    return make


def until(run: TorchXRun, text: str) -> None:
    assert any(text in line.text for line in run.logs(follow=True)), run.reason


# Rendering


def test_the_application_is_one_torchrun_a_node(make: Callable[..., TrainingJob]) -> None:
    job = make(workers=6, arguments={"what": "it's"}, resources={"cpu": 2, "memory": "1Gi"})
    rendered = TorchX(processes_per_node=2, max_restarts=1).render(job)
    assert yaml.safe_load(str(rendered)) == rendered.application
    assert "null" not in str(rendered)
    (role,) = rendered.application["roles"]
    assert (role["num_replicas"], role["entrypoint"]) == (3, "bash")
    assert role["resource"] == {"cpu": 4, "gpu": 0, "memMB": 2147}
    words = role["args"][1].split()
    assert words[:4] == ["exec", "torchrun", "--nnodes=3", "--nproc-per-node=2"]
    assert {"--max-restarts=1", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"} <= set(words)
    assert words[-1] == """'it'"'"'s'"""
    nodes = rendered.request["role_params"]["worker"]
    assert len(nodes) == 3
    assert all("localhost}:" in node["args"][2] for node in nodes)


def test_the_volcano_job_of_a_cluster_starts_all_nodes_or_none(make: Callable[..., TrainingJob]) -> None:
    job = make(name="bert", workers=2, image="me/mine:1")
    rendered = TorchX(scheduler="kubernetes", queue="training", node_selector={"pool": "a"}).render(job)
    described = yaml.safe_load(str(rendered))
    assert described == rendered.request
    assert "null" not in str(rendered)
    name, spec = described["metadata"]["name"], described["spec"]
    assert name.startswith("bert-")
    assert (spec["queue"], spec["minAvailable"], spec["schedulerName"]) == ("training", 2, "volcano")
    assert {policy["event"]: policy["action"] for policy in spec["policies"]} == {
        "PodFailed": "TerminateJob",
        "PodEvicted": "TerminateJob",
    }
    first, second = (task["template"]["spec"] for task in spec["tasks"])
    # On the first node itself its name is known before the pod's service is.
    assert "${TORCHX_RANK0_HOST:=localhost}:29500" in first["containers"][0]["command"][2]
    assert "${VC_WORKER_0_HOSTS:=localhost}:29500" in second["containers"][0]["command"][2]
    assert first["nodeSelector"] == {"pool": "a"}
    assert first["activeDeadlineSeconds"] == 240
    assert first["containers"][0]["image"] == "me/mine:1"
    volumes = {volume["name"]: volume for volume in first["volumes"]}
    assert volumes["job"]["configMap"]["name"] == name
    assert volumes["data"]["configMap"]["name"] == f"{name}-data"
    assert {mount["name"] for mount in first["containers"][0]["volumeMounts"]} == set(volumes)


@pytest.mark.parametrize(
    ("instance", "neuron", "efa"), [("trn1.32xlarge", "16", "8"), ("trn1.2xlarge", "1", None)]
)
def test_a_trainium_node_is_a_whole_instance(
    make: Callable[..., TrainingJob], instance: Any, neuron: str, efa: str | None
) -> None:
    settings = TorchX(
        scheduler="kubernetes",
        instance_type=instance,
        processes_per_node=2,
        rendezvous="etcd-v2",
        rendezvous_endpoint="etcd-server:2379",
        max_restarts=3,
        data_claim="fsx",
        volumes={"/data": "fsx"},
        wrapper="neuron_parallel_compile --num_parallel 4",
    )
    job = make(workers=4, environment={"XLA_DOWNCAST_BF16": "1"})
    pod = settings.render(job).request["spec"]["tasks"][1]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["aws.amazon.com/neuron"] == neuron
    assert container["resources"]["limits"].get("vpc.amazonaws.com/efa") == efa
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": instance}
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["XLA_DOWNCAST_BF16"] == "1"
    assert variables.get("FI_PROVIDER") == ("efa" if efa else None)
    words = container["command"][2].split()
    assert words[1:5] == ["neuron_parallel_compile", "--num_parallel", "4", "torchrun"]
    assert "--rdzv-endpoint=etcd-server:2379" in words
    # One volume for one claim: a pod that names it twice may wait for it for ever.
    claims = [volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"] if mount["name"] in claims}
    assert len(claims) == 1
    assert (mounts["/data"]["readOnly"], mounts["/workshop/data"]["readOnly"]) == (False, True)


def test_the_component_is_one_for_torchx_itself_too(tmp_path: Path) -> None:
    component = f"{Path(launcher.__file__).with_name('components.py')}:ddp"
    words = ["run", "--dryrun", "--workspace", "", "-s", "kubernetes", "-cfg", "queue=test", component]
    shown = ENVIRONMENT.run(
        "torchx", *words, "--script", "x.py", "--nodes", "2", "--env", "A=b", folder=tmp_path
    )
    assert "kind: Job" in shown
    assert "--nnodes=2" in shown
    listed = ENVIRONMENT.run("torchx", "run", "-s", "local_cwd", component, "--help", folder=tmp_path)
    assert "such as neuron_parallel_compile" in " ".join(listed.split())


# What is refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scheduler": "slurm"}, "it must be one of 'local_cwd' or 'kubernetes'"),
        ({"rendezvous": "etcd-v2"}, "rendezvous_endpoint is missing"),
        ({"rendezvous_endpoint": "a:1"}, "with rendezvous 'c10d' the first node is it"),
        ({"rendezvous": "etcd", "rendezvous_endpoint": "etcd"}, "it must be host:port"),
        ({"queue": "training"}, "queue is for scheduler 'kubernetes'"),
        ({"scheduler": "kubernetes", "instance_type": "trn9.huge"}, "instance_type is 'trn9.huge'"),
        ({"scheduler": "kubernetes", "volumes": {"data": "fsx"}}, "must be a path in the container"),
        ({"scheduler": "kubernetes", "volumes": {"/a": "fsx", "/b": "fsx"}}, "names the same claim twice"),
        ({"que": "training"}, "did you mean queue?"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as refused:
        TorchX(**settings)
    assert said in str(refused.value)


def test_jobs_that_torchrun_cannot_start_are_refused(make: Callable[..., TrainingJob]) -> None:
    with pytest.raises(JobError, match="strategy is 'horovod'; TorchX starts workers with torchrun"):
        TorchX().render(make(strategy="horovod"))
    with pytest.raises(JobError, match="workers is 3; it must be a multiple of processes_per_node, 2"):
        TorchX(processes_per_node=2).launch(make(workers=3))
    with pytest.raises(JobError, match="it may have at most 37 characters"):
        TorchX(scheduler="kubernetes").render(make(name="a" * 38))


def test_without_torchrun_the_message_says_where_it_comes_from(
    make: Callable[..., TrainingJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(JobError, match="there is no torchrun on the PATH; it comes with PyTorch"):
        TorchX().launch(make())


@pytest.mark.parametrize("kind", [TorchX, Kubernetes, SageMaker, SparkSettings])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no file"),
        ("a: [", "is not readable as YAML"),
        ("- a", "must hold settings such as"),
        ("1: a", "must hold settings such as"),
        ("nonsense: 1", "unknown field"),
    ],
)
def test_every_place_yaml_is_read_alike(
    kind: type[PlaceSettings], text: str | None, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "place.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(JobError) as refused:
        kind.load(file)
    assert said in str(refused.value)
    assert str(file) in str(refused.value)


def test_it_is_a_place_of_the_command_line(make: Callable[..., TrainingJob], tmp_path: Path) -> None:
    job = make(name="seen")
    config = tmp_path / "place.yaml"
    config.write_text("scheduler: kubernetes\nqueue: training\n")
    words = ["launch", str(job.folder / "job.yaml"), "--on", "torchx", "--config", str(config), "--render"]
    job.save(job.folder)
    shown = CliRunner().invoke(cli.app, words)
    assert shown.exit_code == 0, shown.output
    assert "kind: Job" in shown.output
    assert "queue: training" in shown.output
    assert isinstance(place("torchx"), TorchX)
    with pytest.raises(JobError, match="--output is for local runs"):
        place("torchx", output=tmp_path)


# Real processes


def test_two_nodes_meet_by_c10d_and_train_together(
    make: Callable[..., TrainingJob], nothing_is_left: Path
) -> None:
    with TorchX().launch(make(ALL_REDUCE, arguments={})) as run:
        run.wait(240)
    assert run.state is RunState.SUCCEEDED
    assert run.handle is not None
    assert run.handle.startswith("local_cwd://workshop/job-1-")
    assert sorted(run.metrics["loss"]) == [3, 3]
    assert {line.worker: line.text for line in run.logs() if line.text.startswith("hello")} == {
        "worker-0": "hello from worker-0 of 2",
        "worker-1": "hello from worker-1 of 2",
    }
    assert list(nothing_is_left.iterdir()) == []  # neither torchrun's folders nor TorchX's


@pytest.mark.skipif(not etcd.is_installed(), reason="there is no etcd on this machine (Debian: etcd-server)")
def test_two_nodes_meet_by_etcd_which_is_gone_afterwards(
    make: Callable[..., TrainingJob], watch: Watch
) -> None:
    with etcd.server() as endpoint:
        assert any("etcd" in command for command in watch.marked_processes().values())
        settings = TorchX(rendezvous="etcd-v2", rendezvous_endpoint=endpoint)
        run = settings.launch(make()).wait(240)
    assert sorted(run.metrics["rank"]) == [0, 1]
    assert not any("etcd" in command for command in watch.marked_processes().values())


def test_without_etcd_the_message_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(JobError, match="Debian's package is etcd-server"), etcd.server():
        pass


def test_a_server_that_is_no_etcd_is_reported_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\necho 'flag provided but not defined: -enable-v2' >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with (
        pytest.raises(JobError, match="it has ended\n  flag provided but not defined: -enable-v2"),
        etcd.server(),
    ):
        pass


def test_a_worker_that_fails_is_named_with_its_last_lines_though_its_peer_would_wait_for_ever(
    make: Callable[..., TrainingJob],
) -> None:
    run = TorchX().launch(make(what="1:fail"))
    with pytest.raises(RunFailed) as failed:
        run.wait(240)
    assert "worker-1 (rank 1) ended with exit code 3; the others were stopped" in str(failed.value)
    # Standard output and standard error are two files of TorchX: which line came first, they do not tell.
    last = str(failed.value).partition("Its last lines:\n")[2].splitlines()
    assert {line.strip() for line in last} >= {"ready 1", "disk full"}


def test_a_worker_that_was_killed_is_started_anew_with_all_others(make: Callable[..., TrainingJob]) -> None:
    settings = TorchX(processes_per_node=2, max_restarts=1)
    run = settings.launch(make(what="1:kill")).wait(240)
    assert sorted(run.metrics["loss"]) == [0.5, 1.5]
    assert len(run.starts) >= 3  # worker-0 of the first start may have been ended before it could say so
    assert {line.worker for line in run.logs() if "exitcode: -9" in line.text} == {"node-0"}


def test_stopping_leaves_nothing(make: Callable[..., TrainingJob]) -> None:
    with TorchX(processes_per_node=2).launch(make(what="7:wait")) as run:
        until(run, "ready")
    assert run.state is RunState.STOPPED


def test_lines_that_torchrun_has_torn_are_whole_again() -> None:
    log = NodeLog()
    assert log.lines("[worker-0]: whole") == [(0, "whole")]
    assert log.lines("torchrun's own") == [(None, "torchrun's own")]
    assert log.lines("[worker-0]: half [worker-1]: another") == [(1, "another")]
    assert log.lines("[worker-0]: line") == [(0, "half line")]
    assert log.lines("[worker-0]: text[worker-0]: ") == [(0, "text")]
    assert log.lines("") == [(None, "")]
    assert log.lines("[worker-1]: torn[worker-0]: x") == [(0, "x")]
    assert log.rest() == [(1, "torn")]
