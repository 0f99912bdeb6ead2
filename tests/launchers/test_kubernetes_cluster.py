"""Launching on a cluster: an API server that answers as its script says, on loopback."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
import yaml
from conftest import MakeJob, eventually
from kubernetes import client
from kubernetes_api import ApiServer, refused

from workshop_utils import cli
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes, calls, kubectl, run
from workshop_utils.launchers.kubernetes.calls import KubernetesError, call
from workshop_utils.runs import RunFailed, RunState

METRIC = json.dumps(
    {"workshop": "metric", "worker": "worker-0", "rank": 0, "time": 1.0, "step": 3, "loss": 0.5}
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    made = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(made.write_kubeconfig(tmp_path)))
    monkeypatch.setattr(calls, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(run, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(run, "LOG_SECONDS", 5.0)
    yield made
    made.close()


@pytest.fixture
def job(make_job: MakeJob) -> TrainingJob:
    return make_job("import torch\n", name="ddp", strategy="torch_ddp", workers=2)


def pod(role: str, phase: str = "Running") -> dict[str, Any]:
    labels = {"training.kubeflow.org/replica-type": role, "training.kubeflow.org/replica-index": "0"}
    return {
        "metadata": {"name": f"ddp-{role}-0", "labels": labels},
        "spec": {"containers": [{"name": "pytorch"}]},
        "status": {"phase": phase},
    }


def condition(kind: str, message: str = "") -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": "True", "message": message}]}


def refusal(job: TrainingJob) -> str:
    with pytest.raises(KubernetesError) as raised:
        Kubernetes().launch(job)
    return str(raised.value)


def test_a_job_is_made_followed_and_deleted(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master"), pod("worker")]
    server.logs["ddp-master-0"] = [
        "2026-01-01T00:00:00.000000001Z hello",
        f"2026-01-01T00:00:01.000000000Z {METRIC}",
    ]
    server.logs["ddp-worker-0"] = ["2026-01-01T00:00:00.500000000Z here too"]
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        assert started.workers == ("worker-0", "worker-1")
        assert server.made() == ["ConfigMap ddp", "ConfigMap ddp-data", "PyTorchJob ddp"]
        objects = list(server.objects.values())
        uid = next(each["metadata"]["uid"] for each in objects if each["kind"] == "PyTorchJob")
        owners = [each["metadata"]["ownerReferences"] for each in objects if each["kind"] == "ConfigMap"]
        owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "ddp", "uid": uid}
        assert owners == [[owner], [owner]]
        started.wait(timeout_seconds=20)
        assert {str(line) for line in started.logs()} == {"[worker-0] hello", "[worker-1] here too"}
        assert started.metrics["loss"].tolist() == [0.5]
    assert server.made() == []
    assert any("fieldValidation=Strict" in path for _, path in server.requests)


def test_a_failed_job_says_why_and_what_it_printed_last(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master", "Failed")]
    server.logs["ddp-master-0"] = ["2026-01-01T00:00:00.000000001Z ValueError: no"]
    server.job_status = condition("Failed", "PyTorchJob ddp has failed because 1 Master replica(s) failed.")
    with (
        Kubernetes().launch(job) as started,
        pytest.raises(RunFailed, match=r"(?s)1 Master replica.*\[worker-0\] ValueError: no"),
    ):
        started.wait(timeout_seconds=20)
    assert server.made() == []


def test_a_condition_that_does_not_say_whether_it_holds_does_not(server: ApiServer, job: TrainingJob) -> None:
    server.job_status = {"conditions": [{"type": "Failed"}, {"status": "True"}]}
    server.job_status["conditions"] += condition("Succeeded")["conditions"]
    with Kubernetes().launch(job) as started:
        assert started.wait(timeout_seconds=20).state is RunState.SUCCEEDED
        assert "Succeeded" in started.describe()
        assert "Failed" not in started.describe()


def test_a_log_that_breaks_off_goes_on_without_a_line_twice(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master")]
    stamps = [f"2026-01-01T00:00:0{second}.000000000Z" for second in range(3)]
    server.logs["ddp-master-0"] = [f"{stamps[0]} one", f"{stamps[1]} two", None, f"{stamps[2]} three"]
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        started.wait(timeout_seconds=20)
        assert [line.text for line in started.logs(worker="worker-0")] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("FailedScheduling", "0/1 nodes are available: 1 Insufficient cpu."),
        ("Failed", 'Failed to pull image "workshop-pytroch:cpu": not found'),
    ],
)
def test_a_pod_that_cannot_be_scheduled_or_whose_image_is_not_to_be_had_says_so_once(
    server: ApiServer, job: TrainingJob, reason: str, message: str
) -> None:
    server.pods = [pod("master", "Pending")]
    server.warnings = [
        {"metadata": {"name": "event"}, "involvedObject": {}, "reason": reason, "message": message}
    ]
    with Kubernetes().launch(job) as started:
        for line in started.logs(follow=True):
            assert str(line) == f"[ddp-master-0] {reason}: {message}"
            break
        described = f"PyTorchJob ddp: running\npod ddp-master-0: Pending\n  {reason}: {message}"
        assert started.describe() == described
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=0.5)
        assert len(list(started.logs())) == 1


def test_a_job_that_somebody_else_deletes_has_failed(server: ApiServer, job: TrainingJob) -> None:
    with Kubernetes().launch(job) as started:
        server.objects.clear()
        with pytest.raises(RunFailed, match="ddp is gone or cannot be seen any more"):
            started.wait(timeout_seconds=20)


@pytest.mark.parametrize(
    ("status", "message", "advice"),
    [
        (401, "Unauthorized", "the cluster does not know you: log in again"),
        (403, 'cannot create resource "pytorchjobs"', "you may not do that"),
        (404, "the server could not find the requested resource", "the operator for this kind installed?"),
        (409, 'pytorchjobs "ddp" already exists', "something of that name exists already"),
        (422, "spec.x: Required value", "does not accept the object"),
        (500, "etcd is down", "the cluster still fails"),
    ],
)
def test_a_refusal_says_what_to_do_and_leaves_nothing(
    server: ApiServer, job: TrainingJob, status: int, message: str, advice: str
) -> None:
    server.script["POST", "pytorchjobs"] = [refused(status, message)]
    said = refusal(job)
    assert said.startswith("creating PyTorchJob ddp: ")
    assert advice in said
    assert f"Kubernetes says: {message}" in said
    assert server.made() == []
    assert sum(method == "POST" and "pytorchjobs" in path for method, path in server.requests) == 1


def test_what_was_made_before_a_refusal_is_deleted_again(server: ApiServer, job: TrainingJob) -> None:
    server.script["POST", "configmaps"] = [refused(403, "no config maps")]
    assert "creating ConfigMap ddp: you may not do that" in refusal(job)
    assert any(method == "POST" and "pytorchjobs" in path for method, path in server.requests)
    assert server.made() == []


def test_a_cluster_that_fails_for_a_moment_is_asked_again(server: ApiServer, job: TrainingJob) -> None:
    server.script["POST", "pytorchjobs"] = [refused(429, "slow down")] * 2
    server.script["GET", "ddp"] = [refused(500, "leader changed"), (502, b"<html>")]
    server.script["DELETE", "ddp"] = [refused(503, "busy")]
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        started.wait(timeout_seconds=20)
    assert server.made() == []
    server.script["POST", "configmaps"] = [refused(429, "slow down")] * calls.TRIES
    assert f"asks to slow down after {calls.TRIES} tries" in refusal(job)


def test_a_job_that_cannot_be_deleted_is_not_kept_secret(server: ApiServer, job: TrainingJob) -> None:
    started = Kubernetes().launch(job)
    assert started.state is RunState.RUNNING
    server.script["DELETE", "ddp"] = [refused(403, "no")]
    with pytest.raises(KubernetesError, match="ddp could not be deleted and may still run"):
        started.stop()
    started.stop()
    assert started.state is RunState.STOPPED
    assert server.made() == []


def test_a_cluster_that_does_not_answer_is_named_as_such(server: ApiServer) -> None:
    api = calls.connect()
    server.close()
    pauses: list[float] = []
    with pytest.raises(KubernetesError, match="looking: the cluster does not answer"):
        call("looking", client.CoreV1Api(api).list_namespaced_pod, "default", sleep=pauses.append)
    assert pauses == [0.01, 0.02, 0.04, 0.08]


def test_without_a_kubeconfig_the_way_without_a_cluster_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(KubernetesError, match="kubernetes-stand-in runs the same pods on this machine"):
        calls.connect()


def test_the_ranks_of_an_mpi_job_are_told_apart_and_sshd_is_not_heard(
    server: ApiServer, make_job: MakeJob
) -> None:
    job = make_job("import mpi4py\n", name="ddp", strategy="mpi", workers=2)
    launcher, worker = pod("launcher"), pod("worker")
    launcher["metadata"]["name"] = "ddp-launcher-x7k2p"  # a Job makes it, and gives it letters of its own
    worker["spec"]["containers"][0]["command"] = ["/usr/sbin/sshd", "-De", "-o", "StrictModes=no"]
    server.pods = [launcher, worker]
    stamp = "2026-01-01T00:00:0{}.000000000Z"
    server.logs["ddp-launcher-x7k2p"] = [
        f"{stamp.format(1)} [1,0]<stdout>:one",
        f"{stamp.format(2)} [1,1]<stdout>:two",
    ]
    server.logs["ddp-worker-0"] = [f"{stamp.format(1)} Server listening on 0.0.0.0 port 22."]
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        assert started.workers == ("worker-0", "worker-1")
        started.wait(timeout_seconds=20)
        assert {str(line) for line in started.logs()} == {"[worker-0] one", "[worker-1] two"}


# The runtime of a TrainJob


def test_the_runtime_that_a_trainjob_needs_goes_with_it(server: ApiServer, job: TrainingJob) -> None:
    with Kubernetes(kind="TrainJob").launch(job):
        objects = {each["kind"]: each for each in server.objects.values()}
        owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "ddp"}
        owner["uid"] = objects["TrainJob"]["metadata"]["uid"]
        assert objects["TrainingRuntime"]["metadata"]["ownerReferences"] == [owner]
    assert server.made() == []


def test_a_runtime_that_may_not_be_given_away_is_not_left_behind(server: ApiServer, job: TrainingJob) -> None:
    server.script["PATCH", "ddp"] = [refused(403, "cannot patch trainingruntimes")]
    with pytest.raises(
        KubernetesError, match="giving TrainingRuntime ddp to TrainJob ddp: you may not do that"
    ):
        Kubernetes(kind="TrainJob").launch(job)
    assert server.made() == []


NO_RUNTIME = (
    'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.runtimeRef: Invalid value: '
    'TrainingRuntime "ddp" not found: specified trainingRuntime must be created before the TrainJob is created'
)


def test_a_trainer_that_does_not_know_the_runtime_yet_is_asked_again(
    server: ApiServer, job: TrainingJob
) -> None:
    server.script["POST", "trainjobs"] = [refused(403, NO_RUNTIME)] * 2
    with Kubernetes(kind="TrainJob").launch(job):
        assert "TrainJob ddp" in server.made()
    server.script["POST", "trainjobs"] = [refused(403, NO_RUNTIME)] * calls.TRIES
    with pytest.raises(KubernetesError, match="must be created before the TrainJob"):
        Kubernetes(kind="TrainJob").launch(job)
    assert server.made() == []


# A dry run on the server


def test_a_dry_run_asks_for_every_object_and_makes_none(server: ApiServer, job: TrainingJob) -> None:
    said = str(Kubernetes().dry_run(job))
    assert server.made() == []
    posts = [urlparse(path) for method, path in server.requests if method == "POST"]
    assert [path.path.rpartition("/")[2] for path in posts] == ["pytorchjobs", "configmaps", "configmaps"]
    for path in posts:
        query = parse_qs(path.query)
        assert (query["dryRun"], query["fieldValidation"]) == (["All"], ["Strict"])
    head, _, body = said.partition("apiVersion")
    assert head.splitlines() == [
        f"# {each}: would be made" for each in ("PyTorchJob ddp", "ConfigMap ddp", "ConfigMap ddp-data")
    ]
    answered = yaml.safe_load("apiVersion" + body)
    assert answered["metadata"]["uid"] == "none-yet"  # it is the server's answer, not ours
    assert "managedFields" not in said
    assert {**answered, "metadata": None} == {**Kubernetes().render(job).resource, "metadata": None}


def test_a_dry_run_names_each_field_that_the_server_complains_of(server: ApiServer, job: TrainingJob) -> None:
    causes = [
        {"reason": "FieldValueRequired", "message": "Required value", "field": "spec.a"},
        {"reason": "FieldValueInvalid", "message": "Invalid value: 3", "field": "spec.b[0]"},
    ]
    status, invalid = refused(422, "PyTorchJob ddp is invalid: several things")
    server.script["POST", "pytorchjobs"] = [(status, {**invalid, "details": {"causes": causes}})]
    strict = (
        'ConfigMap in version "v1" cannot be handled as a ConfigMap: strict decoding error: unknown field '
    )
    server.script["POST", "configmaps"] = [refused(400, strict + '"datta", unknown field "binary"')]
    with pytest.raises(KubernetesError) as raised:
        Kubernetes().dry_run(job)
    assert str(raised.value).splitlines() == [
        "trying PyTorchJob ddp: the cluster, or an operator, does not accept the object. Kubernetes says:",
        "  spec.a: Required value",
        "  spec.b[0]: Invalid value: 3",
        "trying ConfigMap ddp: the cluster cannot read the object as one of its kind. Kubernetes says:",
        "  datta: unknown field",
        "  binary: unknown field",
    ]


def test_a_dry_run_says_that_the_trainer_could_not_see_the_runtime(
    server: ApiServer, job: TrainingJob
) -> None:
    server.script["POST", "trainjobs"] = [refused(403, NO_RUNTIME)]
    said = str(Kubernetes(kind="TrainJob").dry_run(job))
    assert "# TrainingRuntime ddp: would be made" in said
    assert "# TrainJob ddp: fits its schema; the trainer's own check needs its runtime" in said


def test_the_command_line_asks_the_server_or_only_shows(
    server: ApiServer, job: TrainingJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.save(job.folder)

    def workshop(*options: str) -> str:
        monkeypatch.setattr("sys.argv", ["workshop", "launch", str(job.folder), "--on", *options])
        with pytest.raises(SystemExit):
            cli.main()
        said = capsys.readouterr()
        return said.out + said.err

    assert "# PyTorchJob ddp: would be made" in workshop("kubernetes", "--dry-run=server")
    asked = len(server.requests)
    assert workshop("kubernetes", "--dry-run=client") == workshop("kubernetes", "--render")
    assert "--dry-run is 'server'; local has none" in workshop("local", "--dry-run=server")
    assert len(server.requests) == asked
    server.script["POST", "pytorchjobs"] = [refused(409, 'pytorchjobs "ddp" already exists')]
    assert "workshop: trying PyTorchJob ddp: something" in workshop("kubernetes", "--dry-run=server")


# A cluster that goes and comes, and how it is found


def test_an_api_server_that_restarts_does_not_end_the_run(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master")]
    server.logs["ddp-master-0"] = ["2026-01-01T00:00:00.000000001Z hello"]
    with Kubernetes().launch(job) as started:
        assert eventually(lambda: list(started.logs()))
        port = server.http.server_port
        server.close()
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=0.5)
        asked = len(server.requests)
        server.job_status = condition("Succeeded")
        server.open(port)
        started.wait(timeout_seconds=30)
        assert len(server.requests) > asked
        assert [line.text for line in started.logs(worker="worker-0")] == ["hello"]
    assert server.made() == []


def test_a_kubeconfig_that_is_named_after_the_client_was_imported_is_used(server: ApiServer) -> None:
    api = client.CoreV1Api(calls.connect())
    call("looking", api.list_namespaced_pod, "default")
    assert server.authorizations == {"Bearer secret"}
    with pytest.raises(KubernetesError, match=r"there is no cluster to talk to.*other"):
        calls.connect(context="other")


# The same by hand


def test_every_line_of_python_does_what_it_says(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master"), pod("worker", "Pending")]
    server.logs["ddp-master-0"] = ["2026-01-01T00:00:00.000000001Z hello"]
    server.job_status = condition("Succeeded", "all is well")
    names: dict[str, Any] = {"place": Kubernetes(), "job": job}
    found: dict[str, Any] = {}
    for step in kubectl.side_by_side(Kubernetes().render(job)):
        if step.python.startswith("run = "):
            exec(step.python, names)
        else:
            found[step.what] = eval(re.sub(r"^print\((.*)\)$", r"\1", step.python), names)
        if step.what == "logs":
            found["logs"] = [line.text for line in found["logs"]]
    assert found["pods"].to_dict("list") == {
        "pod": ["ddp-master-0", "ddp-worker-0"],
        "worker": ["worker-0", "worker-1"],
        "phase": ["Running", "Pending"],
    }
    assert "  Succeeded: all is well" in found["describe"]
    assert found["logs"] == ["hello"]
    assert found["wait"].state is RunState.SUCCEEDED
    assert server.made() == []
