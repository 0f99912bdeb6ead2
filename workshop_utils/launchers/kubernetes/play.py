"""Plays a manifest without a cluster: its pods' commands, as processes of this machine.

    run = play(job)                              # what would be sent for this job
    run = play(job, Manifest(resource))          # or a manifest that was changed by hand

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

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.kubernetes import files
from workshop_utils.launchers.kubernetes import manifest as manifests
from workshop_utils.launchers.kubernetes.manifest import Manifest
from workshop_utils.launchers.kubernetes.operators import POD_COLUMNS, Pod, pods_of
from workshop_utils.launchers.kubernetes.settings import Settings
from workshop_utils.launchers.local.environment import (
    inherited_variables,
    mpirun_program,
    reserve,
    scratch_folder,
)
from workshop_utils.launchers.local.group import Event, Process
from workshop_utils.launchers.local.run import ProcessRun
from workshop_utils.strategies import MPI_FOLDERS, MPI_ON_ONE_MACHINE
from workshop_utils.training import data

if TYPE_CHECKING:
    import pandas as pd

# torchrun's own variables, beside those that no job may inherit from another.
TORCHRUN = re.compile(r"PET_")


def play(job: TrainingJob, manifest: Manifest | None = None) -> PlayedRun:
    """Start the pods of `manifest`, by default what would be sent for `job`, from whose folder the files come.

    Raises:
        JobError: if the job cannot be rendered, or the manifest names a volume or a program that cannot be played.
    """
    return PlayedRun(job, manifest or manifests.build(job, Settings()))


class PlayedRun(ProcessRun):
    """A run of the pods of a manifest as local processes; its workers are called as on a cluster."""

    def __init__(self, job: TrainingJob, manifest: Manifest) -> None:
        services: list[tuple[str, int]] = []

        def note(host: str, port: int) -> tuple[str, int]:
            services.append((host, port))
            return host, port

        pods_of(manifest, note)
        with reserve(len(services)) as reservation:
            free = dict(zip(services, reservation.ports, strict=True))
            pods = pods_of(manifest, lambda host, port: ("127.0.0.1", free[host, port]))
            ranks = tuple(f"worker-{index}" for index in range(pods[0].slots))
            super().__init__(job.name, ranks or tuple(pod.worker for pod in pods), reservation)
            self._pods = {pod.worker: pod for pod in pods}
            self._kind = manifest.resource["kind"]
            self._phases = dict.fromkeys(self._pods, "Pending")
            scratch = scratch_folder()
            # Logs show the paths of the manifest, not those that take their place here.
            self._in_pod = {sys.executable: "python"}
            processes: list[Process] = []
            contents: dict[str, str] = {}
            for pod in pods:
                folders = _folders(pod, job, scratch)
                self._in_pod |= {here: there for there, here in folders.items()}
                processes.append(_process(pod, folders, scratch))
                contents |= _contents(pod, job)
            self._start(processes, _deadline(manifest, job), scratch, contents)

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

    def _on_event(self, event: Event) -> None:
        if event["event"] in ("started", "exited") and event["name"] in self._phases:
            self._phases[event["name"]] = self._phase(event)
        super()._on_event(event)

    def _take_line(self, name: str, text: str, stream: str) -> None:
        for here, there in self._in_pod.items():
            text = text.replace(here, there)
        super()._take_line(name, text, stream)

    def _phase(self, event: Event) -> str:
        if event["event"] == "started":
            return "Running"
        if event["code"] == 0:
            return "Succeeded"
        # Who still runs when the job has ended is deleted, by the cleanPodPolicy.
        return "Deleted" if event["code"] < 0 and not self._pods[event["name"]].awaited else "Failed"

    def _timed_out(self) -> str:
        return f"{self.name} was active longer than its activeDeadlineSeconds"

    def _blame(self, name: str, code: int) -> str:
        pod = self._pods.get(name)
        where = f"pod {pod.name}" if pod else name
        said = [line.text for line in self.logs() if name in (line.worker, "mpirun")]
        return f"{where} {output.how(code)}. {output.last_lines(said)}"


def _process(pod: Pod, folders: Mapping[str, str], scratch: Path) -> Process:
    own = {each["name"]: str(each.get("value", "")) for each in pod.container.get("env", [])}
    for each in pod.container.get("env", []):
        if "valueFrom" in each:
            raise JobError(
                f"pod {pod.name}: variable {each['name']} has a valueFrom, which cannot be played here"
            )
    words = [*pod.container.get("command", ()), *pod.container.get("args", ())]
    if not words:
        raise JobError(f"pod {pod.name}: its container has no command; the image's own cannot be played here")
    variables = {name: _moved(value, folders) for name, value in {**own, **pod.variables}.items()}
    return Process(
        pod.worker,
        _program(pod, [_moved(word, folders) for word in words]),
        {**inherited_variables(TORCHRUN), **variables, **_local_variables(pod, scratch)},
        tempfile.gettempdir(),
        awaited=pod.awaited,
        leaves=pod.awaited or not pod.worker.startswith("ps"),
    )


def _folders(pod: Pod, job: TrainingJob, scratch: Path) -> dict[str, str]:
    """The folder here by the path at which it is mounted in the pod."""
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
    folders = {}
    for mount in pod.container.get("volumeMounts", []):
        name = mount["name"]
        if name not in volumes:
            raise JobError(f"pod {pod.name}: volumeMounts has {name!r}, and there is no volume of that name")
        source = volumes[name].get("configMap", {}).get("name")
        if "persistentVolumeClaim" in volumes[name] or source == files.data_name(job):
            folder = data.prepare(job.data)
        elif "emptyDir" in volumes[name] or source == job.name:
            folder = scratch / pod.name / name
        else:
            raise JobError(
                f"pod {pod.name}: volume {name!r} is of {source!r}; there is {job.name!r} and "
                f"{files.data_name(job)!r}"
            )
        folders[mount["mountPath"].rstrip("/")] = str(folder)
    return folders


def _contents(pod: Pod, job: TrainingJob) -> dict[str, str]:
    """What the pod finds in its volumes, text by path below the scratch folder."""
    by_key = {Path(path).name: text for path, text in files.sources(job).items()}
    contents = {f"{pod.name}/hostfile": f"localhost slots={pod.slots}\n"} if pod.slots else {}
    for volume in pod.spec.get("volumes", []):
        root = f"{pod.name}/{volume['name']}"
        if "emptyDir" in volume:
            contents[f"{root}/.keep"] = ""
        elif volume.get("configMap", {}).get("name") == job.name:
            items = volume["configMap"].get("items") or [{"key": key, "path": key} for key in by_key]
            for item in items:
                if item["key"] not in by_key:
                    raise JobError(
                        f"volume {volume['name']!r}: ConfigMap {job.name} has no key {item['key']!r}"
                    )
                contents[f"{root}/{item['path']}"] = by_key[item["key"]]
    return contents


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
    }
    program, *rest = words
    command = f"pod {pod.name}: its command is {program!r}"
    if program == "mpirun":  # whose command holds that of its ranks
        rest = [sys.executable if word == "python" else word for word in rest]
        return (mpirun_program(command), *rest)
    if program not in known:
        raise JobError(f"{command}; played can be {', '.join((*known, 'mpirun'))}")
    return (*known[program], *rest)


def _local_variables(pod: Pod, scratch: Path) -> dict[str, str]:
    """What one machine needs, and pods do not."""
    variables = {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(scratch)}
    if pod.slots:
        hostfile = str(scratch / pod.name / "hostfile")
        variables |= {
            "OMPI_MCA_orte_default_hostfile": hostfile,
            "PRTE_MCA_prte_default_hostfile": hostfile,
            **{f"OMPI_MCA_{name}": value for name, value in MPI_ON_ONE_MACHINE.items()},
            **dict.fromkeys(MPI_FOLDERS, str(scratch)),
        }
    return variables


def _deadline(manifest: Manifest, job: TrainingJob) -> float:
    spec = manifest.resource["spec"]
    policy = spec.get("runPolicy", spec)
    return float(policy.get("activeDeadlineSeconds", job.timeout_seconds))
