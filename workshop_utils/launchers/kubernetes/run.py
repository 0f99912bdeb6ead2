"""A job on a cluster: the same Run as everywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import urllib3
from kubernetes import client

from workshop_utils.launchers import output
from workshop_utils.launchers.kubernetes import kinds
from workshop_utils.launchers.kubernetes.calls import KubernetesError
from workshop_utils.launchers.kubernetes.cluster import Cluster
from workshop_utils.launchers.kubernetes.operators import POD_COLUMNS, Pod
from workshop_utils.runs import Run, RunState

if TYPE_CHECKING:
    import pandas as pd

POLL_SECONDS = 1.0
BLIND_SECONDS = 120.0  # so long may the cluster not answer, before the run is given up
LOG_SECONDS = 30.0  # so long may the logs still come, once the job has ended
LAST_LINES = 12  # in the message of a job that failed
FINAL = {"Succeeded": RunState.SUCCEEDED, "Complete": RunState.SUCCEEDED, "Failed": RunState.FAILED}


class KubernetesRun(Run):
    """A run on a cluster. Leaving its `with` block deletes everything that was made for it."""

    def __init__(self, cluster: Cluster, pods: Sequence[Pod]) -> None:
        ranks = tuple(f"worker-{index}" for index in range(pods[0].slots))  # which mpirun tells apart
        super().__init__(cluster.name, ranks or tuple(pod.worker for pod in pods))
        self._cluster, self._poll_seconds = cluster, POLL_SECONDS
        self._worker_by_pod = {pod.name: pod.worker for pod in pods}
        self._ended = threading.Event()
        self._deleting = self._deleted = False
        self._followers: dict[str, threading.Thread] = {}
        self._warned: set[tuple[str, str]] = set()
        threading.Thread(target=self._watch, name="workshop-run", daemon=True).start()

    def pods(self) -> pd.DataFrame:
        """The job's pods as they are now: pod, worker, phase. Raises KubernetesError."""
        import pandas as pd  # here, since it takes longer to import than a launch may take

        pods = [(pod.metadata.name, pod.status.phase) for pod in self._cluster.pods()]
        rows = [(name, self._worker_in(name), phase) for name, phase in pods]
        return pd.DataFrame(rows, columns=list(POD_COLUMNS))

    def describe(self) -> str:
        """The job's conditions, its pods, and what the cluster warns of, a line each. Raises KubernetesError."""
        conditions = self._cluster.job().get("status", {}).get("conditions", [])
        lines = [f"{self._cluster.kind} {self.name}: {self.state}"]
        lines += [f"  {each.get('type')}: {each.get('message', '')}" for each in conditions if _holds(each)]
        for pod in self._cluster.pods():
            lines.append(f"pod {pod.metadata.name}: {pod.status.phase}")
            lines += [f"  {warning}" for warning in self._cluster.warnings(pod.metadata.name)]
        return "\n".join(lines)

    def stop(self) -> None:
        """Delete the job, whether it has ended or not, and all that was made for it.

        Raises:
            KubernetesError: if it cannot be deleted; the message says so, since it may still run.
        """
        super().stop()
        if not self._deleted:
            self._cluster.delete()
            self._deleted = True

    def _request_stop(self) -> None:
        self._deleting = True  # so that the watching thread does not report the job as lost
        try:
            self._cluster.delete()
        except KubernetesError as error:
            self._deleting = False
            message = f"{self.name} could not be deleted and may still run. {error}"
            raise KubernetesError(message, error.status) from None
        self._deleted = True
        self._end(RunState.STOPPED)

    def _end(self, state: RunState, reason: str = "") -> None:
        self._ended.set()
        self._finish(state, reason)

    # The job

    def _watch(self) -> None:
        """Look at the job and its pods until the job has ended, or cannot be seen for too long."""
        seen = time.monotonic()
        try:
            while not self._ended.is_set():
                try:
                    job = self._cluster.job()
                except KubernetesError as error:
                    self._not_seen(error, time.monotonic() - seen)
                else:
                    seen = time.monotonic()
                    self._look_at_pods()
                    self._take(job)
                self._ended.wait(self._poll_seconds)
        except Exception as error:  # nobody else would end the run
            what = f"{type(error).__name__}: {error}"
            self._end(RunState.FAILED, f"{self.name} could not be followed, and may still run. {what}")
            raise

    def _not_seen(self, error: KubernetesError, seconds: float) -> None:
        if error.status in (401, 403, 404) and not self._deleting:
            self._end(RunState.FAILED, f"{self.name} is gone or cannot be seen any more. {error}")
        elif seconds > BLIND_SECONDS:
            self._end(RunState.FAILED, f"{self.name} cannot be seen any more, and may still run. {error}")

    def _take(self, job: Mapping[str, Any]) -> None:
        """Take in the job's conditions; if one says that it has ended, end the run."""
        for condition in job.get("status", {}).get("conditions", []):
            state = FINAL.get(condition.get("type"))
            if state is not None and _holds(condition):
                self._await_logs()
                why = condition.get("message") or condition.get("reason") or "Kubernetes gave no reason"
                self._end(state, self._reason_of(why) if state is RunState.FAILED else "")
                return

    def _await_logs(self) -> None:
        deadline = time.monotonic() + LOG_SECONDS
        for follower in list(self._followers.values()):
            follower.join(max(0.0, deadline - time.monotonic()))

    def _reason_of(self, why: str) -> str:
        last = "".join(f"\n  {line}" for line in list(self.logs())[-LAST_LINES:])
        return f"{self.name} failed: {why}" + (f"\nThe last lines of its log:{last}" if last else "")

    # Its pods

    def _look_at_pods(self) -> None:
        """Follow the log of each pod that has started, and report why another does not."""
        try:
            for pod in self._cluster.pods():
                name = pod.metadata.name
                if pod.status.phase == "Pending":
                    for warning in self._cluster.warnings(name):
                        self._warn(name, warning)
                elif name not in self._followers and _trains(pod):
                    follower = threading.Thread(
                        target=self._follow, args=(pod,), name="workshop-log", daemon=True
                    )
                    self._followers[name] = follower
                    follower.start()
        except KubernetesError as error:
            self._warn(self.name, str(error))

    def _warn(self, name: str, text: str) -> None:
        """Put a warning into the log, once."""
        if (name, text) not in self._warned:
            self._warned.add((name, text))
            self._receive_line(name, text, "stderr")

    def _follow(self, pod: Any) -> None:
        """Take in a pod's log; where the connection is lost, from the last line on."""
        name, container = pod.metadata.name, pod.spec.containers[0].name
        worker = self._worker_in(name)
        last, lost = "", 0.0
        while not self._ended.is_set():
            known = last
            try:
                since = int(time.monotonic() - lost) + 5 if lost else None
                for line in self._cluster.log(name, container, since):
                    stamp, _, text = line.decode(errors="replace").removesuffix("\n").partition(" ")
                    if stamp > known:  # times are RFC 3339 with nine digits, so they sort as texts
                        last = stamp
                        for who, what, stream in output.attributed(worker, text, "stdout"):
                            self._receive_line(who, what, stream)
                return
            except client.ApiException as error:
                if error.status not in (400, 429, 500, 503):  # 400: the container has not started yet
                    self._warn(name, f"its log cannot be read: {error.reason}")
                    return
            except (urllib3.exceptions.HTTPError, OSError):
                lost = lost or time.monotonic()
            self._ended.wait(self._poll_seconds)

    def _worker_in(self, pod: str) -> str:
        # What a Job makes has five more letters; and an elastic job may have grown.
        return self._worker_by_pod.get(pod) or self._worker_by_pod.get(pod.rpartition("-")[0], pod)


def _holds(condition: Mapping[str, Any]) -> bool:
    return condition.get("status") == "True"  # it may also be "False", "Unknown", or not there yet


def _trains(pod: Any) -> bool:
    """Whether the pod's log is of interest: an MPI worker's is that of sshd."""
    return list(pod.spec.containers[0].command or ()) != list(kinds.SSHD)
