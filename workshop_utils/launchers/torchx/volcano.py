"""A job on a cluster with Volcano: TorchX describes it, and the Kubernetes launcher's client sends and follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import cluster, pods
from workshop_utils.launchers.kubernetes.cluster import JobObjects
from workshop_utils.launchers.kubernetes.launcher import KubernetesRun, RemoteJob
from workshop_utils.launchers.kubernetes.manifest import UNSAVED, Manifest
from workshop_utils.launchers.kubernetes.operators import Pod
from workshop_utils.launchers.settings import require_registry
from workshop_utils.launchers.torchx.run import TorchrunRun

if TYPE_CHECKING:
    from workshop_utils.launchers.torchx.launcher import TorchX

TTL_SECONDS = 3600  # the finished job, where nobody deletes it


def complete(resource: dict[str, Any], job: TrainingJob, place: TorchX) -> None:
    """Add to a Volcano Job, and to each of its pods, what TorchX has no word for.

    A pod that fails ends the job, as the others would wait for it for ever; and no finished job is kept for ever. The
    pods get their volumes, a time limit, and the labels of their nodes.
    """
    spec = resource["spec"]
    resource["metadata"]["labels"] = dict(pods.LABELS)
    spec["policies"] = [{"event": event, "action": "TerminateJob"} for event in ("PodFailed", "PodEvicted")]
    spec["ttlSecondsAfterFinished"] = TTL_SECONDS
    spec["minAvailable"] = len(spec["tasks"])  # all or none: half a job would hold its nodes in vain
    volumes, mounts = pods.storage(_with_name_of(job, resource), place.namespace, place.data_claim)
    claims = list(place.volumes.values())
    # A pod that names a claim twice may wait for it for ever.
    for volume in list(volumes):
        if (claim := volume.get("persistentVolumeClaim", {}).get("claimName")) in claims:
            volumes.remove(volume)
            for mount in (each for each in mounts if each["name"] == volume["name"]):
                mount["name"] = f"mount-{claims.index(claim)}"  # as TorchX calls it
    for mount in mounts:
        if mount["mountPath"] == pods.FOLDERS["data"]:
            mount["readOnly"] = True
    for task in spec["tasks"]:
        task["template"]["metadata"]["labels"] |= pods.LABELS
        pod = task["template"]["spec"]
        pod["activeDeadlineSeconds"] = round(job.timeout_seconds)
        pod["volumes"] += volumes
        if place.node_selector:
            pod["nodeSelector"] = {**pod.get("nodeSelector", {}), **place.node_selector}
        pod["containers"][0]["volumeMounts"] += mounts


def launch(job: TrainingJob, place: TorchX) -> VolcanoRun:
    """Render the job and make its objects. Raises as `TorchX.launch` does."""
    require_registry(place.image_for(job))
    resource = place.render(job).request
    resource["metadata"]["namespace"] = place.namespace
    config_maps = pods.config_maps(_with_name_of(job, resource), with_data=place.data_claim is None)
    objects = JobObjects(cluster.connect(place.context), Manifest(resource), config_maps)
    warning = UNSAVED if job.outputs is None else ""
    nodes, per_node = place.layout(job)
    made = [
        Pod(
            f"{objects.name}-worker-{node}-0",
            f"node-{node}",
            starts=tuple(f"worker-{rank}" for rank in range(node * per_node, (node + 1) * per_node)),
        )
        for node in range(nodes)
    ]
    handle = f"kubernetes://workshop/{objects.namespace}:{objects.name}"
    remote = RemoteJob(objects, made, job.timeout_seconds, place.queue)
    return objects.launch(lambda: VolcanoRun(handle, nodes, remote, made, warning))


def _with_name_of(job: TrainingJob, resource: dict[str, Any]) -> TrainingJob:
    """`job` with the name that TorchX has drawn, which may be longer than a job's own."""
    return job.model_copy(update={"name": resource["metadata"]["name"]})


class VolcanoRun(TorchrunRun, KubernetesRun):
    """A run of a Volcano Job, each of whose pods is a torchrun."""
