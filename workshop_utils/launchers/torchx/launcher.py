"""The launcher: has TorchX describe a job, and run it here; on a cluster it sends what TorchX describes."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local.environment import (
    inherited_variables,
    reserve,
    scratch_folder,
    shared_variables,
)
from workshop_utils.launchers.local.group import Process
from workshop_utils.launchers.source import shipped
from workshop_utils.launchers.torchx.run import TorchXRun
from workshop_utils.launchers.torchx.settings import Settings
from workshop_utils.network.ports import PortReservation
from workshop_utils.setup.environments import Environment
from workshop_utils.strategies import strategy_of

if TYPE_CHECKING:
    from workshop_utils.launchers.torchx.volcano import VolcanoRun

ENVIRONMENT = Environment("torchx", "TorchX")
COMPONENT, FOLLOW = (Path(__file__).with_name(name) for name in ("components.py", "follow.py"))
LOOPBACK = "127.0.0.1"
RENDER_SECONDS = 120.0
# What would tell torchrun, or TorchX, that it is part of another run.
FOREIGN_TO_TORCHX = re.compile(r"PET_|TORCHX|PYTHONPATH$|PYTHONHOME$|PYTHONUNBUFFERED$|VIRTUAL_ENV$")
# How `torchx run --dryrun` prints what it would do.
SECTIONS = re.compile(r"=== APPLICATION ===\n(.*)\n=== SCHEDULER REQUEST ===\n(.*)", re.DOTALL)


@dataclass(frozen=True)
class Rendered:
    """What would be submitted: TorchX's `application`, and the `request` that the scheduler makes of it.

    Locally the request is the command and the variables of each node; on a cluster it is the Volcano Job, whose name
    TorchX draws anew each time. Printed, it is the YAML of the application, or of the Volcano Job.
    """

    application: dict[str, Any]
    request: dict[str, Any]

    def __str__(self) -> str:
        # Here, since the clients of Kubernetes take longer to import than a local launch may take.
        from workshop_utils.launchers.kubernetes.manifest import yaml_of

        return yaml_of([self.request if "kind" in self.request else self.application])

    __repr__ = __str__


class TorchX(Settings):
    """Launches PyTorch jobs through TorchX, here or on a cluster with Volcano. Its fields are those of `Settings`.

    TorchX lives in an environment of its own, which the first call makes; torchrun is the workshop's.
    """

    def render(self, job: TrainingJob) -> Rendered:
        """What would be submitted. Sends nothing, and needs no cluster.

        Raises:
            JobError: if TorchX, or the scheduler, cannot run the job.
            SetupError: if TorchX's environment cannot be made.
        """
        self.check(job)
        with PortReservation(1) as reservation:
            scratch = Path(tempfile.gettempdir()) / "workshop-..."
            printed = ENVIRONMENT.run(
                "torchx",
                *self._words(job, scratch, reservation.ports[0], "--dryrun"),
                folder=job.folder,
                timeout_seconds=RENDER_SECONDS,
            )
        found = SECTIONS.search(printed)
        assert found is not None
        application = _application(found[1], job)
        if self.scheduler == "local_cwd":
            return Rendered(application, ast.literal_eval(found[2]))
        from workshop_utils.launchers.kubernetes import rules
        from workshop_utils.launchers.torchx import volcano

        # The command line gives its session a name of its own, which is of no use to anybody.
        request = yaml.safe_load(found[2].replace("kubernetes://torchx/", "kubernetes://workshop/"))
        volcano.complete(request, job, self)
        rules.body(request)
        return Rendered(application, request)

    def launch(self, job: TrainingJob) -> TorchXRun | VolcanoRun:
        """Submit the job.

        Raises:
            JobError: as `render` does; nothing has been sent then.
            SetupError: as `render` does.
            KubernetesError: if there is no cluster, or it refuses; what was made before is deleted again.
        """
        self.check(job)
        if self.scheduler == "kubernetes":
            from workshop_utils.launchers.torchx import volcano

            return volcano.launch(job, self)
        torchx, scratch = str(ENVIRONMENT.program("torchx")), scratch_folder()
        torchrun = sysconfig.get_path("scripts")  # the folder that it is in
        path = os.pathsep.join([torchrun, os.environ.get("PATH", os.defpath)])
        variables = {"PATH": path, "TMPDIR": str(scratch / "tmp"), "LOGLEVEL": "ERROR"}
        with reserve(1) as reservation:
            words = self._words(job, scratch, reservation.ports[0])
            process = Process(
                "torchx",
                (sys.executable, "-I", "-S", str(FOLLOW), str(scratch / "logs"), torchx, *words),
                {**inherited_variables(FOREIGN_TO_TORCHX), **variables},
                str(job.folder.absolute()),
            )
            files = {f"source/{name}": text for name, text in shipped(strategy_of(job)).items()}
            files |= {"tmp/.keep": "", "model/.keep": ""}
            return TorchXRun(job, self.nodes(job), process, scratch, files, reservation)

    def _words(self, job: TrainingJob, scratch: Path, port: int, *options: str) -> list[str]:
        """What follows `torchx` on its command line."""
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
        if self.scheduler == "local_cwd":
            script = str(job.script_path.absolute())
            variables = {
                "WORKSHOP_CHECKPOINTS": str(scratch / "checkpoints"),
                **shared_variables(job, scratch),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            component |= {"port": port, "local_address": LOOPBACK}
            settings: dict[str, Any] = {"log_dir": scratch / "logs"}
        else:
            # Here, since the clients of Kubernetes take longer to import than a local launch may take.
            from workshop_utils.launchers.kubernetes import pods

            script, variables = pods.script(job), pods.variables(job)
            mounts = [f"type=volume,src={claim},dst={path}" for path, claim in self.volumes.items()]
            component |= {"image": job.image or self.image, "mounts": ",".join(mounts) or None}
            names = ("queue", "namespace", "service_account", "priority_class")
            settings = {name: value for name in names if (value := getattr(self, name)) is not None}
        component |= {
            "script": shlex.join([script, *job.command_line_arguments]),
            "env": json.dumps(variables),
        }
        configured = ",".join(f"{name}={value}" for name, value in settings.items())
        where = ("--workspace", "", "-s", self.scheduler, "-cfg", configured, f"{COMPONENT}:ddp")
        arguments = (f"--{name}={value}" for name, value in component.items() if value is not None)
        return ["run", *options, *where, *arguments]


def _application(printed: str, job: TrainingJob) -> dict[str, Any]:
    """The application as `torchx run --dryrun` prints it, without what TorchX adds to its variables."""
    application: dict[str, Any] = ast.literal_eval(re.sub(r"<[\w.]+: ('\w+')>", r"\1", printed))
    (role,) = application["roles"]
    for name in {"TORCHX_JOB_ID", "PATH"} - job.environment.keys():
        role["env"].pop(name, None)
    found: dict[str, Any] = _without_empty(application)
    return found


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_empty(each) for name, each in value.items() if each not in (None, {}, [])}
    return [_without_empty(each) for each in value] if isinstance(value, list) else value
