"""What a pod of a job looks like, whatever kind of resource it belongs to, and what it mounts.

| in the container | what it is |
| --- | --- |
| `/workshop/job` | the working directory: the job's folder, and `workshop_utils/` with what its script may import |
| `/workshop/data` | the data: unpacked like the folder, or a claim |
| `/workshop/model` | a sub-folder of the claim in `outputs`; or an empty folder, which goes with the pod |
| `/workshop/checkpoints` | a sub-folder of the claim in `checkpoints`, where the job names one |
| `/dev/shm` | memory, through which the processes and the GPUs of one pod communicate |

An init container unpacks the archives of the ConfigMaps, which it finds in `/workshop/archives`, into folders that go
with the pod. It has the same image: that of a training has tar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from workshop_utils.jobs import JobError, Resources, TrainingJob
from workshop_utils.launchers.kubernetes.check import is_quantity
from workshop_utils.launchers.kubernetes.config_maps import DATA, JOB, data_name
from workshop_utils.launchers.kubernetes.settings import nodes_of
from workshop_utils.launchers.local.environment import data_variables
from workshop_utils.strategies import Addresses, strategy_of

FOLDERS = {name: f"/workshop/{name}" for name in ("job", "data", "model", "checkpoints")}
ARCHIVES = {"name": "archives", "mountPath": "/workshop/archives"}
# Behind /dev/shm: part of the pod's memory. A container's own has 64 MB, too little for NCCL and data loaders.
SHARED_MEMORY = {"name": "shm", "emptyDir": {"medium": "Memory"}}
SHARED_MEMORY_MOUNT = {"name": "shm", "mountPath": "/dev/shm"}

# The variables of a strategy that the manifest leaves out, by kind: the operator sets them, or torchrun and mpirun do,
# which start the script. Nobody sets the interface: its name is not known before the pod runs, and Gloo finds it.
LEFT_OUT = {
    "Job": "",
    "TFJob": "TF_CONFIG",
    "PyTorchJob": "MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|GROUP_RANK|GLOO_SOCKET_IFNAME",
    "TrainJob": "MASTER_ADDR|MASTER_PORT|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|GLOO_SOCKET_IFNAME",
    "MPIJob": "HOROVOD_.*",
}


def variables(job: TrainingJob, kind: str, data_claim: str | None) -> dict[str, str]:
    """The variables that the manifest sets in every pod, those of the strategy included.

    Raises:
        JobError: if `checkpoints` is no claim.
    """
    threads = str(max(1, int(job.resources.cpu)))
    nodes = [f"{job.name}-{node}" for node in range(nodes_of(job)[0])]
    specs = strategy_of(job).plan(job, Addresses(nodes=nodes))
    worker = next(spec for spec in specs if spec.role == "worker")
    left_out = re.compile(LEFT_OUT[kind])
    return {
        "PYTHONPATH": FOLDERS["job"],
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,  # not INTEROP: with one, a parameter server's steps deadlock
        **({"WORKSHOP_DATA": FOLDERS["data"]} if data_claim else {}),
        **data_variables(job, FOLDERS["data"]),
        "WORKSHOP_MODEL": FOLDERS["model"],
        **({"WORKSHOP_CHECKPOINTS": FOLDERS["checkpoints"]} if _claim(job, "checkpoints") else {}),
        **{name: text for name, text in worker.environment.items() if not left_out.fullmatch(name)},
        **job.environment,
    }


def resources(
    wanted: Resources, processes: int = 1, further: Mapping[str, int | str] | None = None
) -> dict[str, Any]:
    """The limits of a container with so many processes. They are its requests too, where none are given."""
    cpus = wanted.cpu * processes
    cpu: int | str = int(cpus) if float(cpus).is_integer() else f"{math.ceil(cpus * 1000)}m"
    as_written = processes == 1 and is_quantity(wanted.memory)
    memory = wanted.memory if as_written else str(wanted.memory_nbytes * processes)
    gpu = {"nvidia.com/gpu": wanted.gpu * processes} if wanted.gpu else {}
    return {"limits": {"cpu": cpu, "memory": memory, **gpu, **(further or {})}}


def unpacked(job: TrainingJob, data_claim: str | None) -> dict[str, tuple[str, str]]:
    """By the name of a folder, the ConfigMap and its key that hold the archive of what is in it."""
    with_data = data_claim is None and job.data is not None
    return {"job": (job.name, JOB), **({"data": (data_name(job), DATA)} if with_data else {})}


def unpack(folders: Mapping[str, tuple[str, str]]) -> str:
    """The command that unpacks `folders`."""
    tar = "tar -xzf {}/{} -C {}"
    return " && ".join(
        tar.format(ARCHIVES["mountPath"], key, FOLDERS[name]) for name, (_, key) in folders.items()
    )


def storage(
    job: TrainingJob, namespace: str, data_claim: str | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volumes of a pod, and where its container mounts them.

    Model and checkpoints are in sub-folders by namespace and job: namespaces may share a file system. A claim that is
    named twice is one volume: a pod with two volumes of one claim may wait for it for ever.

    Raises:
        JobError: if `outputs` or `checkpoints` is no claim.
    """
    archives = unpacked(job, data_claim)
    claims = {"data": data_claim, "model": _claim(job, "outputs"), "checkpoints": _claim(job, "checkpoints")}
    sources = [{"configMap": {"name": name}} for name, _ in archives.values()]
    volumes: dict[str, dict[str, Any]] = {"archives": {"projected": {"sources": sources}}}
    mounts = []
    for name, folder in FOLDERS.items():
        volume, source, mount = name, dict[str, Any](), dict[str, Any](mountPath=folder)
        if claim := claims.get(name):
            volume = next(first for first in claims if claims[first] == claim)
            source = {"persistentVolumeClaim": {"claimName": claim}}
            if name != "data":
                mount |= {"subPath": f"{namespace}/{job.name}/{name}"}
            elif list(claims.values()).count(claim) == 1:
                source["persistentVolumeClaim"] |= {"readOnly": True}
            else:
                mount |= {"readOnly": True}
        elif name in archives or name == "model":
            source = {"emptyDir": {}}
        if source:
            volumes.setdefault(volume, source)
            mounts.append({"name": volume, **mount})
    return [{"name": name, **source} for name, source in volumes.items()], mounts


def _claim(job: TrainingJob, field: Literal["outputs", "checkpoints"]) -> str | None:
    try:
        written = job.storage(field, "claim")
    except JobError as error:
        raise JobError(
            f"{error}. A pod does not see this machine's folders, and its script writes files, not objects of S3; copy "
            "them from the claim afterwards"
        ) from None
    return written and written.removeprefix("claim:")
