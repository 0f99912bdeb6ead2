"""The launcher: TorchX describes a job; we start what it describes, here or on a cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from workshop_utils.jobs import JobError, StrategyName, TrainingJob
from workshop_utils.launchers.local import environment
from workshop_utils.launchers.local.run import Process
from workshop_utils.launchers.settings import ClusterSettings, Name
from workshop_utils.launchers.source import shipped
from workshop_utils.launchers.torchx.run import LINE_PREFIX, LINE_PREFIX_VARIABLE, TorchXRun
from workshop_utils.network import LOOPBACK_INTERFACE
from workshop_utils.network.ports import PortReservation
from workshop_utils.setup.environments import Environment
from workshop_utils.strategies import TORCHRUN_RESTARTS, strategy_of

if TYPE_CHECKING:
    from workshop_utils.launchers.torchx.volcano import VolcanoRun

ENVIRONMENT = Environment("torchx", "TorchX")
DESCRIBE = Path(__file__).with_name("describe.py")
STRATEGIES: tuple[StrategyName, ...] = ("torch_ddp", "single")
LOCAL_FIELDS = ("scheduler", "rendezvous", "rendezvous_endpoint", "max_restarts")
RANDOM_LETTERS = 14  # which TorchX adds to a name, at most: 64 bits in its alphabet
LONGEST_NAME = 63  # of a pod's host: a DNS-1035 label

InstanceType = Literal["trn1.2xlarge", "trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge"]
RENDER_SECONDS = 120.0
# What would tell torchrun, or TorchX, that it is part of another run.
FOREIGN_TO_TORCHX = re.compile(r"PET_|TORCHX|PYTHONPATH$|PYTHONHOME$|PYTHONUNBUFFERED$|VIRTUAL_ENV$")
# Starts a node's program. After a failure the node stays a moment, so that the others fail by themselves, and say why.
LINGER = '"$@" || { code=$?; sleep 2; exit $code; }'
PORT = 29500  # of the first node, on a cluster

EFA = "vpc.amazonaws.com/efa"
NEURON = "aws.amazon.com/neuron"  # Neuron 2.20 dropped the older name, neurondevice, which TorchX still has
# Whole instances: processors, memory in GiB, Trainium chips, Elastic Fabric Adapter interfaces.
# Source: AWS, "Amazon EC2 accelerated computing instances".
INSTANCES = {
    "trn1.2xlarge": (8, 32, 1, 0),
    "trn1.32xlarge": (128, 512, 16, 8),
    "trn1n.32xlarge": (128, 512, 16, 16),
    "trn2.48xlarge": (192, 2048, 16, 16),
}
POD_SHARE = (
    15 / 16
)  # of an instance, for the pod: the node's own pods, the kubelet and the system need the rest
# For the sockets through which the ranks first meet, and for chips that a killed run has left busy.
ON_TRAINIUM = {"CCOM_SOCKET_IFNAME": "eth0", "NEURON_RT_RESET_CORES": "1"}
# What makes the collectives go through the Elastic Fabric Adapter. Source: AWS Neuron, "Distributed training".
OVER_EFA = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}


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


class TorchX(ClusterSettings):
    """Launches PyTorch jobs through TorchX, here or on a cluster with Volcano.

    TorchX lives in an environment of its own, which the first call makes; torchrun is the workshop's.

    Attributes:
        scheduler: `"local_cwd"`, processes of this machine, or `"kubernetes"`, a Volcano Job on a cluster.
        rendezvous: how the nodes find each other: `"c10d"` at the first of them, `"etcd-v2"` (or the older `"etcd"`) at
            an etcd server, which outlives the first node.
        rendezvous_endpoint: `host:port` of that server.
        max_restarts: how often torchrun restarts all workers when one fails; the script must be able to go on from a
            checkpoint.
        queue: Volcano's queue.
        instance_type: a Trainium instance for each node, whole, in place of the job's resources.
        volumes: further PersistentVolumeClaims, by the path where they are mounted, such as a cache of compiled graphs.
        wrapper: a program in the image that runs torchrun, such as `neuron_parallel_compile`.
    """

    EXAMPLE: ClassVar[str] = "scheduler: kubernetes"

    scheduler: Literal["local_cwd", "kubernetes"] = "local_cwd"
    rendezvous: Literal["c10d", "etcd", "etcd-v2"] = "c10d"
    rendezvous_endpoint: str | None = None
    max_restarts: int = Field(default=0, ge=0, strict=True)
    queue: Name = "default"
    instance_type: InstanceType | None = None
    volumes: dict[str, Name] = Field(default={})
    wrapper: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        endpoint = self.rendezvous_endpoint
        if (self.rendezvous == "c10d") != (endpoint is None):
            given = "missing" if endpoint is None else repr(endpoint)
            needs = (
                "rendezvous 'etcd-v2' needs one, such as etcd-server:2379; with 'c10d' the first node is it"
            )
            raise ValueError(f"rendezvous_endpoint is {given}; {needs}")
        if endpoint is not None and not re.fullmatch(r"[\w.-]+:\d{1,5}", endpoint):
            raise ValueError(f"rendezvous_endpoint is {endpoint!r}; it must be host:port")
        useless = sorted(self.model_fields_set.difference(LOCAL_FIELDS))
        if self.scheduler == "local_cwd" and useless:
            raise ValueError(f"{useless[0]} is for clusters; leave it out, or set scheduler: kubernetes")
        for path in self.volumes:
            if not path.startswith("/") or path == "/":
                raise ValueError(f"volumes.{path} must be a path in the container, such as /cache")
        if len(set(self.volumes.values())) < len(self.volumes):
            raise ValueError("volumes names the same claim twice; mount it once, and use folders in it")
        return self

    def check(self, job: TrainingJob) -> None:
        """Raise JobError where TorchX, or the scheduler, cannot run `job` as these settings have it."""
        strategy_of(job)
        if job.strategy not in STRATEGIES:
            suited = f"which suits {' and '.join(map(repr, STRATEGIES))} alone"
            starts = f"TorchX starts workers with torchrun, {suited}: use another target, such as local"
            raise JobError(f"strategy is {job.strategy!r}; {starts}")
        if self.scheduler == "local_cwd":
            return
        last = f"-worker-{self.layout(job)[0] - 1}-0"
        room = LONGEST_NAME - RANDOM_LETTERS - 1 - len(last)
        if len(job.name) > room:
            added = f"TorchX adds some to it, and {last} to call the last pod"
            raise JobError(f"name is {job.name!r}; it may have at most {room} characters, since {added}")

    def layout(self, job: TrainingJob) -> tuple[int, int]:
        """How many nodes `job` has, each with a torchrun, and how many workers each starts; by default one."""
        per_node = job.processes_per_node or 1
        return job.workers // per_node, per_node

    def render(self, job: TrainingJob) -> Rendered:
        """What would be submitted. Sends nothing, and needs no cluster.

        Raises:
            JobError: if TorchX, or the scheduler, cannot run the job.
            SetupError: if TorchX's environment cannot be made.
        """
        with PortReservation(1) as reservation:
            return self._rendered(job, Path(tempfile.gettempdir()) / "workshop-...", reservation.ports[0])

    def _rendered(self, job: TrainingJob, scratch: Path, port: int) -> Rendered:
        """The same with a run's own folder, and the port of its first node."""
        self.check(job)
        here = self.scheduler == "local_cwd"
        on_cluster = {"queue": self.queue, "namespace": self.namespace}
        asked = {
            "name": job.name,
            "role": self._role(job, scratch, port),
            "scheduler": self.scheduler,
            "settings": {"log_dir": str(scratch / "logs")} if here else on_cluster,
        }
        own = {"WORKSHOP_APPLICATION": json.dumps(asked)}
        command = "python", str(DESCRIBE)
        printed = ENVIRONMENT.run(*command, timeout_seconds=RENDER_SECONDS, variables=own, folder=job.folder)
        application, request = json.loads(printed.splitlines()[-1])
        if not here:
            from workshop_utils.launchers.kubernetes import check
            from workshop_utils.launchers.torchx import volcano

            volcano.complete(request, job, self)
            check.require(request)
        return Rendered(_without_empty(application), request)

    def launch(self, job: TrainingJob) -> TorchXRun | VolcanoRun:
        """Submit the job.

        Raises:
            JobError: as `render` does; nothing has been sent then.
            SetupError: as `render` does.
            KubernetesError: if there is no cluster, or it refuses; what was made before is deleted again.
        """
        if self.scheduler == "kubernetes":
            from workshop_utils.launchers.torchx import volcano

            return volcano.launch(job, self)
        scratch, (nodes, per_node) = environment.scratch_folder(), self.layout(job)
        gpus = environment.deal_gpus(job, {f"node-{number}": per_node for number in range(nodes)})
        workers = tuple(f"worker-{rank}" for rank in range(job.workers))
        with environment.reserve(1) as reservation:
            request = self._rendered(job, scratch, reservation.ports[0]).request
            inherited = environment.inherited_variables(FOREIGN_TO_TORCHX)
            # torchrun is in the folder of this environment's programs. A node's own PATH holds the job's.
            programs, here = sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)
            processes = [
                Process(
                    f"node-{number}",
                    ("bash", "-c", LINGER, "bash", *node["args"]),
                    {
                        **inherited,
                        **gpus.get(f"node-{number}", {}),
                        **node["env"],
                        "PATH": f"{programs}:{node['env']['PATH']}:{here}",
                    },
                    str(job.folder.absolute()),
                )
                for number, node in enumerate(request["role_params"]["worker"])
            ]
            for folder in filter(None, (job.outputs, job.checkpoints)):
                Path(folder).mkdir(parents=True, exist_ok=True)
            files = {f"source/{name}": text for name, text in shipped(job).items()}
            run = TorchXRun(request["app_id"], nodes, job.name, workers, reservation)
            run._start(processes, job.timeout_seconds, scratch, {**files, "model/.keep": ""})
            return run

    def _role(self, job: TrainingJob, scratch: Path, port: int) -> dict[str, Any]:
        """The only role of the application: on each node a torchrun, which starts the ranks there."""
        each, (nodes, count) = job.resources, self.layout(job)
        cpu, megabytes = max(1, round(each.cpu * count)), max(1, each.memory_nbytes * count // 10**6)
        resource: dict[str, Any] = {"cpu": cpu, "gpu": each.gpu * count, "memMB": megabytes}
        variables = dict(TORCHRUN_RESTARTS) if self.max_restarts else {}
        variables |= {LINE_PREFIX_VARIABLE: LINE_PREFIX, "LOGLEVEL": "WARNING"}
        if self.scheduler == "local_cwd":
            script, address = str(job.script_path.absolute()), ["--local-addr=127.0.0.1"]
            variables |= {"WORKSHOP_CHECKPOINTS": str(scratch / "checkpoints")}
            shared = environment.shared_variables(job, scratch)
            variables |= {**shared, "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
        else:
            # Here, since the clients of Kubernetes take longer to import than a local launch may take.
            from workshop_utils.launchers.kubernetes import pods

            script, address, port = pods.script(job), [], PORT
            if self.instance_type is not None:
                cpu, memory_gib, chips, interfaces = INSTANCES[self.instance_type]
                resource = {
                    "cpu": int(cpu * POD_SHARE),
                    "gpu": 0,
                    "memMB": int(memory_gib * 1024 * POD_SHARE),
                    "devices": {NEURON: chips, **({EFA: interfaces} if interfaces else {})},
                    "capabilities": {"node.kubernetes.io/instance-type": self.instance_type},
                }
                variables |= {**ON_TRAINIUM, **(OVER_EFA if interfaces else {})}
            variables |= pods.variables(job)
        # After "--" torchrun takes no argument of the script, such as `--n`, for an option of its own.
        program = map(shlex.quote, [*address, "--", script, *job.command_line_arguments])
        command = " ".join([*self._torchrun(job, port), *program])
        return {
            "name": "worker",
            "image": self.image_for(job),
            "entrypoint": "bash",
            "args": ["-c", command],
            "env": variables,
            "num_replicas": nodes,
            "resource": resource,
            "port_map": {"c10d": port},
            "mounts": [{"src": claim, "dst_path": path} for path, claim in self.volumes.items()],
        }

    def _torchrun(self, job: TrainingJob, port: int) -> list[str]:
        """The start of each node's command; the first node listens at `port`."""
        nodes, count = self.layout(job)
        endpoint = self.rendezvous_endpoint
        if endpoint is None:
            # Only the shell of each node knows where the first one is. Alone, a node takes any free port.
            endpoint = f"$${{${{rank0_env}}:=localhost}}:{port}" if nodes > 1 else "localhost:0"
        return [
            "exec",  # without it the shell would stand between a signal and torchrun
            *shlex.split(self.wrapper or ""),
            "torchrun",
            f"--nnodes={nodes}",
            f"--nproc-per-node={count}",
            f"--rdzv-backend={self.rendezvous}",
            f"--rdzv-endpoint={endpoint}",
            "--rdzv-id=${app_id}",
            f"--max-restarts={self.max_restarts}",
            "--role=worker",
            "--tee=3",
        ]


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        full = {name: each for name, each in sorted(value.items()) if each not in (None, {}, [])}
        return {name: _without_empty(each) for name, each in full.items()}
    return [_without_empty(each) for each in value] if isinstance(value, list) else value
