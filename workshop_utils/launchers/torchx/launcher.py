"""The launcher: describes a job to TorchX, renders what its scheduler would get, and has it submitted."""

from __future__ import annotations

import json
import os
import re
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop_utils.environments import Environment
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import shared_variables
from workshop_utils.launchers.process_run import inherited_variables, reserve, scratch_folder
from workshop_utils.launchers.source import shipped
from workshop_utils.launchers.torchx.run import TorchXRun
from workshop_utils.launchers.torchx.settings import Settings
from workshop_utils.processes.group import Process
from workshop_utils.processes.ports import PortReservation
from workshop_utils.strategies import strategy_of

ENVIRONMENT = Environment("torchx", "TorchX")
DRIVER = Path(__file__).with_name("driver.py")
C10D_PORT = 29500  # in a pod, which has all ports to itself
LOOPBACK = "127.0.0.1"
RENDER_SECONDS = 120.0
SPECIFICATION = "torchx.json"
# What would tell torchrun, or TorchX, that it is part of another run.
FOREIGN_TO_TORCHX = re.compile(r"PET_|TORCHX|PYTHONPATH$|PYTHONHOME$|VIRTUAL_ENV$")


@dataclass(frozen=True)
class Rendered:
    """What would be submitted: TorchX's `application`, and the `request` that the scheduler makes of it.

    Locally the request is the command and the variables of each node; on a cluster it is the Volcano Job, whose name
    TorchX draws anew each time. Printed, it is the YAML of the application, or of the Volcano Job.
    """

    application: dict[str, Any]
    request: dict[str, Any]
    on_cluster: bool

    def __str__(self) -> str:
        # Here, since the clients of Kubernetes take longer to import than a local launch may take.
        from workshop_utils.launchers.kubernetes.manifest import yaml_of

        return yaml_of([self.request if self.on_cluster else self.application])

    __repr__ = __str__


class TorchX(Settings):
    """Launches PyTorch jobs through TorchX, here or on a cluster with Volcano. Its fields are those of `Settings`.

    TorchX lives in an environment of its own, which the first call makes; torchrun is the workshop's.
    """

    def render(self, job: TrainingJob) -> Rendered:
        """What would be submitted. Sends nothing, and needs no cluster.

        Raises:
            JobError: if TorchX, or the scheduler, cannot run the job.
            EnvironmentFailed: if TorchX's environment cannot be made.
        """
        with PortReservation(1) as reservation:
            scratch = Path(tempfile.gettempdir()) / "workshop-..."
            described = self._specification(job, scratch, reservation.ports[0])
            answer = ENVIRONMENT.run(
                "python", str(DRIVER), "render", text=json.dumps(described), timeout_seconds=RENDER_SECONDS
            )
        rendered = Rendered(**json.loads(answer), on_cluster=self.scheduler == "kubernetes")
        if rendered.on_cluster:
            from workshop_utils.launchers.kubernetes import check, rules

            check.body(rendered.request)
            rules.body(rendered.request)
        return rendered

    def launch(self, job: TrainingJob) -> TorchXRun:
        """Submit the job.

        Raises:
            JobError: as `render` does, or if there is no torchrun, or no cluster; nothing has been sent then.
            EnvironmentFailed: as `render` does.
        """
        self.check(job)
        if self.scheduler == "kubernetes":
            _check_kubeconfig()
        else:
            _check_torchrun()
        python = ENVIRONMENT.program("python")
        scratch = scratch_folder()
        with reserve(1) as reservation:
            described = self._specification(job, scratch, reservation.ports[0])
            process = Process(
                "torchx",
                (str(python), str(DRIVER), "launch", str(scratch / SPECIFICATION)),
                _environment(scratch),
                str(job.folder.absolute()),
            )
            sources = {f"source/{name}": text for name, text in shipped(strategy_of(job)).items()}
            files = {SPECIFICATION: json.dumps(described), "tmp/.keep": "", "model/.keep": "", **sources}
            on_cluster = self.scheduler == "kubernetes"
            return TorchXRun(job, self.nodes(job), process, scratch, files, reservation, on_cluster)

    def _specification(self, job: TrainingJob, scratch: Path, port: int) -> dict[str, Any]:
        """What the driver is told. Raises JobError."""
        self.check(job)
        each, count = job.resources, self.processes_per_node
        component = {
            "name": job.name,
            "nodes": self.nodes(job),
            "processes_per_node": count,
            "cpu": max(1, round(each.cpu * count)),
            "gpu": each.gpu * count,
            "memMB": max(1, each.memory_nbytes * count // 10**6),
            "instance_type": self.instance_type,
            "rendezvous": self.rendezvous,
            "rendezvous_endpoint": self.rendezvous_endpoint,
            "max_restarts": self.max_restarts,
            "wrapper": self.wrapper,
        }
        described = {
            "scheduler": self.scheduler,
            "arguments": job.command_line_arguments,
            "component": component,
        }
        if self.scheduler == "local_cwd":
            component |= {
                "script": str(job.script_path.absolute()),
                "port": port,
                "local_address": LOOPBACK,
                "env": {
                    "WORKSHOP_CHECKPOINTS": str(scratch / "checkpoints"),
                    **shared_variables(job, scratch, None),
                    "GLOO_SOCKET_IFNAME": "lo",
                },
            }
            return {**described, "options": {"log_dir": str(scratch / "logs")}}
        return {**described, **self._on_cluster(job, component)}

    def _on_cluster(self, job: TrainingJob, component: dict[str, Any]) -> dict[str, Any]:
        # Here, since the clients of Kubernetes take longer to import than a local launch may take.
        from workshop_utils.launchers.kubernetes import files, pods

        component |= {
            "script": pods.script(job),
            "image": job.image or self.image,
            "port": C10D_PORT,
            "env": pods.variables(job),
            "mounts": [
                word
                for path, claim in self.volumes.items()
                for word in ("type=volume", f"src={claim}", f"dst={path}")
            ],
        }
        options = {
            "queue": self.queue,
            "namespace": self.namespace,
            "service_account": self.service_account,
            "priority_class": self.priority_class,
        }
        claims = list(self.volumes.values())
        volumes: list[dict[str, Any]] = []
        mounted = "data"
        if self.data_claim is None:
            volumes = [{"name": "data", "configMap": {"name": "{job}-data"}}]
        elif self.data_claim in claims:  # a pod that names a claim twice may wait for it for ever
            mounted = f"mount-{claims.index(self.data_claim)}"  # as TorchX calls it
        else:
            claim = {"claimName": self.data_claim, "readOnly": True}
            volumes = [{"name": "data", "persistentVolumeClaim": claim}]
        items = [{"key": key, "path": path} for key, path in files.paths(job).items()]
        config_maps = files.config_maps(job, with_data=self.data_claim is None)
        for described, name in zip(config_maps, ("{job}", "{job}-data"), strict=False):
            described["metadata"] = {"name": name, "labels": dict(pods.LABELS)}
        return {
            "options": {name: value for name, value in options.items() if value is not None},
            "config_maps": config_maps,
            "pod": {
                "labels": dict(pods.LABELS),
                "seconds": round(job.timeout_seconds),
                "keep_seconds": self.keep_seconds,
                "node_selector": self.node_selector,
                "volumes": [
                    {"name": "job", "configMap": {"name": "{job}", "items": items}},
                    *volumes,
                    {"name": "model", "emptyDir": {}},
                ],
                "mounts": [
                    {"name": "job", "mountPath": pods.JOB_FOLDER},
                    {"name": mounted, "mountPath": pods.DATA_FOLDER, "readOnly": True},
                    {"name": "model", "mountPath": pods.MODEL_FOLDER},
                ],
            },
        }


def _environment(scratch: Path) -> dict[str, str]:
    """The variables of TorchX and of what it starts: this process's, with the workshop's programs first."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    inherited = inherited_variables(FOREIGN_TO_TORCHX)
    return {**inherited, "PATH": path, "TMPDIR": str(scratch / "tmp"), "PYTHONUNBUFFERED": "1"}


def _check_torchrun() -> None:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    if shutil.which("torchrun", path=path) is None:
        raise JobError(
            "there is no torchrun on the PATH; it comes with PyTorch: install torch, or run `make setup`"
        )


def _check_kubeconfig() -> None:
    from workshop_utils.launchers.kubernetes import calls

    try:
        calls.connect().close()
    except calls.KubernetesError as error:
        raise JobError(
            f"scheduler is 'kubernetes'; {str(error).partition('; name a')[0]}; name a kubeconfig in KUBECONFIG. "
            "Without a cluster, --render shows the Volcano Job, and scheduler 'local_cwd' runs the application here"
        ) from None
