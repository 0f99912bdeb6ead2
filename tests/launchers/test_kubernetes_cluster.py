"""Launching on a cluster: an API server that answers as its script says, on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
import yaml
from conftest import MakeJob
from kubernetes import client

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes, calls, run
from workshop_utils.launchers.kubernetes.calls import KubernetesError, call
from workshop_utils.runs import RunFailed, RunState

METRIC = json.dumps(
    {"workshop": "metric", "worker": "worker-0", "rank": 0, "time": 1.0, "step": 3, "loss": 0.5}
)


def refused(status: int, message: str) -> tuple[int, Any]:
    return status, {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "code": status,
    }


class ApiServer:
    """Keeps what is created, and answers as a cluster would, but for what its script says.

    `script` holds answers that come first, by method and the last part of the path. `job_status` and `pods` are what
    is told of the job. `events` are the watch's: a list for each watch; None drops the connection.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.requests: list[tuple[str, str]] = []
        self.script: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        self.job_status: dict[str, Any] = {}
        self.pods: list[dict[str, Any]] = []
        self.events: list[list[Any] | None] = []
        self.logs: dict[str, list[str | None]] = {}
        self.warnings: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                return

            def answer(self) -> None:
                server.answer(self)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815 (http.server's names)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def answer(self, request: Any) -> None:
        url, method = urlparse(request.path), request.command
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        query, last = parse_qs(url.query), url.path.rpartition("/")[2]
        self.requests.append((method, request.path))
        if answers := self.script.get((method, last)):
            return self.send(request, *answers.pop(0))
        if method == "POST":
            described = json.loads(body)
            path = f"{url.path}/{described['metadata']['name']}"
            if path in self.objects:
                return self.send(request, *refused(409, f"{last} already exists"))
            described["metadata"]["uid"] = f"uid-{len(self.requests)}"
            self.objects[path] = described
            return self.send(request, 201, described)
        if method == "DELETE":
            found = self.objects.pop(url.path, None)
            self.pods = []
            with self.changed:
                self.changed.notify_all()
            return self.send(request, *((200, {"status": "Success"}) if found else refused(404, "not found")))
        if last == "log":
            return self.send_log(request, url.path.split("/")[-2])
        if last == "pods":
            return self.send(
                request, 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": self.pods}
            )
        if last == "events":
            listed = {"kind": "EventList", "apiVersion": "v1", "metadata": {}, "items": self.warnings}
            return self.send(request, 200, listed)
        if "watch" in query:
            return self.send_events(request)
        if url.path not in self.objects:
            return self.send(request, *refused(404, f"{last} not found"))
        return self.send(request, 200, self.told(self.objects[url.path]))

    def told(self, described: dict[str, Any]) -> dict[str, Any]:
        metadata = {**described["metadata"], "resourceVersion": "7"}
        return {**described, "metadata": metadata, "status": self.job_status}

    def send(self, request: Any, status: int, content: Any) -> None:
        data = json.dumps(content).encode() if not isinstance(content, bytes) else content
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        if status == 429:
            request.send_header("Retry-After", "0")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def send_events(self, request: Any) -> None:
        """The next watch: its events, then the end; with none left it lasts until something is deleted."""
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        if not self.events:
            request.end_headers()
            with self.changed:
                self.changed.wait(timeout=20)
            return
        events = self.events.pop(0)
        if events is None:  # more was promised than comes
            request.send_header("Content-Length", "1000")
            events = []
        request.end_headers()
        for event in events:
            request.wfile.write((event if isinstance(event, str) else json.dumps(event) + "\n").encode())

    def send_log(self, request: Any, pod: str) -> None:
        """The pod's log so far, a line a chunk; where None stands among the lines, the connection breaks, once."""
        lines = self.logs.get(pod, [])
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        if None in lines:
            self.logs[pod] = [line for line in lines if line is not None]
        for line in lines:
            if line is None:
                return
            data = f"{line}\n".encode()
            request.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        request.wfile.write(b"0\r\n\r\n")

    def made(self) -> list[str]:
        return sorted(f"{each['kind']} {each['metadata']['name']}" for each in self.objects.values())


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    made = ApiServer()
    kubeconfig = tmp_path / "kubeconfig"
    described = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": made.url}}],
        "users": [{"name": "me", "user": {"token": "secret"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me"}}],
    }
    kubeconfig.write_text(yaml.safe_dump(described))
    # The client reads the variable when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    monkeypatch.setattr(calls, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(run, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(run, "LOG_SECONDS", 5.0)
    yield made
    with made.changed:
        made.changed.notify_all()
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


def ended(server: ApiServer, status: dict[str, Any]) -> dict[str, Any]:
    described = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "ddp"}}
    server.job_status = status
    return {"type": "MODIFIED", "object": {**described, "status": status}}


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


def test_leaving_early_deletes_a_job_that_still_runs(server: ApiServer, job: TrainingJob) -> None:
    with Kubernetes().launch(job) as started:
        assert started.state is RunState.RUNNING
    assert started.state is RunState.STOPPED
    assert server.made() == []


def test_a_dropped_watch_and_one_that_is_too_old_are_taken_up_again(
    server: ApiServer, job: TrainingJob
) -> None:
    expired = {**refused(410, "too old resource version")[1], "reason": "Expired"}
    gone = {"type": "ERROR", "object": expired}
    server.events = [
        None,
        [gone],
        [gone],
        [],
        ['{"type": "MODI'],
        [{"type": "ERROR", "object": {"code": 410}}],
    ]
    with Kubernetes().launch(job) as started:
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=1)
        server.events = [[ended(server, condition("Succeeded"))]]
        with server.changed:
            server.changed.notify_all()
        started.wait(timeout_seconds=20)
    assert sum("watch=True" in path for _, path in server.requests) >= 6


def test_a_log_that_breaks_off_goes_on_without_a_line_twice(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master")]
    stamps = [f"2026-01-01T00:00:0{second}.000000000Z" for second in range(3)]
    server.logs["ddp-master-0"] = [f"{stamps[0]} one", f"{stamps[1]} two", None, f"{stamps[2]} three"]
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        started.wait(timeout_seconds=20)
        assert [line.text for line in started.logs(worker="worker-0")] == ["one", "two", "three"]


def test_a_pod_that_cannot_be_scheduled_says_so_once(server: ApiServer, job: TrainingJob) -> None:
    server.pods = [pod("master", "Pending")]
    said = {"reason": "FailedScheduling", "message": "0/1 nodes are available: 1 Insufficient cpu."}
    about = {"metadata": {"name": "event"}, "involvedObject": {}, **said}
    server.warnings = [about]
    with Kubernetes().launch(job) as started:
        for line in started.logs(follow=True):
            assert (
                str(line) == "[ddp-master-0] FailedScheduling: 0/1 nodes are available: 1 Insufficient cpu."
            )
            break
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=0.5)
        assert len(list(started.logs())) == 1


def test_a_job_that_somebody_else_deletes_has_failed(server: ApiServer, job: TrainingJob) -> None:
    with Kubernetes().launch(job) as started:
        server.objects.clear()
        with server.changed:
            server.changed.notify_all()
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


def test_who_is_asked_to_slow_down_does(server: ApiServer, job: TrainingJob) -> None:
    server.script["POST", "pytorchjobs"] = [refused(429, "slow down")] * 2
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        started.wait(timeout_seconds=20)
    server.script["POST", "configmaps"] = [refused(429, "slow down")] * calls.TRIES
    assert f"asks to slow down after {calls.TRIES} tries" in refusal(job)


def test_what_was_made_before_a_refusal_is_deleted_again(server: ApiServer, job: TrainingJob) -> None:
    server.script["POST", "configmaps"] = [refused(403, "no config maps")]
    assert "creating ConfigMap ddp: you may not do that" in refusal(job)
    assert any(method == "POST" and "pytorchjobs" in path for method, path in server.requests)
    assert server.made() == []


def test_a_cluster_that_fails_for_a_moment_is_asked_again(server: ApiServer, job: TrainingJob) -> None:
    server.script["GET", "ddp"] = [refused(500, "leader changed"), (502, b"<html>")]
    server.script["DELETE", "ddp"] = [refused(503, "busy")]
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        started.wait(timeout_seconds=20)
    assert server.made() == []


def test_a_job_that_cannot_be_deleted_is_not_kept_secret(server: ApiServer, job: TrainingJob) -> None:
    started = Kubernetes().launch(job)
    server.script["DELETE", "ddp"] = [refused(403, "no")]
    with pytest.raises(KubernetesError, match="ddp could not be deleted and may still run"):
        started.stop()
    started.stop()
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
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
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
