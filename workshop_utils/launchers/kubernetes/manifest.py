"""The objects of one job: what the resource of each kind looks like, and the YAML in which people write it."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from workshop_utils.jobs import JobError, Resources, TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.kubernetes import check, config_maps, pods
from workshop_utils.launchers.kubernetes.settings import NO_REGISTRY, Kind, KubernetesSettings, nodes_of
from workshop_utils.launchers.source import PACKAGE
from workshop_utils.launchers.template import filled
from workshop_utils.strategies import TORCHRUN_RESTARTS, script_words, strategy_of

TEMPLATES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8"))
# The names of containers. Each operator looks for its own, and sets its variables in that one alone; of MPI's and a
# plain Job's the name does not matter.
TENSORFLOW, PYTORCH, NODE, MPI, WORKER = "tensorflow", "pytorch", "node", "mpi", "worker"
CONTAINERS = {"TFJob": TENSORFLOW, "PyTorchJob": PYTORCH, "TrainJob": NODE, "MPIJob": MPI, "Job": WORKER}
TF_ROLES = {"chief": "Chief", "ps": "PS", "worker": "Worker"}
# The key comes from a Secret, whose files' owner sshd would otherwise not trust.
SSHD = ("/usr/sbin/sshd", "-De", "-o", "StrictModes=no")
# Pods do not know each other's keys; and a worker's name may not be known to the DNS in its first seconds.
SSH = "-o StrictHostKeyChecking=no -o ConnectionAttempts=10"
LONGEST_SECONDS = 2**31 - 1  # which a field of Kubernetes can hold
KEEP_SECONDS = 3600  # the finished job, where nobody deletes it
QUEUE = "scheduling.volcano.sh/queue-name"
UNSAVED = "The model goes with its pod. To keep it, give the job outputs on a volume, claim:NAME."


@dataclass(frozen=True)
class Manifest:
    """What is sent: `resource` is the job itself, `before` what it refers to; printed, it is YAML for kubectl.

    Attributes:
        archive: the job's folder, which travels in a ConfigMap.
    """

    resource: dict[str, Any]
    before: tuple[dict[str, Any], ...] = ()
    comment: str = ""
    archive: bytes = b""

    @property
    def objects(self) -> tuple[dict[str, Any], ...]:
        """All of it, in the order in which it is made."""
        return (*self.before, self.resource)

    def __str__(self) -> str:
        return self.comment + yaml_of(self.objects)

    def __repr__(self) -> str:  # as a notebook and `--render` show it
        def shown(each: dict[str, Any]) -> dict[str, Any]:
            has_value = {"name", "value"} <= each.keys()
            return {**each, "value": output.masked(each["name"], each["value"])} if has_value else each

        return self.comment + yaml_of(json.loads(json.dumps(self.objects), object_hook=shown))


def build(job: TrainingJob, settings: KubernetesSettings) -> Manifest:
    """The manifest of `job`.

    Raises:
        JobError: for what Kubernetes, or an operator, would refuse.
    """
    kind, (nodes, processes) = settings.kind_for(job), nodes_of(job)
    if not 1 <= job.timeout_seconds <= LONGEST_SECONDS:
        raise JobError(
            f"timeout is {job.timeout!r}; Kubernetes counts whole seconds: 1 to {LONGEST_SECONDS}, 68 years"
        )
    in_image = settings.folder is not None
    _check_folder(job, settings)
    archive = config_maps.packed(job, in_image)
    if settings.data_claim is None:
        config_maps.check_data(job)
    job = settings.with_defaults(job)
    elastic = settings.elastic
    if elastic is not None:
        job = job.replace(environment={**TORCHRUN_RESTARTS, **job.environment})
    torchrun = kind == "TrainJob" or (kind == "PyTorchJob" and (elastic is not None or processes > 1))
    # torchrun sets the same in either kind
    variables = pods.variables(job, "TrainJob" if torchrun else kind, settings.data_claim)
    if elastic is not None:  # what restarted ranks go on from: at least as long as their pod is there
        variables.setdefault("WORKSHOP_CHECKPOINTS", f"{pods.FOLDERS['model']}/checkpoints")
    volumes, mounts = pods.storage(job, settings.namespace, settings.data_claim)
    unpacked = pods.unpacked(job, settings.data_claim)
    if job.resources.gpu or processes > 1:
        volumes, mounts = [*volumes, pods.SHARED_MEMORY], [*mounts, pods.SHARED_MEMORY_MOUNT]
    beside = f"{pods.FOLDERS['job']}/" if in_image else ""
    script = script_words(job, script=job.script, start=f"{beside}workshop_utils/start.py")
    pod = {
        "restart": "Never" if kind in ("TrainJob", "Job") else None,
        "selector": settings.node_selector or None,
        "container": CONTAINERS[kind],
        "image": settings.image_for(job),
        "unpack": pods.unpack(unpacked),
        "unpack_mounts": [pods.ARCHIVES, *(each for each in mounts if each["name"] in unpacked)],
        "folder": settings.folder or pods.FOLDERS["job"],
        # After "--" torchrun takes no argument of the script, such as `--n`, for an option of its own.
        "command": [*(["torchrun", "--"] if torchrun else ["python"]), *script],
        "args": job.command_line_arguments or None if kind != "TrainJob" else None,
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "resources": pods.resources(job.resources, processes, settings.pod_resources),
        "mounts": mounts,
        "volumes": volumes,
        "scheduler": settings.gang if kind != "Job" else None,  # whose single pod needs no gang
    }
    roles = _roles(job, kind, nodes, elastic is not None, ["python", *script], [*variables])
    replicas = {
        role: {
            "replicas": count,
            "restartPolicy": "Never" if elastic is None else "OnFailure",
            "template": filled(TEMPLATES["pod"], {**pod, **own}),
        }
        for role, (count, own) in roles.items()
        if count
    }
    values: dict[str, Any] = {
        **pod,
        "name": job.name,
        "namespace": settings.namespace,
        "nodes": nodes,
        "processes": processes,
        "timeout": round(job.timeout_seconds),
        "keep": KEEP_SECONDS,
        "retries": 0 if kind == "MPIJob" else None,
        "replicas": replicas,
        # By default worker 0 would decide.
        "success": "AllWorkers" if kind == "TFJob" and "Chief" not in replicas else None,
        "torchrun_processes": str(processes) if torchrun else None,
        "elastic": elastic and elastic.policy,
        "gang": _gang(settings, kind, nodes, sum(count for count, _ in roles.values())),
        "pod_group": {settings.gang: {}} if settings.gang else None,
        "template_metadata": {"annotations": {QUEUE: settings.queue}} if settings.queue else None,
        "trainer_args": job.command_line_arguments or None,
    }
    *before, resource = _unexpanded(filled(TEMPLATES[kind], values))
    for described in (*before, resource):
        check.require(described)
    return Manifest(resource, tuple(before), _how_to(job, settings), archive)


def _check_folder(job: TrainingJob, settings: KubernetesSettings) -> None:
    """Raise JobError for a folder in the image if no image is named, or a volume of the pod hides it."""
    folder = settings.folder
    if folder is None:
        return
    if not (job.image or settings.image):
        raise JobError(f"folder is {folder!r}; name the image that has the job's folder there in image")
    volumes = [*pods.FOLDERS.values(), pods.SHARED_MEMORY_MOUNT["mountPath"]]
    if any(Path(os.path.normpath(folder)).is_relative_to(volume) for volume in volumes):
        raise JobError(
            f"folder is {folder!r}; a volume of the pod hides it there: take another, such as /app"
        )


def _unexpanded(value: Any, below: str = "") -> Any:
    """`value` with `$$` for each `$` that the kubelet would read: in commands, arguments and variables' values."""
    if isinstance(value, dict):
        return {name: _unexpanded(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_unexpanded(each, below) for each in value]
    read = isinstance(value, str) and below in ("command", "args", "value")
    return re.sub(r"\$(?=[$(])", "$$", value) if read else value


def _roles(
    job: TrainingJob, kind: Kind, nodes: int, elastic: bool, command: list[str], variables: list[str]
) -> dict[str, tuple[int, dict[str, Any]]]:
    """How many pods each role has, and what is its own in their templates.

    `command` and `variables`, their names, are those of the processes that mpirun starts.
    """
    if kind == "TFJob":
        counts = Counter(TF_ROLES[spec.role] for spec in strategy_of(job).plan(job))
        # A chief beside servers hands out steps, and computes none.
        idle = ("Chief", "PS") if "PS" in counts else ()
        without = {"resources": pods.resources(job.resources.model_copy(update={"gpu": 0}))}
        return {role: (count, without if role in idle else {}) for role, count in counts.items()}
    if kind == "PyTorchJob":
        return {"Worker": (nodes, {})} if elastic else {"Master": (1, {}), "Worker": (nodes - 1, {})}
    if kind != "MPIJob":
        return {}
    mpirun = [
        *("mpirun", "-n", str(job.workers), "--allow-run-as-root", "--tag-output", "--bind-to", "none"),
        *("--mca", "plm_rsh_args", SSH),
        *(word for name in ("PATH", *variables) for word in ("-x", name)),
    ]
    launcher = {
        "command": mpirun,
        "args": [*command, *job.command_line_arguments],
        "resources": pods.resources(Resources(cpu=1, memory="512Mi")),
    }
    worker = {"command": list(SSHD), "args": None, "env": None}  # mpirun hands over the launcher's variables
    return {"Launcher": (1, launcher), "Worker": (nodes, worker)}


def _gang(settings: KubernetesSettings, kind: Kind, nodes: int, count: int) -> dict[str, Any] | None:
    """The schedulingPolicy: how many pods start together, in which queue."""
    # The launcher of an MPIJob is made once its workers run, so that they must not wait for it. An MPI operator that
    # schedules gangs would have them wait, whether a job asks for a gang or not.
    if settings.gang is None and kind != "MPIJob":
        return None
    least = nodes if kind == "MPIJob" else settings.elastic.min_workers if settings.elastic else count
    return {"minAvailable": least, **({"queue": settings.queue} if settings.queue else {})}


def _how_to(job: TrainingJob, settings: KubernetesSettings) -> str:
    """How to send the same with kubectl."""
    folder = job.folder.resolve()
    if folder.is_relative_to(PACKAGE.parent):
        folder = folder.relative_to(PACKAGE.parent)
    space = f" --namespace {settings.namespace}" if settings.namespace != "default" else ""
    manifest = (folder / config_maps.RENDERED).as_posix()
    in_checkout = (PACKAGE.parent / "pyproject.toml").is_file()
    here = "the repository's root" if in_checkout else f"{PACKAGE.parent}, where the package is installed"
    printed = config_maps.printed_by(
        job, folder.as_posix(), settings.data_claim is None, settings.folder is not None
    )
    lines = [
        f"By hand: keep this text as {manifest}; then, from {here}:",
        *f"{printed} | kubectl create{space} -f -".splitlines(),
    ]
    lines.append(f"kubectl create -f {manifest}")
    if settings.image_for(job).startswith(NO_REGISTRY):
        lines.append("In the place of REGISTRY belongs yours: jobs/images/build.sh pushes the image there.")
    if job.outputs is None:
        lines.append(UNSAVED)
    return "".join(f"# {line}\n" for line in lines)


def yaml_of(objects: Iterable[dict[str, Any]]) -> str:
    """`objects` as YAML, each a document of its own, in block style."""
    copies = json.loads(json.dumps(list(objects)))  # what occurs twice is written twice, not by reference
    return yaml.safe_dump_all(copies, sort_keys=False, width=100)
