"""A job on a cluster: the same Run as everywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import urllib3
from kubernetes import client

from workshop_utils.launchers import mpirun
from workshop_utils.launchers.kubernetes import mpijob
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
        self._called = {pod.name: pod.worker for pod in pods}
        self._ended = threading.Event()
        self._deleting = self._deleted = False
        self._followers: dict[str, threading.Thread] = {}
        self._warned: set[tuple[str, str]] = set()
        for target in (self._watch, self._look_after_pods):
            threading.Thread(target=target, name="workshop-run", daemon=True).start()

    def pods(self) -> pd.DataFrame:
        """The job's pods as they are now: pod, worker, phase. Raises KubernetesError."""
        import pandas as pd  # here, since it takes longer to import than a launch may take

        found = [(pod.metadata.name, pod.status.phase) for pod in self._cluster.pods()]
        rows = [(name, self._worker_in(name), phase) for name, phase in found]
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
        self._deleting = True  # who watches is not to wonder that the job is gone
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
        try:
            self._follow_job()
        except Exception as error:  # nobody else would end the run
            what = f"{type(error).__name__}: {error}"
            self._end(RunState.FAILED, f"{self.name} could not be followed, and may still run. {what}")
            raise

    def _follow_job(self) -> None:
        """Follow the job until it has ended; where the view is lost, look again."""
        seen = time.monotonic()
        while not self._ended.is_set():
            try:
                job = self._cluster.job()
                seen = time.monotonic()
                if self._take(job):
                    return
                for changed in self._cluster.changes(job["metadata"]["resourceVersion"]):
                    seen = time.monotonic()
                    if self._ended.is_set() or self._take(changed):
                        return
            except (KubernetesError, client.ApiException) as error:
                if error.status in (401, 403, 404) and not self._deleting:
                    self._end(
                        RunState.FAILED, f"{self.name} is gone or cannot be seen any more. {_said(error)}"
                    )
                    return
                lost = error  # 410: what was known of the past is too old; look at the present
            except (urllib3.exceptions.HTTPError, OSError) as error:
                lost = error
            else:
                continue
            if time.monotonic() - seen > BLIND_SECONDS:
                self._end(
                    RunState.FAILED, f"{self.name} cannot be seen any more, and may still run. {_said(lost)}"
                )
                return
            self._ended.wait(self._poll_seconds)

    def _take(self, job: Mapping[str, Any]) -> bool:
        """Take in the job's conditions; whether it has ended."""
        for condition in job.get("status", {}).get("conditions", []):
            state = FINAL.get(condition.get("type"))
            if state is not None and _holds(condition):
                self._read_the_rest()
                said = condition.get("message") or condition.get("reason") or "Kubernetes gave no reason"
                self._end(state, self._reason_of(said) if state is RunState.FAILED else "")
                return True
        return False

    def _reason_of(self, said: str) -> str:
        last = "".join(f"\n  {line}" for line in list(self.logs())[-LAST_LINES:])
        return f"{self.name} failed: {said}" + (f"\nThe last lines of its log:{last}" if last else "")

    # Its pods

    def _look_after_pods(self) -> None:
        """Follow the log of each pod that has started, and tell why another does not."""
        while not self._ended.wait(self._poll_seconds):
            self._look_at_pods()

    def _look_at_pods(self) -> None:
        try:
            for pod in self._cluster.pods():
                if pod.status.phase == "Pending":
                    self._warn(pod)
                elif pod.metadata.name not in self._followers and _trains(pod):
                    follower = threading.Thread(
                        target=self._follow, args=(pod,), name="workshop-log", daemon=True
                    )
                    self._followers[pod.metadata.name] = follower
                    follower.start()
        except KubernetesError as error:
            self._say(self.name, _said(error))

    def _read_the_rest(self) -> None:
        self._look_at_pods()  # a short job may have ended before anybody looked
        deadline = time.monotonic() + LOG_SECONDS
        for follower in list(self._followers.values()):
            follower.join(max(0.0, deadline - time.monotonic()))

    def _warn(self, pod: Any) -> None:
        for warning in self._cluster.warnings(pod.metadata.name):
            self._say(pod.metadata.name, warning)

    def _say(self, name: str, text: str) -> None:
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
                for line in _lines(self._cluster.log(name, container, since)):
                    stamp, _, text = line.partition(" ")
                    if stamp > known:  # times are RFC 3339 with nine digits, so they sort as texts
                        last = stamp
                        for who, said, stream in mpirun.lines(worker, text, "stdout"):
                            self._receive_line(who, said, stream)
                return
            except client.ApiException as error:
                if error.status not in (400, 429, 500, 503):  # 400: the container has not started yet
                    self._say(name, f"its log cannot be read: {_said(error)}")
                    return
            except (urllib3.exceptions.HTTPError, OSError):
                lost = lost or time.monotonic()
            self._ended.wait(self._poll_seconds)

    def _worker_in(self, pod: str) -> str:
        # What a Job makes has five more letters; and an elastic job may have grown.
        return self._called.get(pod) or self._called.get(pod.rpartition("-")[0], pod)


def _holds(condition: Mapping[str, Any]) -> bool:
    return condition.get("status") == "True"  # it may also be "False", "Unknown", or not there yet


def _trains(pod: Any) -> bool:
    """Whether the pod's log is of interest: an MPI worker's is that of sshd."""
    return list(pod.spec.containers[0].command or ()) != list(mpijob.SSHD)


def _lines(answer: Any) -> Iterator[str]:
    """The lines of an answer that comes in parts."""
    rest = b""
    for part in answer.stream(amt=None):
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _said(error: Exception) -> str:
    return str(error.reason) if isinstance(error, client.ApiException) else str(error)
