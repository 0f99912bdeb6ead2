"""The pods of a manifest without a cluster: their commands, as processes of this machine.

    run = EmulatedKubernetes().launch(job)                       # what would be sent for this job
    run = EmulatedKubernetes().launch(job, Manifest(resource))   # or a manifest that was changed by hand

Each pod's container becomes a process with the command, the arguments and the variables of the manifest, and those
that the operator adds, so that a mistake in the manifest shows as a run that fails. The operator is `reconcile` of
`operators`, or another function of that kind: it has pods made, replaced and deleted. What differs:

| on a cluster | here |
| --- | --- |
| an init container waits for the master's name | a process tries to connect until it can |
| a failed container is restarted in its pod, later and later | the operator replaces the pod, at once |
| a pod that is being deleted counts as failed | it is missing, and is made again whatever its policy |
| the image's Python and its packages | this environment's |
| a folder in the image (`folder` of place.yaml) | a copy of the job's |
| variables of the cluster's nodes | those of your shell, which a script sees here |
| an init container unpacks the job's archives | so does the process that watches over the pod, for each pod anew |
| a folder where a volume is mounted | another folder, whose name replaces it in the command and the variables |
| the claim in `data_claim`, read alone | the folder that the job's `data` names, in which a script may write |
| the claim in `outputs` or `checkpoints` | a folder that all pods share, and that goes with the run |
| a service's name and port | the loopback address and a free port |
| mpirun starts ranks on the workers through ssh | it starts them on this machine |
| nodes, a scheduler and its queues | this machine |
| PYTHONPATH is the job's folder | a folder comes first by which Python answers where it stands |
| limits of processor and memory | none |
| GPUs | none |
| a script imports PyTorch or TensorFlow | it forks from a process that has imported it (see `local.warm`) |
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import math
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import output, source
from workshop_utils.launchers.kubernetes import check, config_maps, operators
from workshop_utils.launchers.kubernetes.manifest import Manifest, build
from workshop_utils.launchers.kubernetes.operators import Pod, pods_of, table_of, workers_in
from workshop_utils.launchers.kubernetes.settings import KubernetesSettings
from workshop_utils.launchers.local import environment, warm
from workshop_utils.launchers.local.run import Event, Process, ProcessGroup, ProcessRun
from workshop_utils.launchers.template import expanded, relocated
from workshop_utils.network import LOOPBACK_INTERFACE
from workshop_utils.network.ports import PortReservation
from workshop_utils.runs import RunState
from workshop_utils.strategies import MPI_FOLDERS, MPI_ON_ONE_MACHINE
from workshop_utils.training import data

if TYPE_CHECKING:
    import pandas as pd

# torchrun's own variables, beside those that no job may inherit from another.
TORCHRUN = re.compile(r"PET_")
# What the programs of an image are here; mpirun is searched for.
PYTHON = (sys.executable,)
TORCH = Path(str(getattr(importlib.util.find_spec("torch"), "origin", "torch"))).parent
PROGRAMS = {"python": PYTHON, "python3": PYTHON, "torchrun": (*PYTHON, f"{TORCH}/distributed/run.py")}

# What the emulator can do of an init container.
UNPACKS = re.compile(r"tar -xzf (\S+)/(\S+) -C (\S+)")
# What a pod is after its process has ended so.
PHASES = {"succeeded": "Succeeded", "failed": "Failed", "timeout": "Failed", "stopped": "Deleted"}
GRACE_SECONDS = 3.0  # on a cluster 30, unless the pod says otherwise
# A function that takes the job and the phases of its pods, and says what to do.
Loop = Callable[[dict[str, Any], dict[str, str]], list[operators.Action]]


class EmulatedKubernetes(KubernetesSettings):
    """Launches jobs as a cluster would, on this machine. Its fields are those of `KubernetesSettings`."""

    def render(self, job: TrainingJob) -> Manifest:
        """The manifest whose pods are emulated: the one that `Kubernetes` would send.

        Raises:
            JobError: as there, and for what this machine does not have.
        """
        _check(job)
        return build(job, self)

    def launch(
        self, job: TrainingJob, manifest: Manifest | None = None, reconcile: Loop | None = None
    ) -> EmulatedPodsRun:
        """Have `reconcile`, by default the workshop's own operator, make the pods of `manifest`, or of `render`.

        Raises:
            JobError: for what Kubernetes, or an operator, would refuse, and for a volume or a program that cannot be
                emulated.
        """
        if manifest is None:
            manifest = self.render(job)
        else:
            _check(job)
            for described in manifest.objects:
                check.require(described)
        environment.await_packages(job)
        return EmulatedPodsRun(job, manifest, reconcile)


def _check(job: TrainingJob) -> None:
    environment.refuse_gpus(job, "emulated pods")
    environment.check_request(job)


class EmulatedPodsRun(ProcessRun):
    """A run of the pods of a manifest as local processes, which an operator's loop creates, replaces and deletes.

    The workers are called as on a cluster. Each pod has a supervisor of its own, so that it can be lost on its own.
    """

    def __init__(self, job: TrainingJob, manifest: Manifest, loop: Loop | None) -> None:
        wanted = pods_of(manifest)
        self._job = {**copy.deepcopy(manifest.resource), "status": {}}
        self._loop: Loop = loop or (lambda job, observed: operators.reconcile(job, observed, wanted))
        self._wanted = {pod.name: pod for pod in wanted}
        self._phases: dict[str, str] = {}
        self._running: dict[str, ProcessGroup] = {}
        self._failures: list[Event] = []
        self._why = "failed: the operator's loop said so"
        self._stopped = False
        self._observing = threading.RLock()
        self._scratch = environment.scratch_folder()
        # Logs show the paths of the manifest, not those that take their place here.
        self._in_pod = {sys.executable: "python"}
        # By pod: its process, and what is in its folder.
        self._started_with: dict[str, tuple[Process, dict[str, str], dict[str, bytes]]] = {}
        reservation = PortReservation(len(wanted))
        ports = iter(reservation.ports)
        super().__init__(job.name, workers_in(wanted), reservation)
        volumes = [volume for pod in wanted for volume in pod.spec.get("volumes", [])]
        with_data = any(config_maps.data_name(job) in _config_maps(volume) for volume in volumes)
        carried = config_maps.archives(job, manifest.archive or config_maps.packed(job), with_data)
        for pod in pods_of(manifest, lambda *_: ("127.0.0.1", next(ports))):
            archives = _unpacked(pod, carried)
            folders, files = _volumes(pod, job, self._scratch, archives)
            if (folder := pod.container.get("workingDir")) and folder not in folders:  # in the image
                archives["image"] = source.packed(job.replace(data=None))  # which would leave out its data
                folders[folder] = str(_own(pod, self._scratch) / "image")
            self._in_pod |= {here: there for there, here in folders.items()}
            process = _process(pod, folders, _own(pod, self._scratch))
            self._started_with[pod.name] = process, files, archives
        by_python = any(each.argv[0] == sys.executable for each, *_ in self._started_with.values())
        # Not for mpirun and its ranks, nor for the ranks of torchrun.
        self._start_warm = warm.starter(warm.framework_for(job) if by_python else None)
        self.warm = self._start_warm is not None
        policy = self._job["spec"].get("runPolicy", self._job["spec"])
        self._deadline = time.monotonic() + policy.get("activeDeadlineSeconds", job.timeout_seconds)
        self._most_failures = policy.get("backoffLimit", math.inf)
        self._reconcile()

    def pods(self) -> pd.DataFrame:
        """The pods as they are now: pod, worker, phase."""
        return table_of((name, self._wanted[name].worker, phase) for name, phase in self._phases.items())

    def describe(self) -> str:
        """The job and its pods, a line each."""
        lines = [f"{self._job['kind']} {self.name}: {self.state}"]
        lines += [f"pod {name}: {phase}" for name, phase in self._phases.items()]
        return "\n".join(lines + ([self.reason] if self.reason else []))

    def delete_pod(self, name: str) -> None:
        """End a pod now, as a person may, or a node that is drained. The operator finds it missing."""
        with self._observing:
            if name not in self._running:
                raise JobError(f"no pod {name!r} runs; there are: {', '.join(self._running) or 'none'}")
            self._running[name].stop()

    def _reconcile(self) -> None:
        """Have the loop look at the pods, and do what it says, until that changes nothing more."""
        with self._observing:
            try:
                while not self._stopped:
                    observed = {name: phase for name, phase in self._phases.items() if phase != "Deleted"}
                    actions = self._loop(self._job, observed)
                    if not [action for action in actions if getattr(self, f"_{action[0]}")(*action[1:])]:
                        break
            except Exception as error:
                self._why = f"failed: the operator's loop stopped with {type(error).__name__}: {error}"
                self._condition("Failed")
                self._request_stop()
            if not self._running and (self._stopped or self._job["status"]):
                self._end()

    def _create(self, name: str, _labels: Mapping[str, str], variables: Mapping[str, str]) -> bool:
        if name not in self._wanted or self._phases.get(name, "Deleted") != "Deleted":
            exists = "already exists" if name in self._wanted else f"is none of {', '.join(self._wanted)}"
            raise JobError(f"pod {name} {exists}")
        process, files, archives = self._started_with[name]
        given, pod = process.environment, self._wanted[name]
        manifest_own = {each["name"] for each in pod.container.get("env", [])}
        kept = {key: given[key] for key in given if key not in pod.variables or key in manifest_own}
        # What names a service on a cluster is another address here.
        known = pod.variables
        told = {key: given[key] if text == known.get(key) else text for key, text in variables.items()}
        self._phases[name] = "Pending"
        self._running[name] = ProcessGroup(
            [dataclasses.replace(process, environment={**kept, **told})],
            functools.partial(self._on_pod_event, name),
            max(0.1, self._deadline - time.monotonic()),
            _own(pod, self._scratch),
            files,
            self._start_warm,
            archives=archives,
        )
        return True

    def _delete(self, name: str) -> bool:
        if name in self._running:
            # As on a cluster, a pod has a while in which it may end by itself.
            succeeded = self._job["status"].get("condition") == "Succeeded"
            _later(GRACE_SECONDS if succeeded else 0, self._running[name].stop)
            return False
        self._phases[name] = "Deleted"
        return True

    def _condition(self, condition: str) -> bool:
        if self._job["status"]:
            return False  # it is final
        self._job["status"]["condition"] = condition
        # Whatever the cleanPodPolicy: a run leaves nothing behind.
        _later(GRACE_SECONDS + 1, self._request_stop)
        return True

    def _on_pod_event(self, name: str, event: Event) -> None:
        if event["event"] in ("started", "lines", "silent"):
            if event["event"] == "started":
                self._phases[name] = "Running"
            super()._on_event(event)
        elif event["event"] == "ended":
            with self._observing:
                del self._running[name]
                self._phases[name] = PHASES[event["outcome"]]
                if self._phases[name] == "Failed":
                    self._failures.append(event)
                is_late = any(each["outcome"] == "timeout" for each in self._failures)
                if is_late and self._running:
                    return  # the others meet the same deadline, and show their stacks before they end
                if is_late or len(self._failures) > self._most_failures:
                    self._condition("Failed")
                self._reconcile()

    def _request_stop(self) -> None:
        with self._observing:
            self._stopped = True
            for group in self._running.values():
                group.stop()
            if not self._running:
                self._end()

    def _end(self) -> None:
        self._reservation.release()
        shutil.rmtree(self._scratch, ignore_errors=True)
        if (condition := self._job["status"].get("condition")) != "Failed":
            failed = [name for name, phase in self._phases.items() if condition and phase == "Failed"]
            for name in failed:
                note = f"pod {name} failed; the job has succeeded all the same, as the operator counts it"
                self._receive_line(self.name, note, "stderr")
            self._finish(RunState.SUCCEEDED if condition else RunState.STOPPED)
        elif not self._failures:
            self._finish(RunState.FAILED, f"{self.name} {self._why}")
        else:  # peers of a pod that was killed fail, too, and may be known first
            killed = [event for event in self._failures if event.get("code") == -signal.SIGKILL]
            self._finish(*self._verdict((killed or self._failures)[0]))

    def _receive_line(self, worker: str, text: str, stream: str = "stdout") -> None:
        for here, there in self._in_pod.items():
            text = text.replace(here, there)
        super()._receive_line(worker, text, stream)

    def _timed_out(self) -> str:
        return f"{self.name} was active longer than its activeDeadlineSeconds. {self._hang.explained(self)}"

    def _blame(self, name: str, code: int) -> str:
        pod = next(f"pod {pod.name}" for pod in self._wanted.values() if pod.worker == name)
        names = (name, *self.workers) if name == "mpirun" else (name,)
        return f"{pod} {output.how(code)}. {output.explained(self, names, code)}"


def _later(seconds: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def _own(pod: Pod, scratch: Path) -> Path:
    """The pod's own folder, which its supervisor makes and removes."""
    return Path(f"{scratch}-{pod.name}")


def _volumes(
    pod: Pod, job: TrainingJob, scratch: Path, archives: Mapping[str, bytes]
) -> tuple[dict[str, str], dict[str, str]]:
    """The folder here by the path at which it is mounted in the pod, and the text of files in the pod's own folder."""
    folders, files = {}, {}
    for mount in pod.container.get("volumeMounts", []):
        name, folder = mount["name"], _own(pod, scratch) / mount["name"]
        volume = _volume(pod, name)
        claim = volume.get("persistentVolumeClaim")
        if claim and "subPath" in mount:
            folder = scratch / claim["claimName"] / mount["subPath"]
            folder.mkdir(parents=True, exist_ok=True)
        elif claim:
            folder = data.prepare_all(job.data) if job.data else scratch
        elif "emptyDir" not in volume:
            raise JobError(
                f"pod {pod.name}: volume {name!r} is neither an emptyDir nor a claim, which are emulated"
            )
        elif name not in archives:
            files[f"{name}/.keep"] = ""
        folders[mount["mountPath"].rstrip("/")] = str(folder)
    if pod.worker == "mpirun":
        files["hostfile"] = f"localhost slots={len(pod.children)}\n"
    return folders, files


def _volume(pod: Pod, name: str) -> dict[str, Any]:
    return next(volume for volume in pod.spec.get("volumes", []) if volume["name"] == name)


def _config_maps(volume: Mapping[str, Any]) -> list[str]:
    """The names of the ConfigMaps in a projected volume."""
    sources = volume.get("projected", {}).get("sources", [])
    return [each["configMap"]["name"] for each in sources if each.get("configMap", {}).get("name")]


def _unpacked(pod: Pod, carried: Mapping[tuple[str, str], bytes]) -> dict[str, bytes]:
    """The archive that the pod's init containers unpack into each volume, by the volume's name.

    `carried` holds the job's archives by ConfigMap and key.
    """
    archives = {}
    for init in pod.spec.get("initContainers", []):
        mounted = {mount["mountPath"]: mount["name"] for mount in init.get("volumeMounts", [])}
        *shell, script = [*init.get("command", []), *init.get("args", [])] or [""]
        for command in script.split(" && "):
            about = f"pod {pod.name}: init container {init['name']!r} runs {command!r}"
            unpacks = UNPACKS.fullmatch(command) if shell == ["sh", "-c"] else None
            at, key, folder = unpacks.groups() if unpacks else ("", "", "")
            if not {at, folder} <= mounted.keys():
                right = "it must be tar -xzf ARCHIVE -C FOLDER, from and to where it mounts a volume"
                raise JobError(f"{about}; {right}: {', '.join(mounted)}")
            names = _config_maps(_volume(pod, mounted[at]))
            found = [carried[name, key] for name in names if (name, key) in carried]
            if not found:
                raise JobError(f"{about}; of the job's ConfigMaps, none of {', '.join(names)} has that key")
            archives[mounted[folder]] = found[0]
    return archives


def _process(pod: Pod, folders: Mapping[str, str], scratch: Path) -> Process:
    own: dict[str, str] = {}
    for each in pod.container.get("env", []):
        if "valueFrom" in each:
            raise JobError(f"pod {pod.name}: variable {each['name']} has a valueFrom, which is not emulated")
        own[each["name"]] = expanded(str(each.get("value", "")), own)
    words = [*pod.container.get("command", ()), *pod.container.get("args", ())]
    if not words:
        raise JobError(f"pod {pod.name}: its container has no command; the image's own is not emulated")
    program, *rest = [relocated(expanded(word, own | dict(pod.variables)), folders) for word in words]
    about = f"pod {pod.name}: its command is {program!r}"
    variables = {name: relocated(value, folders) for name, value in {**own, **pod.variables}.items()}
    variables |= {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "TMPDIR": str(scratch)}
    if (
        "PET_RDZV_ENDPOINT" in pod.variables
    ):  # here every pod could hold torchrun's store, on a cluster the first can
        variables["PET_RDZV_CONF"] = f"is_host={pod.name.endswith('-worker-0')}"
    if program == "mpirun":
        hostfile = str(scratch / "hostfile")
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
    inherited = {**environment.inherited_variables(TORCHRUN), **environment.NO_GPU}
    folder = folders.get(pod.container.get("workingDir", ""), str(scratch))
    return Process(pod.worker, tuple(command), {**inherited, **variables}, folder)
