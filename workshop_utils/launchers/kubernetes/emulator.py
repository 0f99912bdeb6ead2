"""The pods of a manifest without a cluster: their commands, as processes of this machine.

    run = EmulatedKubernetes().launch(job)                       # what would be sent for this job
    run = EmulatedKubernetes().launch(job, Manifest(resource))   # or a manifest that was changed by hand

Each pod's container becomes a process with the command, the arguments and the variables of the manifest, and those
that the operator would add, so that a mistake in the manifest shows as a run that fails. What differs from a pod:

| in a pod | here |
| --- | --- |
| the image's Python and its packages | this environment's |
| a folder where a volume is mounted | another folder, whose name replaces it in the command and the variables |
| the claim in `outputs` or `checkpoints` | a folder that all pods share, and that goes with the run |
| a service's name and port | the loopback address and a free port |
| mpirun starts ranks on the workers through ssh | it starts them on this machine |
| limits of processor and memory | none |
| GPUs | none |
| a script imports PyTorch or TensorFlow | it forks from a process that has imported it (see `local.warm`) |
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.kubernetes import pods
from workshop_utils.launchers.kubernetes.manifest import Manifest, build
from workshop_utils.launchers.kubernetes.operators import Pod, pods_of, table_of, workers_in
from workshop_utils.launchers.kubernetes.settings import KubernetesSettings
from workshop_utils.launchers.local import environment, warm
from workshop_utils.launchers.local.run import Event, Process, ProcessRun
from workshop_utils.strategies import MPI_FOLDERS, MPI_ON_ONE_MACHINE
from workshop_utils.training import data

if TYPE_CHECKING:
    import pandas as pd

# torchrun's own variables, beside those that no job may inherit from another.
TORCHRUN = re.compile(r"PET_")
# What the programs of an image are here; mpirun is searched for.
PYTHON = (sys.executable,)
PROGRAMS = {"python": PYTHON, "python3": PYTHON, "torchrun": (*PYTHON, "-m", "torch.distributed.run")}


class EmulatedKubernetes(KubernetesSettings):
    """Launches jobs as a cluster would, on this machine. Its fields are those of `KubernetesSettings`."""

    def render(self, job: TrainingJob) -> Manifest:
        """The manifest whose pods are emulated: the one that `Kubernetes` would send. Raises JobError as there."""
        return build(job, self)

    def launch(self, job: TrainingJob, manifest: Manifest | None = None) -> EmulatedPodsRun:
        """Start the pods of `manifest`, by default those of `render`; their files come from the job's folder.

        Raises:
            JobError: as `render` does, or if the manifest names a volume or a program that cannot be emulated.
        """
        environment.refuse_gpus(job, "emulated pods")
        manifest = manifest or self.render(job)
        environment.await_horovod(job)
        return EmulatedPodsRun(job, manifest)


class EmulatedPodsRun(ProcessRun):
    """A run of the pods of a manifest as local processes; its workers are called as on a cluster."""

    def __init__(self, job: TrainingJob, manifest: Manifest) -> None:
        with environment.reserve(len(pods_of(manifest))) as reservation:
            ports = iter(reservation.ports)
            emulated = pods_of(manifest, lambda *_: ("127.0.0.1", next(ports)))
            super().__init__(job.name, workers_in(emulated), reservation)
            self._pods = {pod.worker: pod for pod in emulated}
            self._kind = manifest.resource["kind"]
            self._phases = dict.fromkeys(self._pods, "Pending")
            scratch = environment.scratch_folder()
            # Logs show the paths of the manifest, not those that take their place here.
            self._in_pod = {sys.executable: "python"}
            processes: list[Process] = []
            contents: dict[str, str] = {}
            for pod in emulated:
                folders, files = _volumes(pod, job, scratch)
                contents |= files
                self._in_pod |= {here: there for there, here in folders.items()}
                processes.append(_process(pod, folders, scratch))
            spec = manifest.resource["spec"]
            deadline = spec.get("runPolicy", spec).get("activeDeadlineSeconds", job.timeout_seconds)
            by_python = any(not process.argv[1].startswith("-") for process in processes)
            framework = (
                warm.framework_for(job) if by_python else None
            )  # not for torchrun's ranks, nor mpirun's
            self._start(processes, float(deadline), scratch, contents, start_warm=warm.starter(framework))

    def pods(self) -> pd.DataFrame:
        """The pods as they are now: pod, worker, phase."""
        return table_of((self._pods[worker].name, worker, phase) for worker, phase in self._phases.items())

    def describe(self) -> str:
        """The job and its pods, a line each."""
        lines = [f"{self._kind} {self.name}: {self.state}"]
        lines += [f"pod {self._pods[worker].name}: {phase}" for worker, phase in self._phases.items()]
        return "\n".join(lines + ([self.reason] if self.reason else []))

    def _on_event(self, event: Event) -> None:
        pod = self._pods.get(event.get("name", ""))
        if pod is not None and event["event"] == "started":
            self._phases[pod.worker] = "Running"
        elif pod is not None and event["event"] == "exited":
            # A pod that still runs when the job has ended is deleted, by the cleanPodPolicy.
            failed = "Deleted" if event["code"] < 0 and not pod.awaited else "Failed"
            self._phases[pod.worker] = failed if event["code"] else "Succeeded"
        super()._on_event(event)

    def _take_line(self, name: str, text: str, stream: str) -> None:
        for here, there in self._in_pod.items():
            text = text.replace(here, there)
        super()._take_line(name, text, stream)

    def _timed_out(self) -> str:
        return f"{self.name} was active longer than its activeDeadlineSeconds"

    def _blame(self, name: str, code: int) -> str:
        pod = f"pod {self._pods[name].name}" if name in self._pods else name
        texts = [line.text for line in self.logs() if name in (line.worker, "mpirun")]
        return f"{pod} {output.how(code)}. {output.last_lines(texts)}"


def _volumes(pod: Pod, job: TrainingJob, scratch: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The folder here by the path at which it is mounted in the pod, and the text of files below `scratch`."""
    volumes: dict[str, Any] = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
    sources = {Path(path).name: text for path, text in pods.sources(job).items()}
    folders, files = {}, {}
    for mount in pod.container.get("volumeMounts", []):
        name, below = mount["name"], f"{pod.name}/{mount['name']}"
        if name not in volumes:
            raise JobError(f"pod {pod.name}: volumeMounts has {name!r}, and there is no volume of that name")
        volume, folder = volumes[name], None
        config = volume.get("configMap", {})
        if config.get("name") == job.name:
            for item in config.get("items") or [{"key": key, "path": key} for key in sources]:
                if item["key"] not in sources:
                    raise JobError(f"volume {name!r}: ConfigMap {job.name} has no key {item['key']!r}")
                files[f"{below}/{item['path']}"] = sources[item["key"]]
        elif "emptyDir" in volume:
            files[f"{below}/.keep"] = ""
        elif "persistentVolumeClaim" in volume and "subPath" in mount:
            below = f"claims/{volume['persistentVolumeClaim']['claimName']}/{mount['subPath']}"
            files[f"{below}/.keep"] = ""
        elif "persistentVolumeClaim" in volume or config.get("name") == pods.data_name(job):
            folder = data.prepare(job.data)
        else:
            known = f"there is {job.name!r} and {pods.data_name(job)!r}"
            raise JobError(f"pod {pod.name}: volume {name!r} is of {config.get('name')!r}; {known}")
        folders[mount["mountPath"].rstrip("/")] = str(folder or scratch / below)
    if pod.worker == "mpirun":
        files[f"{pod.name}/hostfile"] = f"localhost slots={len(pod.starts)}\n"
    return folders, files


def _process(pod: Pod, folders: Mapping[str, str], scratch: Path) -> Process:
    own = {}
    for each in pod.container.get("env", []):
        if "valueFrom" in each:
            raise JobError(f"pod {pod.name}: variable {each['name']} has a valueFrom, which is not emulated")
        own[each["name"]] = str(each.get("value", ""))
    words = [*pod.container.get("command", ()), *pod.container.get("args", ())]
    if not words:
        raise JobError(f"pod {pod.name}: its container has no command; the image's own is not emulated")
    program, *rest = [_here(word, folders) for word in words]
    about = f"pod {pod.name}: its command is {program!r}"
    variables = {name: _here(value, folders) for name, value in {**own, **pod.variables}.items()}
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(scratch)}
    if program == "mpirun":
        hostfile = str(scratch / pod.name / "hostfile")
        variables |= {
            "OMPI_MCA_orte_default_hostfile": hostfile,
            "PRTE_MCA_prte_default_hostfile": hostfile,
            **{f"OMPI_MCA_{name}": value for name, value in MPI_ON_ONE_MACHINE.items()},
            **dict.fromkeys(MPI_FOLDERS, str(scratch)),
        }
        # Its command holds that of its ranks.
        ranks = [sys.executable if word == "python" else word for word in rest]
        command = [environment.mpirun_program(about), *ranks]
    elif program in PROGRAMS:
        command = [*PROGRAMS[program], *rest]
    else:
        raise JobError(f"{about}; the emulator has {', '.join((*PROGRAMS, 'mpirun'))}")
    return Process(
        pod.worker,
        tuple(command),
        {**environment.inherited_variables(TORCHRUN), **environment.NO_GPU, **variables},
        tempfile.gettempdir(),
        awaited=pod.awaited,
        leaves=pod.awaited or not pod.worker.startswith("ps"),
    )


def _here(text: str, folders: Mapping[str, str]) -> str:
    """`text` with the folders of this machine in the place of those of the pod."""
    for mounted in sorted(folders, key=len, reverse=True):
        folder = folders[mounted].replace("\\", r"\\")
        text = re.sub(rf"{re.escape(mounted)}(?=[/:]|$)", folder, text)
    return text
