"""The launcher: renders a job's manifest, sends it to a cluster, and follows it there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import urllib3
from kubernetes import client

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.followed import FollowedRun, Receive, Unreachable
from workshop_utils.launchers.kubernetes.cluster import JobObjects, KubernetesError, connect
from workshop_utils.launchers.kubernetes.manifest import SSHD, Manifest, build
from workshop_utils.launchers.kubernetes.operators import Pod, pods_of, table_of, workers_in
from workshop_utils.launchers.kubernetes.pods import config_maps
from workshop_utils.launchers.kubernetes.settings import KubernetesSettings
from workshop_utils.runs import RunState

if TYPE_CHECKING:
    import pandas as pd

POLL_SECONDS = 1.0
LOG_SECONDS = 30.0  # so long may the logs still come, once the job has ended
Outcome = Callable[[Mapping[str, Any]], tuple[RunState, str]]  # of a job, as the cluster has it
FINAL = {"Succeeded": RunState.SUCCEEDED, "Complete": RunState.SUCCEEDED, "Failed": RunState.FAILED}


class Kubernetes(KubernetesSettings):
    """Launches jobs on a cluster. Its fields are those of `KubernetesSettings`."""

    def render(self, job: TrainingJob) -> Manifest:
        """The manifest that `launch` would send. Sends nothing, and needs no cluster.

        Raises:
            JobError: for what Kubernetes, or an operator, would refuse.
        """
        return build(job, self)

    def dry_run(self, job: TrainingJob) -> Manifest:
        """Have the cluster of KUBECONFIG check what `launch` would send, as kubectl's --dry-run=server does.

        The cluster, and the operators on it, say what they would make of each object; nothing is made.

        Raises:
            JobError: as `launch` does; nothing has been sent then.
            KubernetesError: with what the cluster has against the objects, by field.
        """
        return self._objects(self.render(job), job).dry_run()

    def launch(self, job: TrainingJob) -> KubernetesRun:
        """Make the job's objects on the cluster of KUBECONFIG.

        Raises:
            JobError: as `render` does, or if the data is too large; nothing has been sent then.
            KubernetesError: where the cluster refuses; what was made before is deleted again.
        """
        manifest = self.render(job)
        objects = self._objects(manifest, job)
        objects.create()
        pods = pods_of(manifest)
        return KubernetesRun(RemoteJob(objects, pods), pods)

    def _objects(self, manifest: Manifest, job: TrainingJob) -> JobObjects:
        carried = config_maps(job, with_data=self.data_claim is None)
        return JobObjects(connect(self.context), manifest, carried)


def outcome(job: Mapping[str, Any]) -> tuple[RunState, str]:
    """The state of a job by its conditions, and what Kubernetes gives as the reason."""
    for condition in job.get("status", {}).get("conditions", []):
        state = FINAL.get(condition.get("type"))
        if state is not None and _holds(condition):
            why = condition.get("message") or condition.get("reason") or "Kubernetes gave no reason"
            return state, f"{job['metadata']['name']} failed: {why}" if state is RunState.FAILED else ""
    return RunState.RUNNING, ""


class KubernetesRun(FollowedRun):
    """A run on a cluster. Leaving its `with` block deletes everything that was made for it."""

    def __init__(self, job: RemoteJob, pods: Sequence[Pod]) -> None:
        self._job, self._objects = job, job.objects
        super().__init__(job.objects.name, workers_in(pods), job, POLL_SECONDS)

    def pods(self) -> pd.DataFrame:
        """The job's pods as they are now: pod, worker, phase. Raises KubernetesError."""
        phases = {pod["metadata"]["name"]: pod["status"]["phase"] for pod in self._objects.pods()}
        return table_of((name, self._job.worker_in(name), phase) for name, phase in phases.items())

    def describe(self) -> str:
        """The job's conditions, its pods, and what the cluster warns of, a line each. Raises KubernetesError."""
        conditions = self._objects.job().get("status", {}).get("conditions", [])
        lines = [f"{self._objects.resource['kind']} {self.name}: {self.state}"]
        lines += [f"  {each.get('type')}: {each.get('message', '')}" for each in conditions if _holds(each)]
        for pod in self._objects.pods():
            name = pod["metadata"]["name"]
            lines += [f"pod {name}: {pod['status']['phase']}"]
            lines += [f"  {warning}" for warning in self._objects.warnings(name)]
        return "\n".join(lines)

    def stop(self) -> None:
        """Delete the job, whether it has ended or not, and all that was made for it.

        Raises:
            KubernetesError: if it cannot be deleted; the message says so, since it may still run.
        """
        super().stop()
        self._objects.delete()


class RemoteJob:
    """A job on a cluster, as a `Remote`. `outcome` reads its state; a thread for each pod follows its log."""

    def __init__(self, objects: JobObjects, pods: Sequence[Pod], outcome: Outcome = outcome) -> None:
        self.objects, self._outcome = objects, outcome
        self._worker_by_pod = {pod.name: pod.worker for pod in pods}
        self._followers: dict[str, threading.Thread] = {}
        self._warned: set[tuple[str, str]] = set()
        self._ended, self._waits_for = False, ""
        self._closed = threading.Event()

    def look(self) -> tuple[RunState, str]:
        try:
            state, why = self._outcome(self.objects.job())
        except KubernetesError as error:
            if error.status not in (401, 403, 404):
                raise Unreachable(str(error)) from None
            state, why = RunState.FAILED, f"{self.objects.name} is gone or cannot be seen any more. {error}"
        self._ended = state is not RunState.RUNNING
        return state, why if self._ended else self._waits_for

    def read(self, receive: Receive) -> None:
        """Follow the log of each pod that has started, and pass on why another does not start."""
        try:
            pods = self.objects.pods()
        except KubernetesError as error:
            self._warn(receive, self.objects.name, str(error))
            return
        names = [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Pending"]
        kind = "pod" if pods else self.objects.resource["kind"]
        self._waits_for = ""
        try:
            for name in names if pods else [self.objects.name]:
                for warning in self.objects.warnings(name):
                    self._waits_for = f"{kind} {name} to start ({warning})"
                    self._warn(receive, name, warning)
        except KubernetesError as error:  # who may not read events may still read logs
            self._warn(receive, self.objects.name, str(error))
        for pod in pods:
            name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
            starts_nothing = container.get("command") == list(SSHD)  # an MPI worker's log is that of sshd
            if pod["status"]["phase"] != "Pending" and name not in self._followers and not starts_nothing:
                arguments = (name, container["name"], receive)
                thread = threading.Thread(
                    target=self._follow, args=arguments, name="workshop-log", daemon=True
                )
                self._followers[name] = thread
                thread.start()
        deadline = time.monotonic() + LOG_SECONDS
        for thread in self._followers.values() if self._ended else ():
            thread.join(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        try:
            self.objects.delete()
        except KubernetesError as error:
            message = f"{self.objects.name} could not be deleted and may still run. {error}"
            raise KubernetesError(message, error.status) from None

    def close(self) -> None:
        self._closed.set()

    def worker_in(self, pod: str) -> str:
        """What the workshop calls a pod's worker."""
        # What a Job makes has five more letters; and an elastic job may have grown.
        return self._worker_by_pod.get(pod) or self._worker_by_pod.get(pod.rpartition("-")[0], pod)

    def _warn(self, receive: Receive, name: str, text: str) -> None:
        """Put a warning into the log, once."""
        if (name, text) not in self._warned:
            self._warned.add((name, text))
            receive(name, text, "stderr")

    def _follow(self, pod: str, container: str, receive: Receive) -> None:
        """Pass on a pod's log; where the connection is lost, from the last line on."""
        last, lost = "", 0.0
        while not self._closed.is_set():
            before = last
            try:
                since = int(time.monotonic() - lost) + 5 if lost else None
                for line in self.objects.log(pod, container, since):
                    stamp, _, text = line.decode(errors="replace").removesuffix("\n").partition(" ")
                    if stamp > before:  # times are RFC 3339 with nine digits, so they sort as texts
                        last = stamp
                        for attributed in output.attributed(self.worker_in(pod), text, "stdout"):
                            receive(*attributed)
                return
            except client.ApiException as error:
                if error.status not in (400, 429, 500, 503):  # 400: the container has not started yet
                    self._warn(receive, pod, f"its log cannot be read: {error.reason}")
                    return
            except (urllib3.exceptions.HTTPError, OSError):
                lost = lost or time.monotonic()
            self._closed.wait(POLL_SECONDS)


def _holds(condition: Mapping[str, Any]) -> bool:
    return condition.get("status") == "True"  # it may also be "False", "Unknown", or not there yet
