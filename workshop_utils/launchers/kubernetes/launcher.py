"""The launcher: renders a job's manifest, sends it to a cluster, and follows it there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes.cluster import JobObjects, KubernetesError, connect
from workshop_utils.launchers.kubernetes.config_maps import config_maps
from workshop_utils.launchers.kubernetes.manifest import SSHD, UNSAVED, Manifest, build
from workshop_utils.launchers.kubernetes.operators import Pod, pods_of, table_of, workers_in
from workshop_utils.launchers.kubernetes.settings import KubernetesSettings, require_registry
from workshop_utils.launchers.remote import Receive, RemoteJob, RemoteRun, Unreachable
from workshop_utils.runs import RunState

if TYPE_CHECKING:
    import pandas as pd

POLL_SECONDS = 1.0
PATIENCE_SECONDS = 60.0  # without a pod, before somebody should look at the operator
GRACE_SECONDS = 60.0  # after the timeout, for the operator to end the job itself
WARNINGS_SECONDS = 5.0  # from one look at the namespace's events to the next
FINAL = {  # the conditions in which a job stays
    "Succeeded": RunState.SUCCEEDED,
    "Complete": RunState.SUCCEEDED,
    "Failed": RunState.FAILED,
}


class Kubernetes(KubernetesSettings):
    """Launches jobs on a cluster. Its fields are those of `KubernetesSettings`."""

    def render(self, job: TrainingJob) -> Manifest:
        """The manifest that `launch` would send. Sends nothing, and needs no cluster.

        Raises:
            JobError: for what Kubernetes, or an operator, would refuse, and for what its image may not have.
        """
        if job.requirements and (job.folder / "requirements.txt").is_file() and not (job.image or self.image):
            advice = "name an image of yours that has them in image, or say requirements: false"
            raise JobError(
                f"requirements.txt asks for packages; {self.image_for(job)} may lack them: {advice}"
            )
        return build(job, self)

    def launch(self, job: TrainingJob) -> KubernetesRun:
        """Make the job's objects on the cluster of KUBECONFIG.

        Raises:
            JobError: as `render` does, if the data is too large, or nobody has said where the image is; nothing has
                been sent then.
            KubernetesError: where the cluster refuses; what was made before is deleted again.
        """
        manifest = self.render(job)
        require_registry(self.image_for(job))
        carried = config_maps(job, manifest.archive, with_data=self.data_claim is None)
        objects = JobObjects(connect(self.context), manifest, carried)
        pods = pods_of(manifest)
        warning = UNSAVED if self.with_defaults(job).outputs is None else ""
        return objects.launch(
            lambda: KubernetesRun(KubernetesJob(objects, pods, job.timeout_seconds), pods, warning)
        )


def outcome(job: Mapping[str, Any]) -> tuple[RunState, str]:
    """The state of a job by its conditions, and the reason that is given."""
    held = {each.get("type"): each for each in job.get("status", {}).get("conditions", []) if _holds(each)}
    for name, state in FINAL.items():
        if name in held:
            why = held[name].get("message") or held[name].get("reason") or "Kubernetes gave no reason"
            return state, f"{job['metadata']['name']} failed: {why}" if state is RunState.FAILED else ""
    return RunState.RUNNING, ""


class KubernetesRun(RemoteRun):
    """A run on a cluster. Leaving its `with` block deletes everything that was made for it.

    Attributes:
        warning: what will be lost with it; "" if nothing is.
    """

    def __init__(self, job: KubernetesJob, pods: Sequence[Pod], warning: str) -> None:
        self._job, self._objects, self.warning = job, job.objects, warning
        self.notices = job.notices
        super().__init__(job.objects.name, workers_in(pods), job, POLL_SECONDS)

    def pods(self) -> pd.DataFrame:
        """The job's pods as they are now: pod, worker, phase. Raises KubernetesError."""
        phases = _phases(self._objects.pods()).items()
        return table_of((name, self._job.worker_in(name), phase) for name, phase in phases)

    def describe(self) -> str:
        """The job's conditions, its pods, and what the cluster warns of, a line each. Raises KubernetesError."""
        job, pods = self._objects.job(), self._objects.pods()
        warnings = self._objects.warnings(pods)
        conditions = job.get("status", {}).get("conditions", [])
        lines = [f"{self._objects.resource['kind']} {self.name}: {self.state}"]
        lines += [f"  {each.get('type')}: {each.get('message', '')}" for each in conditions if _holds(each)]
        phases = _phases(pods)
        lines += [f"  {warning}" for name, warning in warnings if name not in phases]
        for pod, phase in phases.items():
            lines += [f"pod {pod}: {phase}", *(f"  {warning}" for name, warning in warnings if name == pod)]
        return "\n".join(lines)

    def stop(self) -> None:
        """Delete the job, whether it has ended or not, and all that was made for it.

        Raises:
            KubernetesError: if it cannot be deleted; the message says how the job had ended, or that it may still run.
        """
        super().stop()
        self._objects.delete()


class KubernetesJob(RemoteJob):
    """A job on a cluster, which stays there when it has ended; `pods` say what the workshop calls each one's worker.

    Attributes:
        notices: what the cluster has warned of, each once.
    """

    def __init__(self, objects: JobObjects, pods: Sequence[Pod], timeout_seconds: float) -> None:
        self.objects, self.notices = objects, list[str]()
        self._timeout_seconds = timeout_seconds
        self._warnings, self._warnings_at = list[tuple[str, str]](), -WARNINGS_SECONDS
        self._launched = time.monotonic()
        self._worker_by_pod = {pod.name: pod.worker for pod in pods}
        self._last: dict[str, str] = {}  # the time of the last line, by pod
        self._waits_for = ""

    def poll(self) -> tuple[RunState, str]:
        name = self.objects.name
        try:
            job = self.objects.job()
            state, why = outcome(job)
            # Any operator writes a status at once, and ends the job in time; without one, nothing on the cluster does.
            since = time.monotonic() - self._launched
            if not job.get("status") and since > self._timeout_seconds + GRACE_SECONDS:
                limit = f"its timeout of {self._timeout_seconds:g} s, and no operator has looked at it"
                return RunState.FAILED, f"{name} was there for longer than {limit}"
        except KubernetesError as error:
            if error.status != 404:  # a login, too, expires and is renewed
                raise Unreachable(str(error)) from None
            why = "somebody has deleted it, or it had ended and was not kept any longer"
            return RunState.FAILED, f"{name} is gone: {why}. {error}"
        if state is RunState.RUNNING:
            return state, self._waits_for
        self.objects.ended = why.rstrip(".") or f"{name} {state}"
        return state, why

    def read(self, receive: Receive) -> None:
        """Pass on what each pod has printed, or why it does not start."""
        try:
            pods = self.objects.pods()
        except KubernetesError as error:
            raise Unreachable(str(error)) from None
        self._waits_for = ""
        if not pods and time.monotonic() - self._launched > PATIENCE_SECONDS:
            operator = f"the operator that makes pods of a {self.objects.resource['kind']}"
            self._waits_for = f"its first pod; is it queued by gang scheduling, or does {operator} not run?"
        self._read_warnings(pods, receive)
        for pod in pods:
            if pod["status"]["phase"] != "Pending":
                self._read_log(pod, receive)

    def stop(self) -> None:
        self.objects.delete()

    def worker_in(self, pod: str) -> str:
        """What the workshop calls a pod's worker."""
        # What a Job makes has five more letters; and an elastic job may have grown.
        return self._worker_by_pod.get(pod) or self._worker_by_pod.get(pod.rpartition("-")[0], pod)

    def _read_warnings(self, pods: Sequence[Any], receive: Receive) -> None:
        phases = _phases(pods)
        try:
            if time.monotonic() - self._warnings_at > WARNINGS_SECONDS:
                self._warnings_at = time.monotonic()
                self._warnings = self.objects.warnings(pods)
            for name, warning in self._warnings:
                if phases.get(name) == "Pending":
                    self._waits_for = f"pod {name} to start ({warning})"
                elif not pods:
                    self._waits_for = f"its first pod ({name}: {warning})"
                self._warn(receive, name, warning)
        except KubernetesError as error:  # who may not read events may still read logs
            self._warn(receive, self.objects.name, str(error))

    def _read_log(self, pod: Mapping[str, Any], receive: Receive) -> None:
        """Pass on the lines since the last one that was read."""
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        inits = pod["status"].get("initContainerStatuses") or []
        if failed := [each for each in inits if each.get("state", {}).get("terminated", {}).get("exitCode")]:
            container = failed[0]  # the pod's own never started
        elif container.get("command") == list(SSHD):
            return  # an MPI worker's log is that of sshd
        before = self._last.get(name, "")
        try:
            lines = self.objects.log(name, container["name"], before).split("\n")
        except KubernetesError as error:
            if error.status == 403:  # otherwise it may be read the next time
                self._warn(receive, name, f"its log cannot be read: {error}")
            return
        for line in lines[:-1] if pod["status"]["phase"] == "Running" else lines:  # the last may still grow
            stamp, _, text = line.partition(" ")
            if stamp > before:  # times are RFC 3339 with nine digits, so they sort as texts
                self._last[name] = stamp
                receive(self.worker_in(name), text, "stdout")

    def _warn(self, receive: Receive, name: str, text: str) -> None:
        """Put a warning into the log, once."""
        if (notice := f"[{name}] {text}") not in self.notices:
            self.notices.append(notice)
            receive(name, text, "stderr")


def _phases(pods: Sequence[Any]) -> dict[str, str]:
    """The phase of each pod, by its name."""
    return {pod["metadata"]["name"]: pod["status"]["phase"] for pod in pods}


def _holds(condition: Mapping[str, Any]) -> bool:
    return condition.get("status") == "True"  # it may also be "False", "Unknown", or not there yet
