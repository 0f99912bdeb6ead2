"""What a cluster is asked: make the objects of a job, look at them, delete them.

Where it is busy, or was not reached, it is asked again; where it says no, the error has its words. It must be
Kubernetes 1.27 or newer: older servers drop a field that they do not know, however strictly they are asked.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import urllib3
from kubernetes import client, config

from workshop_utils.jobs import PlainError
from workshop_utils.launchers.kubernetes.manifest import Manifest

# By which label the pods of a job are found, by the group of its kind; the others have the training operators'.
POD_LABELS = {
    "trainer.kubeflow.org": "jobset.sigs.k8s.io/jobset-name",
    "batch": "batch.kubernetes.io/job-name",
}
OPERATORS_LABEL = "training.kubeflow.org/job-name"
# What operators make between a job and its pods, by what they add to the job's name: a TrainJob's Job, an MPIJob's.
MADE_BY_OPERATORS = ("-node-0", "-launcher")
# What the trainer answers while it does not know the runtime yet, at once after it was made.
# Source: trainer v2.3.0, pkg/runtime/core/trainingruntime.go, `ValidateObjects`.
RUNTIME_UNKNOWN = "must be created before the TrainJob"
TRIES = 5
FIRST_PAUSE_SECONDS = 0.5  # doubled at each further try
LONGEST_PAUSE_SECONDS = 30
TIMEOUT_SECONDS = (10, 60)  # to connect, and for each part of an answer
LOG_TIMEOUT_SECONDS = (5, 10)  # shorter: a dead node must not delay the others' logs, nor the job's state
BUSY = {429, 500, 502, 503, 504}
DOUBT_SECONDS = 10.0  # for an object to appear whose creation was not answered
GONE_SECONDS = 60.0
POLL_SECONDS = 0.5
VERBS = {"GET": "looking at", "PATCH": "naming the owner of", "DELETE": "deleting", "POST": "creating"}
# What to do, where the cluster's own message does not say it.
ADVICE = {
    401: "the cluster does not know you: your login has expired, or is for another cluster; log in again",
    404: "there is no such thing; look at the namespace, and whether the operator for this kind is installed",
}
# The failures in which a request has not left this machine. Of TLS's, that is one alone: others may come afterwards.
NOT_SENT = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
BAD_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"

Described = Mapping[str, Any]  # an object, as in YAML
Followed = TypeVar("Followed")


class KubernetesError(PlainError, ValueError):
    """The cluster did not do what it was asked to; the message says what was asked, why not, and what to do.

    Attributes:
        status: that of the answer; None if there was none.
        sent: whether the cluster may have got the question; it may then have acted, too, and only the answer is lost.
    """

    def __init__(self, message: str, status: int | None = None, sent: bool = False) -> None:
        super().__init__(message)
        self.status, self.sent = status, sent


def connect(context: str | None = None) -> client.ApiClient:
    """A client by KUBECONFIG or ~/.kube/config.

    Raises:
        KubernetesError: if there is neither.
    """
    configuration = client.Configuration()
    # The client itself reads the variable once, when it is imported; a notebook may set it later.
    file = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    complaints: list[str] = []

    def collect(record: logging.LogRecord) -> None:  # and have it printed nowhere
        complaints.append(record.getMessage())

    # Where the program that logs in fails, the client logs it, and goes on.
    logging.root.addFilter(collect)  # type: ignore[arg-type]
    try:
        config.load_kube_config(file, context=context, client_configuration=configuration)
    except Exception as error:  # of any kind: the client fails wherever it first uses the file's content
        is_there = any(map(os.path.exists, file.split(os.pathsep)))
        complaints.insert(0, f"{file}: {error}" if is_there else f"there is no file {file}")
    finally:
        logging.root.removeFilter(collect)  # type: ignore[arg-type]
    if complaints:
        raise KubernetesError(
            f"there is no cluster to talk to ({' '.join(complaints[0].split())}); name a kubeconfig in KUBECONFIG, and "
            "install the program by which it logs in. Without a cluster, --render shows what would be sent, and --on "
            "kubernetes-local runs the same pods on this machine"
        )
    configuration.retries = urllib3.Retry(
        TRIES - 1,
        # Doing these twice does no harm, should the first answer be lost: `_create` knows what it has made.
        allowed_methods=tuple(VERBS),
        status_forcelist=BUSY,
        backoff_factor=FIRST_PAUSE_SECONDS,
        backoff_max=LONGEST_PAUSE_SECONDS,
        retry_after_max=LONGEST_PAUSE_SECONDS,
        raise_on_status=False,
    )
    return client.ApiClient(configuration)


class JobObjects:
    """The objects of one manifest on a cluster. `config_maps` hold what its pods mount.

    Attributes:
        ended: how the job did, once that is known, for the message that it cannot be deleted.
    """

    def __init__(self, api: client.ApiClient, manifest: Manifest, config_maps: list[dict[str, Any]]) -> None:
        self.resource = manifest.resource
        self.name: str = self.resource["metadata"]["name"]
        self.namespace: str = self.resource["metadata"]["namespace"]
        self.uid, self.ended, self.deleted = "", "", False
        self._created_at, self._is_replaced = "", False
        # With the uid of each, since its name may be another's by now.
        self._made: dict[str, tuple[Described, str]] = {}
        self._manager = f"workshop-{uuid.uuid4().hex}"  # by which the cluster notes who has made an object
        self._api, self._before, self._config_maps = api, manifest.before, config_maps
        for_logs, once = copy.deepcopy(api.configuration), {"total": 1, "connect": 0, "read": 0}
        # Without a pause: what cannot be read now is read at the next look.
        for_logs.retries = api.configuration.retries.new(**once, respect_retry_after_header=False)
        self._log_api = client.ApiClient(for_logs)

    def launch(self, follow: Callable[[], Followed]) -> Followed:
        """Make everything, and return what `follow` does; where one of them fails, delete what was made before.

        The ConfigMaps come last, and the pods wait for them. The job owns them and what it refers to, so that all of
        it goes when the job is deleted, whoever deletes it.

        Raises:
            KubernetesError: where the cluster refuses; it says so if something is still there.
        """
        making: Described | None = None
        try:
            for making in (*self._before, self.resource):
                metadata = self._make(making)
            self.uid = metadata["uid"]
            self._created_at = metadata.get("creationTimestamp", "")[:19]
            owner = {key: self.resource[key] for key in ("apiVersion", "kind")}
            owner |= {"name": self.name, "uid": self.uid}
            for described in self._before:  # which had to be there first, and had no owner then
                self._ask("PATCH", described, body={"metadata": {"ownerReferences": [owner]}})
            for making in self._config_maps:
                self._make({**making, "metadata": {**making["metadata"], "ownerReferences": [owner]}})
            making = None
            return follow()
        except BaseException as error:
            if left := self._delete_all(making if getattr(error, "sent", True) else None):
                why = str(error) or "launching the job was interrupted"
                raise KubernetesError(f"{why}. {left}", getattr(error, "status", None)) from None
            raise

    def _make(self, described: Described) -> Any:
        metadata = self._create(described)["metadata"]
        self._made[_name(described)] = described, metadata["uid"]
        return metadata

    def _delete_all(self, in_doubt: Described | None = None) -> str:
        """Delete what was made, and `in_doubt` if the cluster has it from us; what may still exist, in a sentence."""
        left: dict[str, str] = {}
        pending = sorted(self._made.values(), key=lambda made: made[0] is not self.resource)  # the job first
        if in_doubt is not None and _name(in_doubt) not in self._made:
            pending.append((in_doubt, ""))
        for described, uid in pending:
            try:
                if uid := uid or self._uid_of_ours(described):
                    self._delete(described, uid)
            except (KubernetesError, KeyboardInterrupt) as error:
                left[_resource(described)] = str(error) or "deleting it was interrupted"
        return self._still_there(left, next(iter(left.values()))) if left else ""

    def _still_there(self, resources: Iterable[str], why: str) -> str:
        command = f"kubectl --namespace {self.namespace} delete {' '.join(resources)}"
        state = (
            f"{self.ended}. It is still on the cluster" if self.ended else "The job may still exist and run"
        )
        return f"{state}. To delete it: {command} ({why})"

    def _uid_of_ours(self, described: Described) -> str:
        """The uid of an object that we may have made; "" if it is somebody else's, or does not come."""
        deadline = time.monotonic() + DOUBT_SECONDS
        while (there := _without({404}, lambda: self._ask("GET", described))) is None:
            if time.monotonic() > deadline:
                return ""
            time.sleep(POLL_SECONDS)
        managers = (each.get("manager") for each in there["metadata"].get("managedFields", ()))
        return str(there["metadata"]["uid"]) if self._manager in managers else ""

    def delete(self) -> None:
        """Delete everything, once; returns when it and the job's pods are gone. What is gone already does no harm.

        Raises:
            KubernetesError: where the cluster refuses, something is still there after a minute, or Ctrl-C comes.
        """
        if self.deleted:
            return
        left = self._delete_all()
        deadline = time.monotonic() + GONE_SECONDS
        try:
            while not left and (there := [*filter(self._is_there, self._made), *self._left_pods()]):
                if time.monotonic() > deadline:
                    raise KubernetesError(f"after a minute there are still: {', '.join(there)}")
                time.sleep(POLL_SECONDS)
        except (KubernetesError, KeyboardInterrupt) as error:
            resources = [_resource(described) for described, _ in self._made.values()]
            left = self._still_there(resources, str(error) or "deleting it was interrupted")
        if left:
            raise KubernetesError(left)
        self.deleted = True

    def _is_there(self, name: str) -> bool:
        return bool(_without({404}, lambda: self._look(*self._made[name])))

    def _left_pods(self) -> list[str]:
        """One entry if there are pods. A user who has no right to look has deleted all the same."""
        return ["its pods"] if _without({403}, self.pods) else []

    def job(self) -> Any:
        """The job as the cluster has it. Raises KubernetesError, with 404 also where another one has its name."""
        return self._look(self.resource, self.uid)

    def _look(self, described: Described, uid: str) -> Any:
        found = self._ask("GET", described)
        if found["metadata"]["uid"] != uid:
            self._is_replaced |= described is self.resource
            raise KubernetesError(f"{_name(described)} is another one: it was deleted and made again", 404)
        return found

    def pods(self) -> list[Any]:
        """The job's pods, as in YAML. Raises KubernetesError."""
        if self._is_replaced:  # the pods of that name are another job's
            return []
        label = POD_LABELS.get(self.resource["apiVersion"].partition("/")[0], OPERATORS_LABEL)
        return self._list("pods", labelSelector=f"{label}={self.name}")

    def warnings(self, pods: Sequence[Any]) -> list[tuple[str, str]]:
        """What the cluster warns of about the job, what its operator makes of it, and its `pods`: name and warning.

        Such as why a pod cannot be made, scheduled or has no image; nothing older than the job, since events outlive a
        job of the same name before it. Raises KubernetesError.
        """
        names = {self.name, *(self.name + made for made in (*MADE_BY_OPERATORS, f"-{self.uid}"))}
        names |= {pod["metadata"]["name"] for pod in pods}
        events = self._list("events", fieldSelector="type=Warning")
        about = [(event.get("involvedObject", {}).get("name"), event) for event in events]
        return [
            (name, f"{event.get('reason')}: {event.get('message')}")
            for name, event in about
            if name in names and _second(event) >= self._created_at
        ]

    def log(self, pod: str, container: str, since: str) -> str:
        """The container's log, each line with its time, from the time `since` on if one is given."""
        query = {"sinceTime": since} if since else {}
        query |= {"container": container, "timestamps": "true"}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        return self._send("GET", path, f"reading the log of {pod}", query, log=True).decode(errors="replace")

    def _create(self, described: Described, tries: int = TRIES) -> Any:
        """Make one object; where the trainer has not seen the runtime yet, try again."""
        try:
            query = {"fieldValidation": "Strict", "fieldManager": self._manager}
            return self._ask("POST", described, body=described, **query)
        except KubernetesError as error:
            if error.status == 409 and self._uid_of_ours(described):
                return self._ask("GET", described)  # what was answered with an error had been done
            if tries == 1 or RUNTIME_UNKNOWN not in str(error):
                raise
        time.sleep(FIRST_PAUSE_SECONDS * 2 ** (TRIES - tries))
        return self._create(described, tries - 1)

    def _delete(self, described: Described, uid: str) -> None:
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        # 409: this uid is gone, and another object has its name.
        _without({404, 409}, lambda: self._ask("DELETE", described, body=options))

    def _list(self, plural: str, **query: str) -> list[Any]:
        path = f"/api/v1/namespaces/{self.namespace}/{plural}"
        answer = json.loads(self._send("GET", path, f"looking at the {plural} of {self.name}", query))
        items: list[Any] = answer["items"]
        return items

    def _ask(self, method: str, described: Described, body: Any = None, **query: str) -> Any:
        """The answer, as in YAML, to a request about `described`."""
        version, plural = described["apiVersion"], f"{described['kind'].lower()}s"
        path = f"/{'apis' if '/' in version else 'api'}/{version}/namespaces/{self.namespace}/{plural}"
        path += "" if method == "POST" else f"/{described['metadata']['name']}"
        return json.loads(self._send(method, path, f"{VERBS[method]} {_name(described)}", query, body))

    def _send(
        self, method: str, path: str, asked: str, query: dict[str, str], body: Any = None, log: bool = False
    ) -> bytes:
        """The answer; what is `asked` goes into errors."""
        try:
            answer = (self._log_api if log else self._api).call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params={"Content-Type": "application/merge-patch+json"} if method == "PATCH" else {},
                body=body,
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=LOG_TIMEOUT_SECONDS if log else TIMEOUT_SECONDS,
            )
            data: bytes = answer.data
            return data
        except client.ApiException as error:
            try:
                message = json.loads(error.body)["message"]  # of a Status object, with all that is wrong
            except (ValueError, KeyError, TypeError):  # a proxy on the way answers in its own words
                message = error.reason or error.status
            if not error.status:  # the client's word for a failure of TLS
                raise _unanswered(asked, error.reason) from None
            advice = ADVICE.get(error.status, f"the cluster answered {error.status}")
            # A webhook is asked before anything is stored.
            sent = error.status >= 500 and "failed calling webhook" not in str(message)
            said = f"{asked}: {advice}. Kubernetes says: {message}"
            raise KubernetesError(said, error.status, sent) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _unanswered(asked, getattr(error, "reason", error)) from None


def _without(statuses: set[int], ask: Callable[[], Any]) -> Any:
    """What `ask` returns; None where the cluster answers with one of these statuses."""
    try:
        return ask()
    except KubernetesError as error:
        if error.status not in statuses:
            raise
        return None


def _unanswered(asked: str, reason: object) -> KubernetesError:
    sent = not isinstance(reason, NOT_SENT) and BAD_CERTIFICATE not in str(reason)
    return KubernetesError(f"{asked}: the cluster does not answer; is it up? ({reason})", sent=sent)


def _second(event: Mapping[str, Any]) -> str:
    """The second in which an event was last seen, 2026-01-31T12:00:00; such texts sort by time."""
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return str(next(filter(None, times), ""))[:19]


def _resource(described: Described) -> str:
    """What kubectl calls an object: pytorchjob.kubeflow.org/ddp."""
    group, separator, _ = described["apiVersion"].partition("/")
    kind = described["kind"].lower() + (f".{group}" if separator else "")
    return f"{kind}/{described['metadata']['name']}"


def _name(described: Described) -> str:
    return f"{described['kind']} {described['metadata']['name']}"
