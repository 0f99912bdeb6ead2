"""Plays a manifest without a cluster: its pods' commands, as processes of this machine.

    run = play(job)                              # what would be sent for this job
    run = play(job, manifest.read(text))         # or a manifest that was changed by hand

Each pod's container becomes a process with the command, the arguments and the variables of the manifest, and those
that the operator would add, so that a mistake in the manifest shows as a run that fails. What differs from a pod:

| in a pod | here |
| --- | --- |
| the image's Python and its packages | this environment's |
| a folder where a volume is mounted | another folder, whose name replaces it in the command and the variables |
| a service's name and port | the loopback address and a free port |
| mpirun starts ranks on the workers through ssh | it starts them on this machine |
| limits of processor and memory | none |
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workshop_utils import data
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import mpirun
from workshop_utils.launchers.kubernetes import files
from workshop_utils.launchers.kubernetes import manifest as manifests
from workshop_utils.launchers.kubernetes.manifest import Manifest
from workshop_utils.launchers.kubernetes.operators import POD_COLUMNS, Pod, pods_of
from workshop_utils.launchers.kubernetes.settings import Settings
from workshop_utils.launchers.local import FOREIGN_VARIABLES
from workshop_utils.processes.group import Event, Process, ProcessGroup
from workshop_utils.processes.ports import PortReservation
from workshop_utils.runs import Run, RunState

if TYPE_CHECKING:
    import pandas as pd

LAST_LINES = 12  # of a pod that failed, in the message
# torchrun's own variables, beside those that no job may inherit from another.
TORCHRUN = re.compile(r"PET_")


def play(job: TrainingJob, manifest: Manifest | None = None, settings: Settings | None = None) -> PlayedRun:
    """Start the pods of `manifest`, by default what `settings` render for `job`, from whose folder the files come.

    Raises:
        JobError: if the job cannot be rendered, or the manifest names a volume or a program that cannot be played.
    """
    return PlayedRun(job, manifest or manifests.build(job, settings or Settings()))


class PlayedRun(Run):
    """A run of the pods of a manifest as local processes; its workers are called as on a cluster."""

    def __init__(self, job: TrainingJob, manifest: Manifest) -> None:
        services: list[tuple[str, int]] = []

        def note(host: str, port: int) -> tuple[str, int]:
            services.append((host, port))
            return host, port

        pods_of(manifest, note)
        self._reservation = PortReservation(len(services))
        free = dict(zip(services, self._reservation.ports, strict=True))
        pods = pods_of(manifest, lambda host, port: ("127.0.0.1", free[host, port]))
        names = tuple(f"worker-{index}" for index in range(pods[0].slots)) or tuple(
            pod.worker for pod in pods
        )
        super().__init__(job.name, names)
        self._pods = {pod.worker: pod for pod in pods}
        self._kind = manifest.resource["kind"]
        self._phases = dict.fromkeys(self._pods, "Pending")
        scratch = Path(tempfile.gettempdir()) / f"workshop-{uuid.uuid4().hex}"
        # Who reads a log is to see the paths of the manifest, not those that stand in for them.
        self._in_pod = {sys.executable: "python"}
        try:
            for pod in pods:
                self._in_pod |= {here: there for there, here in _folders(pod, job, scratch).items()}
            self._group = ProcessGroup(
                [_process(pod, job, scratch) for pod in pods],
                self._on_event,
                timeout_seconds=_deadline(manifest, job),
                scratch=scratch,
                files=_files(job, pods),
            )
        except BaseException:
            self._reservation.release()
            raise

    def pods(self) -> pd.DataFrame:
        """The pods as they are now: pod, worker, phase."""
        import pandas as pd  # here, since it takes longer to import than a launch may take

        rows = [(self._pods[worker].name, worker, phase) for worker, phase in self._phases.items()]
        return pd.DataFrame(rows, columns=list(POD_COLUMNS))

    def describe(self) -> str:
        """The job and its pods, a line each."""
        lines = [f"{self._kind} {self.name}: {self.state}"]
        lines += [f"pod {self._pods[worker].name}: {phase}" for worker, phase in self._phases.items()]
        return "\n".join(lines + ([self.reason] if self.reason else []))

    def _request_stop(self) -> None:
        self._group.stop()

    def _on_event(self, event: Event) -> None:
        if event["event"] == "line":
            said = event["text"]
            for here, there in self._in_pod.items():
                said = said.replace(here, there)
            for worker, text, stream in mpirun.lines(event["name"], said, event["stream"]):
                self._receive_line(worker, text, stream)
        elif event["event"] in ("started", "exited") and event["name"] in self._phases:
            self._phases[event["name"]] = self._phase(event)
        elif event["event"] == "ended":
            self._reservation.release()
            self._finish(*self._verdict(event))

    def _phase(self, event: Event) -> str:
        if event["event"] == "started":
            return "Running"
        if event["code"] == 0:
            return "Succeeded"
        # Who still runs when the job has ended is deleted, by the cleanPodPolicy.
        return "Deleted" if event["code"] < 0 and not self._pods[event["name"]].awaited else "Failed"

    def _verdict(self, event: Event) -> tuple[RunState, str]:
        if event["outcome"] in ("succeeded", "stopped"):
            return RunState(event["outcome"]), ""
        if event["outcome"] == "timeout":
            return RunState.FAILED, f"{self.name} was active longer than its activeDeadlineSeconds"
        pod = self._pods.get(event["name"])
        where = f"pod {pod.name}" if pod else event["name"]
        if event.get("reason"):
            return RunState.FAILED, f"{where} could not be started: {event['reason']}"
        said = [
            line.text for line in self.logs() if line.worker == event["name"] or event["name"] == mpirun.NAME
        ]
        last = "".join(f"\n  {line}" for line in said[-LAST_LINES:])
        return RunState.FAILED, f"{where} failed with exit code {event['code']}. Its last lines:{last}"


def _process(pod: Pod, job: TrainingJob, scratch: Path) -> Process:
    folders = _folders(pod, job, scratch)
    own = {each["name"]: _value(each, pod) for each in pod.container.get("env", [])}
    foreign = (FOREIGN_VARIABLES, TORCHRUN)
    inherited = {
        name: value for name, value in os.environ.items() if not any(each.match(name) for each in foreign)
    }
    variables = {name: _moved(value, folders) for name, value in {**own, **pod.variables}.items()}
    words = [*pod.container.get("command", ()), *pod.container.get("args", ())]
    if not words:
        raise JobError(f"pod {pod.name}: its container has no command; the image's own cannot be played here")
    return Process(
        pod.worker,
        _program(pod, [_moved(word, folders) for word in words]),
        {**inherited, **variables, **_local_variables(pod, scratch)},
        tempfile.gettempdir(),
        awaited=pod.awaited,
        leaves=pod.awaited or not pod.worker.startswith("ps"),
    )


def _value(variable: Mapping[str, Any], pod: Pod) -> str:
    if "valueFrom" in variable:
        raise JobError(
            f"pod {pod.name}: variable {variable['name']} has a valueFrom, which cannot be played here"
        )
    return str(variable.get("value", ""))


def _folders(pod: Pod, job: TrainingJob, scratch: Path) -> dict[str, str]:
    """The folder here by the path at which it is mounted in the pod."""
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
    found = {}
    for mount in pod.container.get("volumeMounts", []):
        volume = volumes.get(mount["name"])
        if volume is None:
            raise JobError(
                f"pod {pod.name}: volumeMounts has {mount['name']!r}, and there is no volume of that name"
            )
        found[mount["mountPath"].rstrip("/")] = str(_folder(volume, pod, job, scratch))
    return found


def _folder(volume: Mapping[str, Any], pod: Pod, job: TrainingJob, scratch: Path) -> Path:
    if "emptyDir" in volume:
        return scratch / pod.name / volume["name"]
    if "persistentVolumeClaim" in volume:
        return data.prepare(job.data)
    name = volume.get("configMap", {}).get("name")
    if name == files.data_name(job):
        return data.prepare(job.data)
    if name == job.name:
        return scratch / pod.name / volume["name"]
    raise JobError(
        f"pod {pod.name}: volume {volume['name']!r} is of {name!r}; there is {job.name!r} and {files.data_name(job)!r}"
    )


def _files(job: TrainingJob, pods: tuple[Pod, ...]) -> dict[str, str]:
    """What the pods find in their volumes, text by path below the scratch folder."""
    by_key = {Path(path).name: text for path, text in files.sources(job).items()}
    found: dict[str, str] = {}
    for pod in pods:
        for volume in pod.spec.get("volumes", []):
            root = f"{pod.name}/{volume['name']}"
            if "emptyDir" in volume:
                found[f"{root}/.keep"] = ""
            elif volume.get("configMap", {}).get("name") == job.name:
                keys = {each["key"]: each["path"] for each in volume["configMap"].get("items", [])}
                missing = keys.keys() - by_key.keys()
                if missing:
                    raise JobError(
                        f"volume {volume['name']!r}: ConfigMap {job.name} has no key {min(missing)!r}"
                    )
                for key, path in (keys or {key: key for key in by_key}).items():
                    found[f"{root}/{path}"] = by_key[key]
        if pod.slots:
            found[f"{pod.name}/hostfile"] = f"localhost slots={pod.slots}\n"
    return found


def _moved(text: str, folders: Mapping[str, str]) -> str:
    """`text` with the folders of this machine in the place of those of the pod."""
    for mounted in sorted(folders, key=len, reverse=True):
        own = folders[mounted].replace("\\", r"\\")
        text = re.sub(rf"{re.escape(mounted)}(?=[/:]|$)", own, text)
    return text


def _program(pod: Pod, words: list[str]) -> tuple[str, ...]:
    """The command with the programs of this environment in the place of the image's."""
    known = {
        "python": (sys.executable,),
        "python3": (sys.executable,),
        "torchrun": (sys.executable, "-m", "torch.distributed.run"),
        "mpirun": (str(Path(sys.prefix) / "bin" / mpirun.NAME),),
    }
    if words[0] not in known:
        raise JobError(f"pod {pod.name}: its command is {words[0]!r}; played can be {', '.join(known)}")
    # mpirun's command holds that of its ranks.
    rest = [sys.executable if word == "python" and words[0] == "mpirun" else word for word in words[1:]]
    return (*known[words[0]], *rest)


def _local_variables(pod: Pod, scratch: Path) -> dict[str, str]:
    """What one machine needs, and pods do not."""
    variables = {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(scratch)}
    if pod.slots:
        hostfile = str(scratch / pod.name / "hostfile")
        variables |= {
            "OMPI_MCA_orte_default_hostfile": hostfile,
            "PRTE_MCA_prte_default_hostfile": hostfile,
            # More ranks than cores, so that waiting ones must let others work; and no search for RDMA networks.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_btl": "^ofi",
            # Open MPI's own files are to go with the run's.
            "PRTE_MCA_prte_tmpdir_base": str(scratch),
            "OMPI_MCA_orte_tmpdir_base": str(scratch),
            "OMPI_MCA_btl_sm_backing_directory": str(scratch),
        }
    return variables


def _deadline(manifest: Manifest, job: TrainingJob) -> float:
    spec = manifest.resource["spec"]
    policy = spec.get("runPolicy", spec)
    return float(policy.get("activeDeadlineSeconds", job.timeout_seconds))
