"""How the workers of a job co-operate: which processes there are, and what each is told about the others.

`Strategy.plan` turns a job into a list of processes. It knows no target: a launcher lays the job out on nodes, chooses
the addresses, and starts or submits what is in the list. The variables are those that the real platforms set, so a
script cannot tell the difference:

| strategy | processes | how they find each other |
| --- | --- | --- |
| `single` | one worker | |
| `ring` | workers | the workshop's own message passing: RANK and the address of rank 0 |
| `workshop_parameter_server` | servers, workers | the same |
| `torch_ddp` | workers | MASTER_ADDR and RANK, as torchrun and the PyTorchJob operator set them |
| `horovod` | a rendezvous server, workers | the server's address and HOROVOD_RANK, as horovodrun sets them |
| `horovod_elastic` | a driver, workers | the driver starts the workers, and replaces those that die |
| `mpi` | mpirun, workers | mpirun starts the workers |
| `multi_worker_mirrored` | workers | TF_CONFIG |
| `parameter_server` | a chief, parameter servers, workers | TF_CONFIG |

To add a strategy, write functions that list its processes and their variables, add it to `STRATEGIES`, and its name to
`jobs.StrategyName`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from workshop_utils.jobs import JobError, StrategyName, TrainingJob
from workshop_utils.jobs.imports import imported, packages, why_no_gpu

# What a script that imports a package most likely wants.
STRATEGY_OF: dict[str, StrategyName] = {
    "horovod": "horovod",
    "mpi4py": "mpi",
    "tensorflow": "multi_worker_mirrored",
}

SCRIPT_ROLES = ("chief", "worker", "ps", "server")  # the others help these and do not run the job's script

# Words that stand for what only the machine that starts a process knows; `ProcessSpec.filled` replaces them.
PYTHON = "{python}"  # the interpreter
SCRIPT = "{script}"  # the path of the job's script
START = "{start}"  # the path of start.py, which fills in words of the script's arguments
PROGRAMS = "{programs}"  # the folder that holds the workshop's own programs, such as horovod_rendezvous.py
MPIRUN = "{mpirun}"  # the path of mpirun
SCRATCH = "{scratch}"  # the run's own folder
# And words for the address of a helper, which `Strategy.connect` replaces.
HOST, PORT, INTERFACE = "{host}", "{port}", "{interface}"


@dataclass(frozen=True)
class Addresses:
    """Where the processes of one run are.

    Attributes:
        of: `host:port` by name, of each process that listens; one that is missing gets port 0.
        nodes: the names of the nodes, in order. A job is laid out on as many nodes as there are names.
        interface: the network interface through which they reach each other.
        secret: of this run; a process that does not know it cannot join.
    """

    of: Mapping[str, str] = field(default_factory=dict)
    nodes: Sequence[str] = ("localhost",)
    interface: str = "lo"
    secret: str = ""

    def split(self, name: str) -> tuple[str, str]:
        """Host and port of the process called `name`."""
        host, _, port = self.of.get(name, "127.0.0.1:0").rpartition(":")
        return host, port

    def words(self, name: str) -> dict[str, str]:
        """What stands for HOST, PORT and INTERFACE in the command of the process called `name`."""
        host, port = self.split(name)
        return {"host": host, "port": port, "interface": self.interface}


def without_proxy(variables: Mapping[str, str], hosts: Iterable[str] = ()) -> dict[str, str]:
    """By which processes with these `variables` reach this machine and `hosts` directly, whatever proxy is named there.

    Each host is listed, since few libraries know ranges; gRPC has a list of its own. Alone, "*" stands for all hosts.
    """
    kept = f"{variables.get('no_proxy', '')},{variables.get('NO_PROXY', '')}".split(",")
    names = ",".join(filter(None, dict.fromkeys([*kept, "localhost", "127.0.0.1", *hosts])))
    return {
        "no_grpc_proxy": ",".join(filter(None, [variables.get("no_grpc_proxy"), names])),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), "*" if "*" in kept else names),
    }


@dataclass(frozen=True)
class ProcessSpec:
    """One process of a job, as a strategy wants it started.

    Attributes:
        role: such as `worker` or `ps`; with the index it is the name, `worker-1`.
        rank: its number among those that train; None if it does not train.
        local_rank: its number among the processes on its node that run the script.
        node: on which node it runs, from 0.
        argv: the command, with words in braces (`PYTHON`, `SCRIPT`, ...) for what only the machine knows.
        arguments: the script's own, which end the command as they are.
        environment: the variables by which it learns its place and finds its peers; they may hold the same words.
        listens: whether it needs an address of its own.
        children: the names of the processes that it starts itself.
        required: whether the run waits for its end. The run has succeeded once every required process has ended with 0;
            the others are then told to stop.
    """

    role: str
    index: int
    rank: int | None = None
    local_rank: int = 0
    node: int = 0
    argv: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    listens: bool = False
    children: tuple[str, ...] = ()
    required: bool = True

    @property
    def name(self) -> str:
        """How logs and tables call it, for example `worker-1`; mpirun is called just that."""
        return self.role if self.role == "mpirun" else f"{self.role}-{self.index}"

    @property
    def runs_script(self) -> bool:
        """Whether it runs the job's script, and is no helper such as mpirun or a rendezvous server."""
        return self.role in SCRIPT_ROLES

    @property
    def command(self) -> tuple[str, ...]:
        """The whole command."""
        return (*self.argv, *self.arguments)

    def filled(self, **words: str) -> Self:
        """The same process with `python=`, `script=`, `programs=`, ... in place of the words in braces."""

        def fill(text: str) -> str:
            for word, value in words.items():
                text = text.replace(f"{{{word}}}", value)
            return text

        return replace(
            self,
            argv=tuple(map(fill, self.argv)),
            environment={name: fill(value) for name, value in self.environment.items()},
        )


Processes = list[ProcessSpec]


@dataclass(frozen=True)
class Layout:
    """The processes of a job on their nodes, and where each can be reached."""

    job: TrainingJob
    addresses: Addresses
    specs: Sequence[ProcessSpec]

    def ranks_on(self, node: int) -> int:
        """How many of the processes on `node` train."""
        return sum(spec.node == node and spec.rank is not None for spec in self.specs)


def launched(specs: Iterable[ProcessSpec]) -> list[ProcessSpec]:
    """Processes that the launcher starts itself; these start the rest."""
    specs = list(specs)
    started = {name for spec in specs for name in spec.children}
    return [spec for spec in specs if spec.name not in started]


@dataclass(frozen=True)
class Strategy:
    """How the workers of a job co-operate.

    Attributes:
        processes: a job's processes, not yet laid out on nodes.
        variables: those of a process that runs the script.
        uses_comm: whether its scripts import the workshop's own message passing.
        has_servers: whether some processes serve parameters.
        one_node: whether a driver starts all workers, on its own node.
        workers: at least and at most so many.
    """

    name: StrategyName
    processes: Callable[[TrainingJob], Processes]
    variables: Callable[[ProcessSpec, Layout], dict[str, str]] = lambda *_: {}
    uses_comm: bool = False
    has_servers: bool = False
    one_node: bool = False
    workers: tuple[float, float] = (1, math.inf)

    def check(self, job: TrainingJob) -> None:
        """Raise JobError where `job` asks for what this strategy does not have."""
        if job.parameter_servers != 1 and not self.has_servers:
            advice = "has no parameter servers: leave it out, or use strategy 'parameter_server'"
            raise JobError(f"parameter_servers is {job.parameter_servers}; strategy {self.name!r} {advice}")
        if self.name == "horovod_elastic" and (job.needs_start or job.module):
            raise JobError(
                f"strategy is {self.name!r}; its driver starts a script as it is: leave out module, and words such as "
                "{rank} in arguments"
            )
        if self.one_node and (job.nodes or 1) > 1:
            raise JobError(f"nodes is {job.nodes}; {self.name} starts all workers on one node: leave it out")
        least, most = self.workers
        if job.workers > most:
            modules = packages(imported(job.script_path))
            other = next((name for module, name in STRATEGY_OF.items() if module in modules), "torch_ddp")
            advice = f"use another strategy, such as {other!r} (--strategy {other})"
            raise JobError(f"workers is {job.workers}; strategy {self.name!r} has one worker: {advice}")
        if job.workers < least:
            added = f"(a chief and {job.parameter_servers} server(s) are added to them)"
            raise JobError(f"workers is {job.workers}; strategy {self.name!r} needs at least {least} {added}")

    def plan(self, job: TrainingJob, addresses: Addresses | None = None) -> list[ProcessSpec]:
        """The processes of `job`, in the order in which they are started; without `addresses`, on one node."""
        return self.connect(job, self.processes(job), addresses or Addresses())

    def connect(self, job: TrainingJob, specs: Processes, addresses: Addresses) -> Processes:
        """`specs`, which `processes` has listed, on their nodes, and with what tells them where the others are."""
        specs = _on_nodes(specs, len(addresses.nodes))
        layout = Layout(job, addresses, specs)
        return [
            replace(spec, environment=self.variables(spec, layout))
            if spec.runs_script
            else spec.filled(**addresses.words(spec.name))
            for spec in specs
        ]


# torchrun's ranks share its store by default; restarted ranks may then find the addresses of dead ones there, and hang
# (https://github.com/pytorch/pytorch/issues/135712). Without it, torchrun looks for a free port, and rank 0 binds it
# seconds later; another program may have taken it by then. So it is set only where ranks may be restarted.
TORCHRUN_RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# Open MPI's settings for ranks that share a machine's cores: waiting ranks must let the others work. Looking for the
# RDMA networks of libfabric would take every rank a second.
MPI_ON_ONE_MACHINE = {"mpi_yield_when_idle": "1", "btl": "^ofi"}
# Where Open MPI (5 and 4) keeps its own files, which it leaves behind when it is killed.
MPI_FOLDERS = (
    "PRTE_MCA_prte_tmpdir_base",
    "OMPI_MCA_orte_tmpdir_base",
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_btl_vader_backing_directory",
)


def mpi_options(parameters: Mapping[str, str]) -> tuple[str, ...]:
    """Open MPI's `parameters` as mpirun takes them."""
    return tuple(word for name, value in parameters.items() for word in ("--mca", name, value))


# Which processes there are


def _ranked_servers(job: TrainingJob) -> Processes:
    """The first ranks serve parameters, the others work."""
    count, server = job.parameter_servers, ProcessSpec("server", 0, **_script(job))
    servers = [replace(server, index=rank, rank=rank, listens=rank == 0) for rank in range(count)]
    return [*servers, *_workers(job, first_rank=count)]


def _with_rendezvous(job: TrainingJob) -> Processes:
    """A key-value server at which the workers meet."""
    command = (PYTHON, "-I", f"{PROGRAMS}/horovod_rendezvous.py", HOST, PORT)
    server = ProcessSpec("rendezvous", 0, argv=command, listens=True, required=False)
    return [server, *_workers(job)]


def _with_driver(job: TrainingJob) -> Processes:
    """A driver that starts the workers, and others when they die."""
    meeting = (HOST, PORT, INTERFACE, str(job.workers))
    command = (PYTHON, "-I", f"{PROGRAMS}/horovod_elastic.py", "drive", *meeting, *script_words(job))
    arguments = tuple(job.command_line_arguments)
    return _started_by(ProcessSpec("driver", 0, argv=command, arguments=arguments, listens=True), job)


def _under_mpirun(job: TrainingJob) -> Processes:
    """An mpirun that starts and connects the workers, as the MPI standard has it."""
    sharing = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--tag-output")
    ranks = ("-n", str(job.workers), PYTHON, *script_words(job))
    command = (MPIRUN, *sharing, *mpi_options(MPI_ON_ONE_MACHINE), *ranks)
    folders, arguments = dict.fromkeys(MPI_FOLDERS, SCRATCH), tuple(job.command_line_arguments)
    mpirun = ProcessSpec("mpirun", 0, argv=command, arguments=arguments, environment=folders)
    return _started_by(mpirun, job)


def _with_chief(job: TrainingJob) -> Processes:
    """A chief that hands out steps to the workers, and servers that keep the variables."""
    chief = ProcessSpec("chief", 0, 0, listens=True, **_script(job))
    server = replace(chief, role="ps", rank=None, required=False)
    servers = [replace(server, index=index) for index in range(job.parameter_servers)]
    return [chief, *servers, *_workers(job, job.workers, required=False, first_rank=1)]


def script_words(job: TrainingJob, **words: str) -> tuple[str, ...]:
    """What Python is told to run, without the script's arguments; with `script=` and `start=` filled in."""
    start = (START,) if job.needs_start else ()
    # `-m mpi4py` makes an exception in one rank abort all; otherwise the others would wait in MPI_Finalize.
    mpi = ("-m", "mpi4py") if job.strategy == "mpi" else ()
    program = (SCRIPT,) if job.module is None else ("-m", job.module)
    return ProcessSpec("worker", 0, argv=(*start, *mpi, *program)).filled(**words).argv


def _script(job: TrainingJob) -> dict[str, Any]:
    return {"argv": (PYTHON, *script_words(job)), "arguments": tuple(job.command_line_arguments)}


def _workers(job: TrainingJob, listening: int = 0, required: bool = True, first_rank: int = 0) -> Processes:
    """The workers of `job`, ranked from `first_rank` on; the first `listening` need an address."""
    worker = ProcessSpec("worker", 0, required=required, **_script(job))
    ranks = range(first_rank, first_rank + job.workers)
    return [replace(worker, index=n, rank=rank, listens=n < listening) for n, rank in enumerate(ranks)]


def _started_by(starter: ProcessSpec, job: TrainingJob) -> Processes:
    """`starter`, and the workers of `job`, all of which it starts."""
    workers = _workers(job, required=False)
    return [replace(starter, children=tuple(worker.name for worker in workers)), *workers]


def _on_nodes(specs: Sequence[ProcessSpec], nodes: int) -> list[ProcessSpec]:
    """`specs` with their node and local rank.

    Workers fill one node after the other, the same number on each; servers go to the nodes in turn, and helpers to the
    first. So does a chief, unless there is a node for each worker and for the chief.
    """
    workers = sum(spec.role == "worker" for spec in specs)
    trainers = workers + sum(spec.role == "chief" for spec in specs)
    chief_apart = nodes == trainers
    per_node = max(1, math.ceil((trainers if chief_apart else workers) / nodes))
    trained = served = 0
    ranks: Counter[int] = Counter()
    placed = []
    for spec in specs:
        node = 0
        if spec.role in ("ps", "server"):
            node, served = served % nodes, served + 1
        elif spec.role == "worker" or (spec.role == "chief" and chief_apart):
            node, trained = trained // per_node, trained + 1
        placed.append(replace(spec, node=node, local_rank=ranks[node] if spec.runs_script else 0))
        ranks[node] += spec.runs_script
    return placed


def _torchrun_variables(spec: ProcessSpec, layout: Layout) -> dict[str, str]:
    """How ranks meet at the first one, in the variables that torchrun sets."""
    host, port = layout.addresses.split(layout.specs[0].name)
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "RANK": str(spec.rank),
        "WORLD_SIZE": str(len(layout.specs)),
        "LOCAL_RANK": str(spec.local_rank),
        "LOCAL_WORLD_SIZE": str(layout.ranks_on(spec.node)),
        "GROUP_RANK": str(spec.node),
    }


def _ring_variables(spec: ProcessSpec, layout: Layout) -> dict[str, str]:
    servers = (
        {"WORKSHOP_SERVERS": str(layout.job.parameter_servers)} if layout.specs[0].role == "server" else {}
    )
    return {**_torchrun_variables(spec, layout), "WORKSHOP_SECRET": layout.addresses.secret, **servers}


def _ddp_variables(spec: ProcessSpec, layout: Layout) -> dict[str, str]:
    return {**_torchrun_variables(spec, layout), "GLOO_SOCKET_IFNAME": layout.addresses.interface}


def _horovod_variables(spec: ProcessSpec, layout: Layout) -> dict[str, str]:
    addresses = layout.addresses
    host, port = addresses.split("rendezvous-0")
    return {
        "HOROVOD_RANK": str(spec.rank),
        "HOROVOD_SIZE": str(layout.job.workers),
        "HOROVOD_LOCAL_RANK": str(spec.local_rank),
        "HOROVOD_LOCAL_SIZE": str(layout.ranks_on(spec.node)),
        "HOROVOD_CROSS_RANK": str(spec.node),
        "HOROVOD_CROSS_SIZE": str(len(addresses.nodes)),
        "HOROVOD_HOSTNAME": addresses.nodes[spec.node],
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_GLOO_IFACE": addresses.interface,
    }


def _tf_config(spec: ProcessSpec, layout: Layout) -> dict[str, str]:
    cluster: dict[str, list[str]] = {}
    for other in layout.specs:
        cluster.setdefault(other.role, []).append(":".join(layout.addresses.split(other.name)))
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": spec.role, "index": spec.index}})}


STRATEGIES: dict[StrategyName, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("single", _workers, workers=(1, 1)),
        # Equals: each can send to each, and the algorithms choose the neighbours.
        Strategy("ring", lambda job: _workers(job, listening=1), _ring_variables, uses_comm=True),
        Strategy(
            "workshop_parameter_server", _ranked_servers, _ring_variables, uses_comm=True, has_servers=True
        ),
        # Rank 0 keeps the store in which the others find each other.
        # Source: PyTorch, "Environment variable initialization" in torch.distributed.
        Strategy("torch_ddp", lambda job: _workers(job, listening=1), _ddp_variables),
        # Source: Horovod 0.28.1, horovod/runner/gloo_run.py, `create_slot_env_vars`, and elastic/driver.py.
        Strategy("horovod", _with_rendezvous, _horovod_variables),
        Strategy("horovod_elastic", _with_driver, one_node=True),
        Strategy("mpi", _under_mpirun),
        # Source: TensorFlow, "Multi-worker training with Keras" and "Parameter server training".
        Strategy("multi_worker_mirrored", lambda job: _workers(job, listening=job.workers), _tf_config),
        Strategy("parameter_server", _with_chief, _tf_config, has_servers=True, workers=(2, math.inf)),
    )
}


def strategy_of(job: TrainingJob) -> Strategy:
    """The strategy of `job`.

    Raises:
        JobError: if it cannot run such a job, or if the job's script would leave the GPUs idle that the job asks for.
    """
    strategy = STRATEGIES[job.strategy]
    strategy.check(job)
    if job.resources.gpu and (reason := why_no_gpu(job)):
        idle = f"script {job.program!r} {reason}"
        advice = "leave resources.gpu out, or set it to 0 (--gpus 0)"
        raise JobError(f"resources.gpu is {job.resources.gpu}, and {idle}; {advice}")
    return strategy
