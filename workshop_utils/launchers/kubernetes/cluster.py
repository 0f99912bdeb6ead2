"""What a cluster is asked: make the objects of a job, look at them, delete them.

Where it is busy, or was not reached, it is asked again; where it says no, the error says what to do. It must be
Kubernetes 1.27 or newer: older servers drop a field that they do not know, however strictly they are asked.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import urllib3
import yaml
from kubernetes import client, config

from workshop_utils.jobs import PlainError
from workshop_utils.launchers.kubernetes.manifest import Manifest

# By which label the pods of a job are found, by the group of its kind; the others have the training operators'.
POD_LABELS = {
    "trainer.kubeflow.org": "jobset.sigs.k8s.io/jobset-name",
    "batch": "batch.kubernetes.io/job-name",
    "batch.volcano.sh": "volcano.sh/job-name",
}
OPERATORS_LABEL = "training.kubeflow.org/job-name"
# What operators make between a job and its pods, by what they add to the job's name: a TrainJob's Job, an MPIJob's.
MADE_BY_OPERATORS = ("-node-0", "-launcher")
# What the trainer answers while it does not know the runtime yet: at once after it was made, and at a dry run, always.
# Source: trainer v2.3.0, pkg/runtime/core/trainingruntime.go, `ValidateObjects`.
RUNTIME_UNKNOWN = "must be created before the TrainJob"
REFUSALS = {400, 403, 404, 409, 422}  # of one object; others might be made all the same
TRIES = 5
FIRST_PAUSE_SECONDS = 0.5  # doubled at each further try
LONGEST_PAUSE_SECONDS = 30
TIMEOUT_SECONDS = (10, 60)  # to connect, and for each part of an answer
LOG_TIMEOUT_SECONDS = (5, 10)  # shorter: a dead node must not delay the others' logs, nor the job's state
BUSY = {429, 500, 502, 503, 504}
BUSY_BEFORE = {429, 503}  # a creation with this answer has not happened
GONE_SECONDS = 60.0
POLL_SECONDS = 0.5
ADVICE = {
    400: "the cluster cannot read the object as one of its kind",
    401: "the cluster does not know you: log in again; your login has expired, or is another cluster's",
    403: "you may not do that; whoever runs the cluster grants it by a Role and a RoleBinding in the namespace",
    404: "there is no such thing; look at the namespace, and whether the operator for this kind is installed",
    409: "something of that name exists already; delete it, or give the job another name",
    422: "the cluster, or an operator, does not accept the object",
    429: f"the cluster still asks to slow down after {TRIES} tries; wait a minute and try again",
    500: f"the cluster still fails after {TRIES} tries; its log knows why",
}
# How the client fails at a file that is no kubeconfig: where its content is first used.
NO_KUBECONFIG = (
    *(config.ConfigException, OSError, yaml.YAMLError),
    *(TypeError, AttributeError, KeyError, ValueError),
)
ENDING = "is being terminated"  # what Kubernetes says of a namespace that is being deleted
UNTRUSTED = "its certificate is not one that the kubeconfig trusts; is it another cluster's?"
OBJECT = re.compile(r"^(<[^>]*>|HTTPS?Connection\w*\([^)]*\)): ")  # urllib3's own words for a connection
# The failures in which a request has not left this machine.
NOT_SENT = (
    urllib3.exceptions.NewConnectionError,
    urllib3.exceptions.ConnectTimeoutError,
    urllib3.exceptions.SSLError,
)

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
    with (
        _logged_errors() as complaints
    ):  # where the program that logs in fails, the client logs it, and goes on
        try:
            config.load_kube_config(file, context=context, client_configuration=configuration)
        except NO_KUBECONFIG as error:
            is_there = any(map(os.path.exists, file.split(os.pathsep)))
            why = f"{file}: {' '.join(str(error).split())}" if is_there else f"there is no file {file}"
            complaints.insert(0, why)
    if complaints:
        raise KubernetesError(
            f"there is no cluster to talk to ({complaints[0]}); name a kubeconfig in KUBECONFIG, and install the "
            "program by which it logs in. Without a cluster, --render shows what would be sent, and --on "
            "kubernetes-local runs the same pods on this machine"
        )
    configuration.retries = urllib3.Retry(
        TRIES - 1,
        # Doing these twice does no harm, should the first answer be lost. `_create` tries again by itself.
        allowed_methods=("GET", "PATCH", "DELETE"),
        status_forcelist=BUSY,
        backoff_factor=FIRST_PAUSE_SECONDS,
        backoff_max=LONGEST_PAUSE_SECONDS,
        retry_after_max=LONGEST_PAUSE_SECONDS,
        raise_on_status=False,
    )
    return client.ApiClient(configuration)


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """What is logged as an error by the root logger, instead of its being printed."""
    errors: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        if is_error := record.levelno >= logging.ERROR:
            errors.append(" ".join(record.getMessage().split()))
        return not is_error

    logging.root.addFilter(collect)
    try:
        yield errors
    finally:
        logging.root.removeFilter(collect)


class JobObjects:
    """The objects of one manifest on a cluster. `config_maps` hold what its pods mount."""

    def __init__(self, api: client.ApiClient, manifest: Manifest, config_maps: list[dict[str, Any]]) -> None:
        self.resource = manifest.resource
        self.name: str = self.resource["metadata"]["name"]
        self.namespace: str = self.resource["metadata"]["namespace"]
        self.deleted, self._all_made, self._made_at = False, False, ""
        self._manager = f"workshop-{uuid.uuid4().hex}"  # by which the cluster notes who has made an object
        self._api, self._before, self._config_maps = api, manifest.before, config_maps
        for_logs, once = copy.deepcopy(api.configuration), {"total": 1, "connect": 0, "read": 0}
        # Without a pause: what cannot be read now is read at the next look.
        for_logs.retries = api.configuration.retries.new(**once, respect_retry_after_header=False)
        self._log_api = client.ApiClient(for_logs)

    def launch(self, follow: Callable[[], Followed]) -> Followed:
        """Make everything, and give what `follow` gives; an interrupt leaves nothing. Raises as `create`."""
        try:
            self.create()
            return follow()
        except BaseException:
            if self._all_made:
                self.delete()
            raise

    def create(self) -> None:
        """Make everything; where something cannot be made, what was made before is deleted again.

        The ConfigMaps come last, and the pods wait for them. The job owns them and what it refers to, so that all of
        it goes when the job is deleted, whoever deletes it.

        Raises:
            KubernetesError: where the cluster refuses; it says so if something is still there.
        """
        made: list[Described] = []
        making: Described | None = None
        try:
            for making in (*self._before, self.resource):
                answer = self._create(making)
                made.append(making)
            owner = {key: self.resource[key] for key in ("apiVersion", "kind")}
            owner |= {"name": self.name, "uid": answer["metadata"]["uid"]}
            self._made_at = answer["metadata"].get("creationTimestamp", "")[:19]
            for described in self._before:  # which had to be there first, and had no owner then
                change = {"metadata": {"ownerReferences": [owner]}}
                self._ask("PATCH", described, described["metadata"]["name"], body=change)
            for making in self._config_maps:
                self._create({**making, "metadata": {**making["metadata"], "ownerReferences": [owner]}})
                made.append(making)
            self._all_made = True
        except BaseException as error:
            unsure = making if making not in made and getattr(error, "sent", True) else None
            if left := self._undo(made, unsure):
                why = error if isinstance(error, KubernetesError) else "making the job was interrupted"
                raise KubernetesError(f"{why}. {left}", getattr(error, "status", None)) from None
            raise

    def _undo(self, made: Sequence[Described], unsure: Described | None) -> str:
        """Delete `made`, and `unsure` if the cluster has it from us; what may be there still, in a sentence."""
        left: dict[str, str] = {}
        for described in (*filter(None, [unsure]), *reversed(made)):
            try:
                if described is not unsure or self._is_ours(described):
                    self._delete(described)
            except KubernetesError as error:
                group, separator, _ = described["apiVersion"].partition("/")
                kind = described["kind"].lower() + (f".{group}" if separator else "")
                left[f"{kind}/{described['metadata']['name']}"] = str(error)
        if not left:
            return ""
        what, (why, *_) = " ".join(left), left.values()
        way = f"kubectl --namespace {self.namespace} delete {what}"
        return f"What was begun may be there all the same, and run; this deletes it: {way} ({why})"

    def _is_ours(self, described: Described) -> bool:
        """Whether the cluster has this object from us: its answer may be lost, or it may be somebody else's."""
        try:
            metadata = self._ask("GET", described, described["metadata"]["name"])["metadata"]
        except KubernetesError as error:
            if error.status == 404:
                return False
            raise
        return any(each.get("manager") == self._manager for each in metadata.get("managedFields", ()))

    def dry_run(self) -> Manifest:
        """Have the cluster check everything, operators included, and make nothing.

        Returns:
            The manifest with the defaults that the cluster filled in; its comment says what would be made, and what
            could not be checked. The ConfigMaps are not in it: their files are in the job's folder.

        Raises:
            KubernetesError: with all that the cluster has against the objects, by field.
        """
        answers, refusals, comment = [], [], ""
        for described in (*self._before, self.resource, *self._config_maps):
            answer, verdict = dict(described), "would be made"
            try:
                answer |= self._create(described, dryRun="All")
                answer["metadata"].pop("managedFields", None)  # who set which field; longer than the object
            except KubernetesError as error:
                if error.status not in REFUSALS:
                    raise
                verdict = "fits its schema; a dry run makes no runtime, which the trainer's own check needs"
                if RUNTIME_UNKNOWN not in str(error) or not self._before:
                    refusals.append(error)
            answers.append(answer)
            comment += f"# {_name(described)}: {verdict}\n"
        if refusals:
            raise KubernetesError("\n".join(map(str, refusals)), refusals[0].status)
        *before, resource = answers[: len(self._before) + 1]
        return Manifest(resource, tuple(before), comment)

    def delete(self) -> None:
        """Delete everything, once; returns when the job and its pods are gone. What is gone already does no harm.

        Raises:
            KubernetesError: where the cluster refuses, or something is still there after a minute.
        """
        if self.deleted:
            return
        for described in (self.resource, *self._before, *self._config_maps):
            self._delete(described)
        deadline = time.monotonic() + GONE_SECONDS
        with contextlib.suppress(_MayNotSee):  # all is deleted; only its pods' last seconds cannot be watched
            while self.pods():
                if time.monotonic() > deadline:
                    left = f"deleting {_name(self.resource)}: its pods are still there after a minute"
                    raise KubernetesError(f"{left}; kubectl get pods --namespace {self.namespace} shows them")
                time.sleep(POLL_SECONDS)
        self.deleted = True

    def job(self) -> Any:
        """The job as the cluster has it. Raises KubernetesError."""
        return self._ask("GET", self.resource, self.name)

    def pods(self) -> list[Any]:
        """The job's pods, as in YAML. Raises KubernetesError."""
        label = POD_LABELS.get(self.resource["apiVersion"].partition("/")[0], OPERATORS_LABEL)
        return list(self._ask("GET", _kind("Pod", self.name), labelSelector=f"{label}={self.name}")["items"])

    def warnings(self, pods: Sequence[Any]) -> list[tuple[str, str]]:
        """What the cluster warns of about the job, what its operator makes of it, and its `pods`: name and warning.

        Such as why a pod cannot be made, scheduled or has no image; nothing older than the job, since events outlive a
        job of the same name before it. Raises KubernetesError.
        """
        names = {self.name, *(self.name + made for made in MADE_BY_OPERATORS)}
        names |= {pod["metadata"]["name"] for pod in pods}
        events = self._ask("GET", _kind("Event", self.name), fieldSelector="type=Warning")["items"]
        about = [(event.get("involvedObject", {}).get("name"), event) for event in events]
        return [
            (name, f"{event.get('reason')}: {event.get('message')}")
            for name, event in about
            if name in names and _second(event) >= self._made_at
        ]

    def log(self, pod: str, container: str, since: str) -> str:
        """The container's log, each line with its time, from the time `since` on if one is given."""
        query = {"sinceTime": since} if since else {}
        query |= {"container": container, "timestamps": "true"}
        answer = self._send("GET", _kind("Pod", pod), f"{pod}/log", log=True, **query)
        return answer.decode(errors="replace")

    def _create(self, described: Described, tries: int = TRIES, **query: str) -> Any:
        """Make one object; where the cluster is busy, or the trainer does not know the runtime yet, try again."""
        try:
            own = {"fieldValidation": "Strict", "fieldManager": self._manager, **query}
            return self._ask("POST", described, body=described, **own)
        except KubernetesError as error:
            awaits_runtime = RUNTIME_UNKNOWN in str(error) and "dryRun" not in query  # which makes none
            if tries == 1 or not (error.status in BUSY_BEFORE or awaits_runtime):
                raise
        time.sleep(FIRST_PAUSE_SECONDS * 2 ** (TRIES - tries))
        return self._create(described, tries - 1, **query)

    def _delete(self, described: Described) -> None:
        try:
            self._ask("DELETE", described, described["metadata"]["name"], propagationPolicy="Background")
        except KubernetesError as error:
            if error.status != 404:
                raise

    def _ask(self, method: str, described: Described, name: str = "", **request: Any) -> Any:
        """The answer, as in YAML, to a request about objects of the kind that `described` has, or the one `name`."""
        return json.loads(self._send(method, described, name, **request))

    def _send(
        self, method: str, described: Described, name: str, body: Any = None, log: bool = False, **query: str
    ) -> bytes:
        version, plural = described["apiVersion"], f"{described['kind'].lower()}s"
        path = f"/{'apis' if '/' in version else 'api'}/{version}/namespaces/{self.namespace}/{plural}/{name}"
        doing = {
            "GET": "looking at",
            "PATCH": "naming the owner of",
            "DELETE": "deleting",
            "POST": "creating",
        }
        asked = f"{'trying' if 'dryRun' in query else doing[method]} {_name(described)}"
        try:
            answer = (self._log_api if log else self._api).call_api(
                path.removesuffix("/"),
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
                raise KubernetesError(f"{asked}: {UNTRUSTED} ({error.reason})") from None
            advice = ADVICE.get(error.status, f"the cluster answered {error.status}")
            if ENDING in str(message):
                advice = (
                    "its namespace is being deleted; wait until it is gone and make it again, or take another"
                )
            kind = _MayNotSee if error.status in (401, 403) else KubernetesError
            sent = error.status >= 500 and error.status not in BUSY_BEFORE
            raise kind(f"{asked}: {advice}. Kubernetes says: {message}", error.status, sent) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = getattr(error, "reason", error)
            untrusted = isinstance(reason, urllib3.exceptions.SSLError)
            why = UNTRUSTED if untrusted else "the cluster does not answer; is it up?"
            why = f"{why} ({OBJECT.sub('', str(reason))})"
            raise KubernetesError(f"{asked}: {why}", sent=not isinstance(reason, NOT_SENT)) from None


class _MayNotSee(KubernetesError):
    """The cluster does not let this user see or do something."""


def _second(event: Mapping[str, Any]) -> str:
    """The second in which an event was last seen, 2026-01-31T12:00:00; such texts sort by time."""
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return str(next(filter(None, times), ""))[:19]


def _kind(kind: str, of: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": f"of {of}"}}


def _name(described: Described) -> str:
    kind, name = described["kind"], described["metadata"]["name"]
    return f"the {kind.lower()}s {name}" if name.startswith("of ") else f"{kind} {name}"
