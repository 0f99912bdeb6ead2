"""TorchX's scheduler for Kubernetes, against a server that answers as a cluster with Volcano would."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import yaml
from conftest import MakeJob, marked_processes

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.torchx import TorchX
from workshop_utils.runs import RunFailed, RunState

pytestmark = pytest.mark.usefixtures("nothing_is_left")

JOBS = "/apis/batch.volcano.sh/v1alpha1/namespaces/team/jobs"
CONFIG_MAPS = "/api/v1/namespaces/team/configmaps"


class VolcanoServer:
    """Keeps what is created. `phases` are the job's, one a look, the last for ever; `logs` are those of the pods."""

    def __init__(self) -> None:
        self.created: dict[str, list[dict[str, Any]]] = {}
        self.deleted: list[str] = []
        self.phases = ["Pending", "Running", "Completed"]
        self.logs: dict[str, list[str]] = {}
        self.refusals: dict[tuple[str, str], int] = {}
        self.looked_at = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                return

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                status, content = server.answer(self.command, urlparse(self.path).path, body)
                data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header(
                    "Content-Type", "text/plain" if isinstance(content, str) else "application/json"
                )
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815 (http.server's names)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if status := self.refusals.get((method, path.rpartition("/")[0 if method == "DELETE" else 2])):
            return status, {"kind": "Status", "message": "no, thank you"}
        if method == "POST":
            body["metadata"]["uid"] = "uid-1"
            self.created.setdefault(path, []).append(body)
            return 201, body
        if method == "DELETE":
            self.deleted.append(path)
            return 200, {"kind": "Status", "status": "Success"}
        if path.endswith("/log"):
            pod = path.split("/")[-2]
            lines = next((lines for name, lines in self.logs.items() if pod.endswith(name)), None)
            return (
                (200, "".join(lines))
                if lines
                else (400, {"kind": "Status", "message": "is waiting to start"})
            )
        if path.endswith("/status"):
            self.looked_at.set()
            phase = self.phases.pop(0) if len(self.phases) > 1 else self.phases[0]
            return 200, {"status": {"state": {"phase": phase}}}
        return 200, self.created[path.rpartition("/")[0]][0]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VolcanoServer]:
    server = VolcanoServer()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.http.server_port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.http.shutdown()
    server.http.server_close()
    server.thread.join()


@pytest.fixture
def job(make_job: MakeJob) -> TrainingJob:
    return make_job("import torch", name="bert", strategy="torch_ddp", workers=2)


TEAM = TorchX(scheduler="kubernetes", namespace="team")


def said(rank: int, *texts: str, stamp: int = 0) -> list[str]:
    return [
        f"2026-11-01T10:00:00.{stamp + index:09d}Z [worker-{rank}]: {text}\n"
        for index, text in enumerate(texts)
    ]


def test_the_job_is_sent_its_files_belong_to_it_and_its_log_comes_back(
    server: VolcanoServer, job: TrainingJob
) -> None:
    metric = {"workshop": "metric", "worker": "worker-1", "rank": 1, "time": 1.0, "step": 3, "loss": 0.5}
    server.logs = {"worker-0-0": said(0, "hello"), "worker-1-0": said(1, "hello", json.dumps(metric))}
    run = TEAM.launch(job).wait(120)
    (sent,) = server.created[JOBS]
    name = sent["metadata"]["name"]
    assert run.handle == f"kubernetes://workshop/team:{name}"
    # Had it been rendered, the same would have been seen, but for the name that TorchX draws.
    rendered = TEAM.render(job)
    drawn = rendered.request["metadata"]["name"]
    del sent["metadata"]["uid"]
    assert yaml.safe_load(str(rendered).replace(drawn, name)) == sent
    script, data = server.created[CONFIG_MAPS]
    assert (script["metadata"]["name"], data["metadata"]["name"]) == (name, f"{name}-data")
    assert script["data"]["train.py"] == "import torch"
    for made in (script, data):
        assert made["metadata"]["ownerReferences"][0] == {
            "apiVersion": "batch.volcano.sh/v1alpha1",
            "kind": "Job",
            "name": name,
            "uid": "uid-1",
        }
    assert sorted(str(line) for line in run.logs()) == ["[worker-0] hello", "[worker-1] hello"]
    assert list(run.metrics["step"]) == [3]
    assert server.deleted == []  # it stays to be looked at, for as long as `keep` says


def test_a_job_that_fails_names_the_rank(server: VolcanoServer, job: TrainingJob) -> None:
    server.phases = ["Running", "Terminated"]
    summary = [
        "  time      : 2026-11-01_10:00:00",
        "  rank      : 1 (local_rank: 0)",
        "  exitcode  : -9 (pid: 7)",
    ]
    agent = [f"2026-11-01T10:00:01.{index:09d}Z {text}\n" for index, text in enumerate(summary)]
    server.logs = {"worker-0-0": said(0, "hello"), "worker-1-0": [*said(1, "loading"), *agent]}
    with pytest.raises(RunFailed) as failed:
        TEAM.launch(job).wait(120)
    assert "worker-1 (rank 1) was killed by SIGKILL; the others were stopped" in str(failed.value)
    assert "Its last lines:\n  loading" in str(failed.value)


def test_stopping_deletes_the_job(server: VolcanoServer, job: TrainingJob) -> None:
    server.phases = ["Running"]
    with TEAM.launch(job) as run:
        assert server.looked_at.wait(60)
    assert run.state is RunState.STOPPED
    assert server.deleted == [f"{JOBS}/{server.created[JOBS][0]['metadata']['name']}"]


def test_a_job_that_cannot_be_deleted_is_said_to_run_on(server: VolcanoServer, job: TrainingJob) -> None:
    server.phases = ["Running"]
    server.refusals["DELETE", JOBS] = 403
    with TEAM.launch(job) as run:
        assert server.looked_at.wait(60)
    assert run.state is RunState.FAILED
    assert "could not be cancelled and may still run: the cluster answered 403: no, thank you" in run.reason
    name = server.created[JOBS][0]["metadata"]["name"]
    assert f"kubectl delete jobs.batch.volcano.sh {name} --namespace team" in run.reason


def test_one_whose_driver_is_killed_is_said_to_run_on(server: VolcanoServer, job: TrainingJob) -> None:
    server.phases = ["Running"]
    with TEAM.launch(job) as run:
        assert server.looked_at.wait(60)
        (driver,) = (pid for pid, words in marked_processes().items() if "driver.py launch" in words)
        os.kill(driver, signal.SIGKILL)
        with pytest.raises(RunFailed, match="nobody knows whether it was cancelled"):
            run.wait(60)


@pytest.mark.parametrize(
    ("what", "status", "advice"),
    [
        ("jobs", 404, "Volcano installed?"),
        ("jobs", 403, "by a Role and a RoleBinding"),
        ("configmaps", 403, "by a Role and a RoleBinding"),
    ],
)
def test_what_a_cluster_refuses_is_explained_and_nothing_stays(
    server: VolcanoServer, job: TrainingJob, what: str, status: int, advice: str
) -> None:
    server.refusals["POST", what] = status
    with pytest.raises(RunFailed, match=f"the cluster answered {status}: no, thank you") as failed:
        TEAM.launch(job).wait(120)
    assert advice in str(failed.value)
    assert len(server.deleted) == len(server.created.get(JOBS, []))


def test_without_a_cluster_nothing_is_started(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(JobError, match=r"there is no cluster to talk to .* name a kubeconfig in KUBECONFIG"):
        TEAM.launch(job)
