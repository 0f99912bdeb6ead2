"""What is asked of a cluster: make the objects of a job, look at them, delete them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kubernetes import client

from workshop_utils.launchers.kubernetes.calls import KubernetesError, call
from workshop_utils.launchers.kubernetes.manifest import Manifest, yaml_of

# By which label the pods of a job are found, by the group of its kind; the others have the training operators'.
POD_LABELS = {
    "trainer.kubeflow.org": "jobset.sigs.k8s.io/jobset-name",
    "batch": "batch.kubernetes.io/job-name",
    "batch.volcano.sh": "volcano.sh/job-name",
}
OPERATORS_LABEL = "training.kubeflow.org/job-name"
# What the trainer answers while it does not know the runtime yet: at once after it was made, and at a dry run, always.
# Source: trainer v2.3.0, pkg/runtime/core/trainingruntime.go, `ValidateObjects`.
RUNTIME_UNKNOWN = "must be created before the TrainJob"
REFUSALS = {400, 403, 404, 409, 422}  # of one object; others might be made all the same
GONE_SECONDS = 60.0
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class DryRun:
    """What a cluster would have made: its objects with the defaults that it filled in; and what it could not check."""

    objects: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = [f"{_named(each)}: would be made" for each in self.objects] + list(self.notes)
        # The files that travel are in the job's folder; nobody wants to read them here.
        shown = [each for each in self.objects if each["kind"] != "ConfigMap"]
        return "".join(f"# {line}\n" for line in said) + yaml_of(shown)

    __repr__ = __str__


class Cluster:
    """The objects of one manifest on a cluster. `config_maps` hold what its pods mount."""

    def __init__(self, api: client.ApiClient, manifest: Manifest, config_maps: list[dict[str, Any]]) -> None:
        metadata = manifest.resource["metadata"]
        self.name: str = metadata["name"]
        self.namespace: str = metadata["namespace"]
        self.kind: str = manifest.resource["kind"]
        self._api, self._manifest, self._config_maps = api, manifest, config_maps
        self._custom, self._core = client.CustomObjectsApi(api), client.CoreV1Api(api)

    def create(self) -> None:
        """Make everything; where something cannot be made, what was made before is deleted again.

        The ConfigMaps come last, and belong to the job, as does what it refers to: whoever deletes it, or if it is
        deleted because nobody did in time, they go with it. Its pods wait for them.

        Raises:
            KubernetesError: where the cluster refuses.
        """
        made: list[Mapping[str, Any]] = []
        try:
            for described in self._manifest.objects:
                answer = self._create(described)
                made.append(described)
            owner = {key: self._manifest.resource[key] for key in ("apiVersion", "kind")}
            owner |= {"name": self.name, "uid": answer["metadata"]["uid"]}
            for described in self._manifest.before:  # which had to be there first, and had no owner then
                asked = f"giving {_named(described)} to {_named(self._manifest.resource)}"
                change = {"metadata": {"ownerReferences": [owner]}}
                self._ask(asked, "patch", described, name=described["metadata"]["name"], body=change)
            for described in self._config_maps:
                owned = {**described["metadata"], "ownerReferences": [owner]}
                self._create({**described, "metadata": owned})
                made.append(described)
        except BaseException:
            for described in reversed(made):
                self._delete(described)
            raise

    def dry_run(self) -> DryRun:
        """Have the cluster check everything, operators included, and make nothing.

        Raises:
            KubernetesError: with all that the cluster has against the objects, by field.
        """
        objects, refused, notes = [], [], []
        for described in (*self._manifest.objects, *self._config_maps):
            try:
                answer = self._create(described, dry_run=True)
            except KubernetesError as error:
                if RUNTIME_UNKNOWN in str(error) and self._manifest.before:
                    notes.append(
                        f"{_named(described)}: fits its schema; the trainer's own check needs its runtime, which a dry "
                        "run does not make"
                    )
                elif error.status in REFUSALS:
                    refused.append(error)
                else:
                    raise
            else:
                answer["metadata"].pop("managedFields", None)  # who set which field; longer than the object
                objects.append({"apiVersion": described["apiVersion"], "kind": described["kind"], **answer})
        if refused:
            raise KubernetesError("\n".join(map(str, refused)), refused[0].status)
        return DryRun(tuple(objects), tuple(notes))

    def delete(self) -> None:
        """Delete everything; returns once the job and its pods are gone. What is gone already does no harm.

        Raises:
            KubernetesError: where the cluster refuses, or something is still there after a minute.
        """
        for described in (self._manifest.resource, *self._manifest.before, *self._config_maps):
            self._delete(described)
        deadline = time.monotonic() + GONE_SECONDS
        while self.pods():
            if time.monotonic() > deadline:
                raise KubernetesError(
                    f"deleting {self.kind} {self.name}: its pods are still there after a minute; look at them with "
                    f"kubectl get pods --namespace {self.namespace}"
                )
            time.sleep(POLL_SECONDS)

    def job(self) -> dict[str, Any]:
        """The job as the cluster has it. Raises KubernetesError."""
        described = self._manifest.resource
        found: dict[str, Any] = self._ask(f"looking at {_named(described)}", "get", described, name=self.name)
        return found

    def _create(self, described: Mapping[str, Any], dry_run: bool = False) -> Any:
        options: dict[str, Any] = {"body": described, "field_validation": "Strict", "creates": not dry_run}
        if dry_run:
            options["dry_run"] = "All"
        elif self._manifest.before:
            options["passing"] = RUNTIME_UNKNOWN
        verb = "trying" if dry_run else "creating"
        return self._ask(f"{verb} {_named(described)}", "create", described, **options)

    def _delete(self, described: Mapping[str, Any]) -> None:
        name = described["metadata"]["name"]
        try:
            asked = f"deleting {_named(described)}"
            self._ask(asked, "delete", described, name=name, propagation_policy="Background")
        except KubernetesError as error:
            if error.status != 404:
                raise

    def _ask(self, asked: str, verb: str, described: Mapping[str, Any], **options: Any) -> Any:
        """Call the client's function for `verb` and the kind of `described`; the answer is as in YAML."""
        if described["kind"] == "ConfigMap":
            function = getattr(self._core, f"{verb}_namespaced_config_map")
        else:
            function = getattr(self._custom, f"{verb}_namespaced_custom_object")
            group, _, version = described["apiVersion"].partition("/")
            options |= {"group": group, "version": version, "plural": plural(described["kind"])}
        answer = call(asked, function, namespace=self.namespace, **options)
        return self._api.sanitize_for_serialization(answer)

    def pods(self) -> list[Any]:
        """The job's pods. Raises KubernetesError."""
        asked, function = f"looking at the pods of {self.name}", self._core.list_namespaced_pod
        selector = f"{job_label(self._manifest.resource)}={self.name}"
        return list(call(asked, function, self.namespace, label_selector=selector).items)

    def warnings(self, pod: str) -> list[str]:
        """What the cluster warns of about `pod`: why it cannot be scheduled, or its image not be had."""
        found = call(
            f"looking at the events of {pod}",
            self._core.list_namespaced_event,
            self.namespace,
            field_selector=f"involvedObject.name={pod},type=Warning",
        )
        return [f"{event.reason}: {event.message}" for event in found.items]

    def log(self, pod: str, container: str, since_seconds: int | None) -> Any:
        """An answer whose lines are those of the container's log, with their times, as they come."""
        return self._core.read_namespaced_pod_log(
            pod, self.namespace, container=container, follow=True, timestamps=True, _preload_content=False,
            **({"since_seconds": since_seconds} if since_seconds else {}),
        )  # fmt: skip


def plural(kind: str) -> str:
    """How a kind's objects are called in addresses, and by kubectl."""
    return f"{kind.lower()}s"


def job_label(resource: Mapping[str, Any]) -> str:
    """The label whose value, in the pods of the job that is `resource`, is the job's name."""
    return POD_LABELS.get(resource["apiVersion"].partition("/")[0], OPERATORS_LABEL)


def _named(described: Mapping[str, Any]) -> str:
    return f"{described['kind']} {described['metadata']['name']}"
