"""An API server that answers as its script says, on loopback."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml

GROUP, VERSION = "kubeflow.org", "kubeflow.org/v1"
VERBS = ["get", "list", "watch", "create", "patch", "delete"]


def _resource(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "namespaced": True, "kind": kind, "verbs": VERBS}


def _strict(kind: str) -> dict[str, Any]:
    """Says that changes of this kind can be tried, and checked field by field: kubectl asks."""
    group, _, version = VERSION.partition("/")
    about = {"group": group, "version": version, "kind": kind}
    parameters = [{"name": name, "in": "query"} for name in ("dryRun", "fieldValidation")]
    return {"patch": {"x-kubernetes-group-version-kind": about, "parameters": parameters, "responses": {}}}


# What kubectl asks of every server before it asks for anything.
DISCOVERY: dict[str, Any] = {
    "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [
            {
                "name": GROUP,
                "versions": [{"groupVersion": VERSION, "version": "v1"}],
                "preferredVersion": {"groupVersion": VERSION, "version": "v1"},
            }
        ],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            _resource("pods", "Pod"),
            _resource("pods/log", "Pod"),
            _resource("configmaps", "ConfigMap"),
            _resource("events", "Event"),
        ],
    },
    f"/apis/{VERSION}": {
        "kind": "APIResourceList",
        "groupVersion": VERSION,
        "resources": [_resource("pytorchjobs", "PyTorchJob")],
    },
    "/openapi/v3": {"paths": {f"apis/{VERSION}": {"serverRelativeURL": f"/openapi/v3/apis/{VERSION}"}}},
    f"/openapi/v3/apis/{VERSION}": {
        "openapi": "3.0.0",
        "info": {"title": "a cluster", "version": "1"},
        "paths": {f"/apis/{VERSION}/namespaces/{{namespace}}/pytorchjobs/{{name}}": _strict("PyTorchJob")},
    },
}


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
        self.authorizations: set[str | None] = set()
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
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()
        with self.changed:
            self.changed.notify_all()

    def answer(self, request: Any) -> None:
        url, method = urlparse(request.path), request.command
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        query, last = parse_qs(url.query), url.path.rpartition("/")[2]
        self.requests.append((method, request.path))
        self.authorizations.add(request.headers.get("Authorization"))
        if answers := self.script.get((method, last)):
            return self.send(request, *answers.pop(0))
        if url.path in DISCOVERY:
            return self.send(request, 200, DISCOVERY[url.path])
        if method == "POST":
            described = json.loads(body)
            path = f"{url.path}/{described['metadata']['name']}"
            if path in self.objects:
                return self.send(request, *refused(409, f"{last} already exists"))
            if query.get("dryRun") == ["All"]:
                described["metadata"] |= {"uid": "none-yet", "managedFields": [{"manager": "python"}]}
                return self.send(request, 201, described)
            described["metadata"]["uid"] = f"uid-{len(self.requests)}"
            self.objects[path] = described
            return self.send(request, 201, described)
        if method == "PATCH":  # a merge
            self.objects[url.path]["metadata"] |= json.loads(body)["metadata"]
            return self.send(request, 200, self.objects[url.path])
        if method == "DELETE":
            found = self.objects.pop(url.path, None)
            self.pods = []
            with self.changed:
                self.changed.notify_all()
            return self.send(
                request,
                *(
                    (200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})
                    if found
                    else refused(404, "not found")
                ),
            )
        if url.path.endswith(f"/pods/{last}"):
            found = next((each for each in self.pods if each["metadata"]["name"] == last), None)
            return self.send(request, *((200, found) if found else refused(404, f"{last} not found")))
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
        if last == "pytorchjobs":
            kept = [self.told(each) for path, each in self.objects.items() if path.startswith(url.path)]
            listed = {
                "kind": "PyTorchJobList",
                "apiVersion": "kubeflow.org/v1",
                "metadata": {"resourceVersion": "7"},
            }
            return self.send(request, 200, {**listed, "items": kept})
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
