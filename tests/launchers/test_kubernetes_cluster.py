"""Launching on a cluster: an API server that answers as its script says, on loopback."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import pytest
import yaml
from conftest import MakeJob, eventually
from kubernetes import client
from kubernetes_api import ApiServer, cluster, metric, refused, stamped

from workshop_utils import cli
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes, calls, kubectl
from workshop_utils.launchers.kubernetes.calls import KubernetesError, call
from workshop_utils.runs import RunFailed, RunState


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with cluster(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def job(make_job: MakeJob) -> TrainingJob:
    return make_job("import torch\n", name="ddp", strategy="torch_ddp", workers=2)


def pod(role: str, phase: str = "Running") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"ddp-{role}-0", "namespace": "default"},
        "spec": {"containers": [{"name": "pytorch"}]},
        "status": {"phase": phase},
    }


def condition(kind: str, message: str = "") -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": "True", "message": message}]}


def test_a_job_is_made_followed_and_deleted(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master"), pod("worker")]
    server.logs = {"ddp-master-0": stamped("hello", metric(0)), "ddp-worker-0": stamped("here too")}
    server.job_status = condition("Succeeded", "all is well")
    server.job_status["conditions"][:0] = [{"type": "Failed"}, {"status": "True"}]  # which say nothing
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
        assert started.pods().to_dict("list") == {
            "pod": ["ddp-master-0", "ddp-worker-0"],
            "worker": ["worker-0", "worker-1"],
            "phase": ["Running", "Running"],
        }
        assert "  Succeeded: all is well" in started.describe()
        assert "Failed" not in started.describe()
    assert server.made() == []
    assert any("fieldValidation=Strict" in path for _, path in server.requests)


def test_a_failed_job_says_why_and_what_it_printed_last(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master", "Failed")]
    server.logs["ddp-master-0"] = stamped("ValueError: no")
    server.job_status = condition("Failed", "PyTorchJob ddp has failed because 1 Master replica(s) failed.")
    said = r"(?s)1 Master replica.*\[worker-0\] ValueError: no"
    with Kubernetes().launch(job) as started, pytest.raises(RunFailed, match=said):
        started.wait(timeout_seconds=20)
    assert server.made() == []


def test_a_log_that_breaks_off_goes_on_without_a_line_twice(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master")]
    server.logs["ddp-master-0"] = stamped("one", "two", None, "three")
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        started.wait(timeout_seconds=20)
        assert [line.text for line in started.logs(worker="worker-0")] == ["one", "two", "three"]


def test_a_pod_that_cannot_be_scheduled_says_so_once(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master", "Pending")]
    reason, message = "FailedScheduling", "0/1 nodes are available: 1 Insufficient cpu."
    event = {"metadata": {"name": "event"}, "involvedObject": {}, "reason": reason, "message": message}
    server.warnings = [event]
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
    ("what", "status", "message", "said"),
    [
        ("pytorchjobs", 409, "it is there", "creating PyTorchJob ddp: something of that name exists already"),
        ("pytorchjobs", 500, "etcd is down", "creating PyTorchJob ddp: the cluster still fails"),
        ("configmaps", 403, "no config maps", "creating ConfigMap ddp: you may not do that"),
    ],
)
def test_a_refusal_says_what_to_do_and_leaves_nothing(
    server: ApiServer, job: TrainingJob, what: str, status: int, message: str, said: str
) -> None:
    server.script["POST", what] = [refused(status, message)]
    with pytest.raises(KubernetesError, match=f"^{said}.* Kubernetes says: {message}$"):
        Kubernetes().launch(job)
    assert server.made() == []
    assert sum(method == "POST" and "pytorchjobs" in path for method, path in server.requests) == 1


def test_a_cluster_that_fails_for_a_moment_is_asked_again(server: ApiServer, job: TrainingJob) -> None:
    server.script["POST", "pytorchjobs"] = [refused(429, "slow down")] * 2
    server.script["GET", "ddp"] = [refused(500, "leader changed"), (502, b"<html>")]
    server.script["DELETE", "ddp"] = [refused(503, "busy")]
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        started.wait(timeout_seconds=20)
    assert server.made() == []
    server.script["POST", "configmaps"] = [refused(429, "slow down")] * calls.TRIES
    with pytest.raises(KubernetesError, match=f"asks to slow down after {calls.TRIES} tries"):
        Kubernetes().launch(job)


def test_a_job_that_cannot_be_deleted_is_not_kept_secret(server: ApiServer, job: TrainingJob) -> None:
    started = Kubernetes().launch(job)
    assert started.state is RunState.RUNNING
    server.script["DELETE", "ddp"] = [refused(403, "no")]
    with pytest.raises(KubernetesError, match="ddp could not be deleted and may still run"):
        started.stop()
    started.stop()
    assert started.state is RunState.STOPPED
    assert server.made() == []


def test_a_job_counts_as_deleted_once_its_pods_are_gone(
    server: ApiServer, job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workshop_utils.launchers.kubernetes.cluster.GONE_SECONDS", 0.1)
    server.pods = [pod("master")]
    started = Kubernetes().launch(job)
    for name, times in (("ddp", 2), ("ddp-data", 1)):  # it agrees to delete each object, and the pods stay
        server.script["DELETE", name] = [(200, {"kind": "Status", "status": "Success"})] * times
    with pytest.raises(KubernetesError, match=r"ddp could not be deleted.*its pods are still there"):
        started.stop()
    server.pods = []
    started.stop()
    assert started.state is RunState.STOPPED


def test_a_cluster_that_does_not_answer_is_named_as_such(server: ApiServer) -> None:
    api = client.CoreV1Api(calls.connect())
    server.close()
    with pytest.raises(KubernetesError, match="looking: the cluster does not answer"):
        call("looking", api.list_namespaced_pod, "default")


def test_without_a_cluster_the_way_to_do_without_is_named(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KubernetesError, match=r"there is no cluster to talk to.*other"):
        calls.connect(context="other")
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
    server.logs["ddp-launcher-x7k2p"] = stamped("[1,0]<stdout>:one", "[1,1]<stdout>:two")
    server.logs["ddp-worker-0"] = stamped("Server listening on 0.0.0.0 port 22.")
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        assert started.workers == ("worker-0", "worker-1")
        started.wait(timeout_seconds=20)
        assert {str(line) for line in started.logs()} == {"[worker-0] one", "[worker-1] two"}


# The runtime of a TrainJob


NO_RUNTIME = "spec.runtimeRef: specified trainingRuntime must be created before the TrainJob is created"


def test_a_runtime_goes_with_its_trainjob_which_is_sent_again_while_the_trainer_does_not_know_it(
    server: ApiServer, job: TrainingJob
) -> None:
    server.script["POST", "trainjobs"] = [refused(403, NO_RUNTIME)] * 2
    with Kubernetes(kind="TrainJob").launch(job):
        objects = {each["kind"]: each for each in server.objects.values()}
        owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "ddp"}
        owner["uid"] = objects["TrainJob"]["metadata"]["uid"]
        assert objects["TrainingRuntime"]["metadata"]["ownerReferences"] == [owner]
    assert server.made() == []
    server.script["POST", "trainjobs"] = [refused(403, NO_RUNTIME)] * calls.TRIES
    with pytest.raises(KubernetesError, match="must be created before the TrainJob"):
        Kubernetes(kind="TrainJob").launch(job)
    assert server.made() == []


# A dry run on the server


def test_a_dry_run_asks_for_every_object_and_makes_none(
    server: ApiServer, job: TrainingJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.save(job.folder)
    words = ["workshop", "launch", str(job.folder), "--on", "kubernetes", "--dry-run=server"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().out
    assert server.made() == []
    posts = [parse_qs(urlparse(path).query) for method, path in server.requests if method == "POST"]
    assert [(query["dryRun"], query["fieldValidation"]) for query in posts] == [(["All"], ["Strict"])] * 3
    head, _, body = said.partition("apiVersion")
    assert head.splitlines() == [
        f"# {each}: would be made" for each in ("PyTorchJob ddp", "ConfigMap ddp", "ConfigMap ddp-data")
    ]
    answered = yaml.safe_load("apiVersion" + body)
    assert answered["metadata"]["uid"] == "none-yet"  # it is the server's answer, not ours
    assert answered["spec"] == Kubernetes().render(job).resource["spec"]
    assert "managedFields" not in said


def test_a_dry_run_names_each_field_that_the_server_complains_of(server: ApiServer, job: TrainingJob) -> None:
    causes = [
        {"reason": "FieldValueRequired", "message": "Required value", "field": "spec.a"},
        {"reason": "FieldValueInvalid", "message": "Invalid value: 3", "field": "spec.b[0]"},
    ]
    status, invalid = refused(422, "PyTorchJob ddp is invalid: several things")
    server.script["POST", "pytorchjobs"] = [(status, {**invalid, "details": {"causes": causes}})]
    strict = 'ConfigMap in version "v1": strict decoding error: unknown field "datta", unknown field "binary"'
    server.script["POST", "configmaps"] = [refused(400, strict)]
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


# A cluster that goes and comes, and how it is found


def test_an_api_server_that_restarts_does_not_end_the_run(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master")]
    server.logs["ddp-master-0"] = stamped("hello")
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


# The same by hand


# By step: a request that kubectl makes, and what it then says.
JOBS = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
PODS = "/api/v1/namespaces/default/pods"
ASKED = {
    "try": ("POST", f"{JOBS}?dryRun=All", "created (server dry run)"),
    "create": ("POST", f"{JOBS}?fieldManager=kubectl-create&fieldValidation=Strict", "ddp created"),
    "get": ("GET", f"{JOBS}/ddp", "ddp"),
    "pods": ("GET", f"{PODS}?labelSelector=training.kubeflow.org/job-name=ddp", "ddp-master-0"),
    "describe": ("GET", f"{JOBS}/ddp", "all is well"),
    "logs": ("GET", f"{PODS}/ddp-master-0/log?container=pytorch&follow=true", "hello"),
    "wait": ("GET", f"{JOBS}?fieldSelector=metadata.name=ddp", "condition met"),
    "delete": ("DELETE", f"{JOBS}/ddp", '"ddp" deleted'),
}  # fmt: skip


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_understands_each_line_and_asks_for_the_job(
    server: ApiServer, job: TrainingJob, tmp_path: Path
) -> None:
    manifest = Kubernetes().render(job)
    (tmp_path / "kubernetes.yaml").write_text(str(manifest))
    server.pods = [pod("master")]
    server.logs["ddp-master-0"] = ["hello"]
    server.job_status = condition("Succeeded", "all is well")
    environment = {**os.environ, "HOME": str(tmp_path)}
    for step in kubectl.side_by_side(manifest, str(tmp_path)):
        before = len(server.requests)
        words = shlex.split(step.kubectl)
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        method, path, said = ASKED[step.what]
        asked = [(how, unquote(what)) for how, what in server.requests[before:]]
        assert any(how == method and what.startswith(path) for how, what in asked), (step, asked)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert server.made() == ([] if step.what in ("try", "delete") else ["PyTorchJob ddp"])
