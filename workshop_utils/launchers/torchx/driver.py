"""Speaks to TorchX, from inside its environment: a program that `launcher` and `run` call.

    python driver.py render < SPECIFICATION      prints the application, and the request as the scheduler would get it
    python driver.py launch SPECIFICATION.json   submits it, and prints what happens as JSON lines until it has ended

The specification is a JSON object: `scheduler`, its `options`, `component` (arguments of `components.ddp`), `arguments`
of the script, `pod` (what is added to the pods, see `_complete`), `config_maps` (which the pods mount).
The events are `submitting` (with its `handle`), `line` (`node`, `stream`, `text`), where that was tried `cancelled` or
`left` (`said`: why it could not be), and `ended` (`state`, `said`). A termination signal cancels the application, and
deletes what was made for it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import components  # type: ignore[import-not-found]  # this is a program; its folder is on the path
from torchx import specs
from torchx.runner import Runner
from torchx.schedulers import kubernetes_scheduler, local_scheduler

POLL_SECONDS = 0.1  # of files and processes of this machine
CLUSTER_POLL_SECONDS = 1.0
BLIND_SECONDS = 120.0  # so long may the cluster not answer, before the run is given up
LOG_SECONDS = 30.0  # so long may the logs still come, once the application has ended
FAILURE_SECONDS = 3.0  # for the other nodes to fail by themselves, and say why
ENDING = (signal.SIGTERM, signal.SIGINT)
GROUP, VERSION, PLURAL = "batch.volcano.sh", "v1alpha1", "jobs"


def main(command: str, *files: str) -> int:
    """The program: 0 once the application has succeeded, or was rendered."""
    # What TorchX logs and warns of is for its own developers; what goes wrong is raised.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    described = json.loads(Path(files[0]).read_text(encoding="utf-8") if files else sys.stdin.read())
    application = Application(described)
    if command == "render":
        print(json.dumps({"application": application.described, "request": application.request}))
        return 0

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in ENDING:  # in place of TorchX's own handlers
        signal.signal(number, leave)
    return application.run()


class Application:
    """One application on one scheduler."""

    def __init__(self, described: dict[str, Any]) -> None:
        self.local = described["scheduler"] == "local_cwd"
        module: Any = local_scheduler if self.local else kubernetes_scheduler
        self._scheduler = module.create_scheduler("workshop")
        factory = {described["scheduler"]: lambda *_, **__: self._scheduler}
        self._runner = Runner("workshop", factory)
        app = components.ddp(*described["arguments"], **described["component"])
        self.described = _plain(app)
        self._info = self._runner.dryrun(app, described["scheduler"], described["options"])
        self._nodes = app.roles[0].num_replicas
        self._submitted = False
        self._config_maps = described.get("config_maps", [])
        if self.local:
            self.request = _plain(dataclasses.asdict(self._info.request))
            name = self.request["app_id"]
        else:
            _complete(self._info.request.resource, described["pod"])
            self.request = kubernetes_scheduler.sanitize_for_serialization(self._info.request.resource)
            self._info.request.resource = self.request
            name = f"{described['options']['namespace']}:{self.request['metadata']['name']}"
        self._handle = specs.make_app_handle(described["scheduler"], "workshop", name)

    def run(self) -> int:
        """Submit it, follow it to its end, and leave nothing behind where it does not get there."""
        state, said = specs.AppState.UNKNOWN, ""
        try:
            _tell(event="submitting", handle=self._handle)
            self._submit()
            if self.local:
                state = self._follow_processes()
            else:
                self._make_config_maps()
                state, said = self._follow_cluster()
        except Exception as error:
            said = _said(error)
        finally:
            if self._submitted and state not in specs.api._TERMINAL_STATES:
                said = self._cancel() or said
            self._runner.close()
        _tell(event="ended", state=state.name, said=said)
        return 0 if state is specs.AppState.SUCCEEDED else 1

    def _submit(self) -> None:
        # A signal waits until it is known what there is to cancel; not so locally, where all that is started would
        # inherit that, and is found without a handle.
        held = () if self.local else ENDING
        signal.pthread_sigmask(signal.SIG_BLOCK, held)
        try:
            self._runner.schedule(self._info)
            self._submitted = True
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, held)

    def _cancel(self) -> str:
        try:
            self._runner.cancel(self._handle)
        except Exception as error:
            left = f"it could not be cancelled and may still run: {_said(error)}"
            _tell(event="left", said=left)
            return left
        _tell(event="cancelled")
        return ""

    # Processes of this machine

    def _follow_processes(self) -> specs.AppState:
        """Follow its log files until every node has ended; a node that fails takes the others with it."""
        folders = self._info.request.role_log_dirs["worker"]
        files = [
            File(Path(folder) / f"{stream}.log", node, stream)
            for node, folder in enumerate(folders)
            for stream in ("stdout", "stderr")
        ]
        (app,) = self._scheduler._apps.values()
        failed_at: float | None = None
        while True:
            # In this order: what was written before the end is read after it.
            status = self._runner.status(self._handle)
            for file in files:
                file.report()
            if status is None or status.is_terminal():
                for file in files:
                    file.close()
                return status.state if status else specs.AppState.UNKNOWN
            # TorchX waits for the last node; one that waits in vain for a peer would never end.
            if failed_at is None and any(node.failed() for node in app.role_replicas["worker"]):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > FAILURE_SECONDS:
                app.kill()
            time.sleep(POLL_SECONDS)

    # A cluster

    def _make_config_maps(self) -> None:
        """Make what the pods mount, and wait for; it belongs to the job, and goes with it."""
        from kubernetes import client

        namespace, name = specs.parse_app_handle(self._handle)[2].split(":")
        api = self._scheduler._api_client()
        job = client.CustomObjectsApi(api).get_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, name
        )
        owner = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "Job",
            "name": name,
            "uid": job["metadata"]["uid"],
        }
        for body in self._config_maps:
            metadata = {"name": body["metadata"]["name"].format(job=name), "ownerReferences": [owner]}
            described = {**body, "metadata": {**body["metadata"], **metadata}}
            client.CoreV1Api(api).create_namespaced_config_map(namespace, described)

    def _follow_cluster(self) -> tuple[specs.AppState, str]:
        """Poll its state, with a thread for each node's log, until it has ended."""
        ended = threading.Event()
        readers = [
            threading.Thread(target=self._follow_log, args=(node, ended), daemon=True)
            for node in range(self._nodes)
        ]
        for reader in readers:
            reader.start()
        seen = time.monotonic()
        while True:
            try:
                status = self._runner.status(self._handle)
                seen = time.monotonic()
            except Exception as error:
                gone = getattr(error, "status", None) in (401, 403, 404)
                if gone or time.monotonic() - seen > BLIND_SECONDS:
                    raise
            else:
                if status is not None and status.is_terminal():
                    break
            time.sleep(CLUSTER_POLL_SECONDS)
        ended.set()
        deadline = time.monotonic() + LOG_SECONDS
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        return status.state, status.msg or ""

    def _follow_log(self, node: int, ended: threading.Event) -> None:
        """Tell the lines of one pod; where the connection is lost, or the pod has not started, try again."""
        last = ""
        while True:
            final = ended.is_set()
            known = last
            try:
                for line in self._runner.log_lines(self._handle, "worker", node, should_tail=True):
                    stamp, _, text = line.rstrip("\n").partition(" ")
                    if stamp > known:  # times are RFC 3339 with nine digits, so they sort as texts
                        last = stamp
                        _tell(event="line", node=node, stream="stdout", text=text)
            except Exception as error:
                if final:
                    _tell(
                        event="line", node=node, stream="stderr", text=f"its log is not whole: {_said(error)}"
                    )
            if final:
                return
            ended.wait(CLUSTER_POLL_SECONDS)


class File:
    """A file that is still being written, told by lines."""

    def __init__(self, path: Path, node: int, stream: str) -> None:
        self._file = path.open("rb")
        self._node, self._stream, self._rest = node, stream, b""

    def report(self) -> None:
        """Tell the lines that have come; one without an end waits for it."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            self._tell(line)

    def close(self) -> None:
        """Tell what came after the last end of a line, if anything did."""
        if self._rest:
            self._tell(self._rest)
        self._file.close()

    def _tell(self, line: bytes) -> None:
        _tell(event="line", node=self._node, stream=self._stream, text=line.decode(errors="replace"))


def _complete(job: dict[str, Any], pod: dict[str, Any]) -> None:
    """Add to a Volcano Job, and to each of its pods, what TorchX has no word for.

    A pod that fails ends the job, as the others would wait for it for ever; nobody's job stays for ever, either. Of
    the pods: their volumes (`volumes`, `mounts`), how long they may run, and on which nodes.
    """
    (name, spec) = (job["metadata"]["name"], job["spec"])
    job["metadata"]["labels"] = pod["labels"]
    spec["policies"] = [{"event": event, "action": "TerminateJob"} for event in ("PodFailed", "PodEvicted")]
    spec["ttlSecondsAfterFinished"] = pod["keep_seconds"]
    spec["minAvailable"] = len(spec["tasks"])  # all or none: half a job would hold its nodes in vain
    for index, task in enumerate(spec["tasks"]):
        described = kubernetes_scheduler.sanitize_for_serialization(task["template"])
        described["metadata"]["labels"].update(pod["labels"])
        inside = described["spec"]
        inside["activeDeadlineSeconds"] = pod["seconds"]
        if pod["node_selector"]:
            inside["nodeSelector"] = {**inside.get("nodeSelector", {}), **pod["node_selector"]}
        inside["volumes"] += json.loads(json.dumps(pod["volumes"]).replace("{job}", name))
        inside["containers"][0]["volumeMounts"] += pod["mounts"]
        spec["tasks"][index] = {**task, "template": described}


def _plain(value: Any) -> Any:
    """`value` as JSON has it, without what is not set."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items() if each not in (None, {}, [])}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _said(error: Exception) -> str:
    """What went wrong, in one line; a cluster's answer is a JSON object with a message."""
    status = getattr(error, "status", None)
    if status is None:
        return " ".join(str(error).split()) or type(error).__name__
    try:
        said = json.loads(getattr(error, "body", ""))["message"]
    except (ValueError, KeyError, TypeError):  # a proxy on the way answers in its own words
        said = getattr(error, "reason", "nothing more")
    advice = {
        401: "; log in again",
        403: "; whoever runs the cluster grants it by a Role and a RoleBinding in the namespace",
        404: "; is the namespace right, and Volcano installed?",
    }
    return f"the cluster answered {status}: {said}{advice.get(status, '')}"


_telling = threading.Lock()


def _tell(**event: Any) -> None:
    with _telling:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
