"""What tests of Kubernetes share: an API server on loopback that answers as its script says, and changed manifests."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
import yaml

from workshop_utils.launchers.kubernetes import cluster as requests
from workshop_utils.launchers.kubernetes import launcher


def changed(described: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of an object with one field set, such as `spec.containers.0.image`."""
    copied = copy.deepcopy(described)
    at: Any = copied
    *way, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    for part in way:
        at = at[part]
    at[last] = value
    return copied


@contextlib.contextmanager
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A server that is the cluster of KUBECONFIG; the launcher asks it often, and is not patient for long."""
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(folder)))
    monkeypatch.setattr(requests, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(requests, "DOUBT_SECONDS", 1.0)
    monkeypatch.setattr(requests, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(launcher, "WARNINGS_SECONDS", 0.0)
    yield server
    server.close()


def stamped(*texts: str) -> list[str]:
    """A pod's log with its times."""
    return [f"2026-01-01T00:00:00.{index:09d}Z {text}" for index, text in enumerate(texts)]


def metric(rank: int) -> str:
    """What a worker prints to report a step."""
    about = {"workshop": "metric", "worker": f"worker-{rank}", "rank": rank, "time": 1.0}
    return json.dumps({**about, "step": 3, "loss": 0.5})


def refused(status: int, message: str) -> tuple[int, Any]:
    about = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return status, {**about, "message": message, "code": status}


class ApiServer:
    """Keeps what is created, and answers as a cluster would, but for what its script says.

    `script` holds answers that come first, by method and the last part of the path; `late` has those that come in the
    place of an answer though what was asked has been done, after `late_seconds`. `before` is called with each request,
    and may do something in between. `managers` are who has made an object, and `created_at` is
    when. `job_status`, `pods`, `logs` and `warnings` are what it says of the job; `unfinished` are a pod's lines that
    have no end yet.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.requests: list[tuple[str, str]] = []
        self.script: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        self.job_status: dict[str, Any] = {}
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, list[str]] = {}
        self.unfinished: dict[str, str] = {}
        self.warnings: list[dict[str, Any]] = []
        self.late: dict[tuple[str, str], tuple[int, Any]] = {}
        self.late_seconds = 0.0
        self.before: Callable[[str, str], None] = lambda method, last: None
        self.created_at, self.managers = "2026-01-01T00:00:00Z", list[str]()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                return

            def answer(self) -> None:
                server.answer(self)

            do_GET = do_POST = do_DELETE = do_PATCH = answer  # noqa: N815 (http.server's names)

        self.handler = Handler
        self.open()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def write_kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig with this server as its only cluster."""
        described = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": "secret"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me"}}],
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(described))
        return path

    def open(self, port: int = 0) -> None:
        self.http = ThreadingHTTPServer(("127.0.0.1", port), self.handler)
        self.port = self.http.server_port
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def made(self) -> list[str]:
        return sorted(f"{each['kind']} {each['metadata']['name']}" for each in self.objects.values())

    def answer(self, request: Any) -> None:
        path = urlparse(request.path).path
        query = parse_qs(urlparse(request.path).query)
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests.append((request.command, request.path))
        last = path.rpartition("/")[2]
        self.before(request.command, last)
        if answers := self.script.get((request.command, last)):
            self.send(request, *answers.pop(0))
        elif last == "log":
            pod, since = path.split("/")[-2], query.get("sinceTime", [""])[0]
            lines = [*(f"{line}\n" for line in self.logs.get(pod, [])), self.unfinished.get(pod, "")]
            self.send(request, 200, "".join(line for line in lines if line >= since).encode())
        elif request.command == "GET":
            self.send(request, *self.get(path, last))
        else:
            change = functools.partial(self.change, request.command, path, body, query)
            late = self.late.pop((request.command, last), None)
            if late and self.late_seconds:
                threading.Timer(self.late_seconds, change).start()
            else:
                answer = change()
            self.send(request, *(late or answer))

    def get(self, path: str, last: str) -> tuple[int, Any]:
        if last in ("pods", "events"):
            return 200, {"items": self.pods if last == "pods" else self.warnings}
        if path not in self.objects:
            return refused(404, f"{last} not found")
        return 200, {**self.objects[path], "status": self.job_status}

    def change(self, method: str, path: str, body: bytes, query: dict[str, list[str]]) -> tuple[int, Any]:
        if method == "DELETE":
            wanted = json.loads(body)["preconditions"]["uid"]
            if path in self.objects and self.objects[path]["metadata"]["uid"] != wanted:
                return refused(409, "the UID in the precondition does not match")
            self.pods = []
            gone = self.objects.pop(path, None)
            return (200, {"kind": "Status", "status": "Success"}) if gone else refused(404, "not found")
        described = json.loads(body)
        if method == "PATCH":
            self.objects[path]["metadata"] |= described["metadata"]
            return 200, self.objects[path]
        path = f"{path}/{described['metadata']['name']}"
        if path in self.objects:
            return refused(409, "it already exists")
        managers = self.managers or query["fieldManager"]
        described["metadata"] |= {
            "managedFields": [{"manager": each} for each in managers],
            "uid": f"uid-{len(self.requests)}",
            "creationTimestamp": self.created_at,
        }
        self.objects[path] = described
        return 201, described

    def send(self, request: Any, status: int, content: Any) -> None:
        data = json.dumps(content).encode() if not isinstance(content, bytes) else content
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        if status == 429:
            request.send_header("Retry-After", "0")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)
