"""How the workers of a job co-operate: which processes there are, and what each is told of the others.

A strategy alone decides a job's members (role, index, rank) and the environment in which each finds its peers.
It knows nothing of places: a launcher chooses the addresses and starts the members. The variables are those that
the real platforms set, so a script cannot tell the difference:

| strategy | members | finds its peers through |
| --- | --- | --- |
| `single` | one worker | nothing |
| `ring` | workers | the workshop's own message passing: RANK and the address of rank 0 |
| `workshop_parameter_server` | servers, workers | the same |
| `torch_ddp` | workers | MASTER_ADDR and RANK, as torchrun and the PyTorchJob operator set them |
| `horovod` | workers | a rendezvous server's address and HOROVOD_RANK, as horovodrun sets them |
| `horovod_elastic` | a driver, workers | the driver, which starts them, and others in place of those that die |
| `mpi` | workers | mpirun, which starts them |
| `spark` | a driver, workers | the driver, whose barrier stage starts them with MASTER_ADDR and RANK |
| `multi_worker_mirrored` | workers | TF_CONFIG |
| `parameter_server` | a chief, parameter servers, workers | TF_CONFIG |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from workshop_utils.jobs import JobError, StrategyName, TrainingJob


@dataclass(frozen=True)
class Member:
    """One process of a job.

    `rank` is None for a process that does not train. The run has succeeded when every `awaited` member has
    ended well; those of the others that `leave` by themselves are given time for it, and the rest are told to stop.
    `listens` says whether it needs an address of its own. One that the launcher does not start by itself is
    `started_by` the member of that name.
    """

    role: str
    index: int
    rank: int | None = None
    awaited: bool = True
    listens: bool = False
    leaves: bool = True
    started_by: str | None = None

    @property
    def name(self) -> str:
        """How it is called in logs and tables, for example `worker-1`."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True)
class Addresses:
    """Where the members of one run are: `host:port` by name for those that listen."""

    of: Mapping[str, str]
    interface: str = "lo"
    secret: str = ""  # of this run; who does not know it cannot join

    def split(self, name: str) -> tuple[str, str]:
        """Host and port of the member called `name`."""
        host, _, port = self.of[name].rpartition(":")
        return host, port


class Strategy:
    """How the workers of a job co-operate."""

    name: ClassVar[StrategyName]
    started_by_mpirun: ClassVar[bool] = False
    uses_comm: ClassVar[bool] = False  # its scripts import the workshop's own message passing
    has_servers: ClassVar[bool] = False

    def check(self, job: TrainingJob) -> None:
        """Raise JobError where `job` asks for what this strategy does not have."""
        if job.parameter_servers != 1 and not self.has_servers:
            raise JobError(
                f"parameter_servers is {job.parameter_servers}; strategy {self.name!r} has no parameter servers: "
                "leave it out, or use strategy 'parameter_server'"
            )

    def members(self, job: TrainingJob) -> tuple[Member, ...]:
        """The processes of `job`, in the order in which they are started."""
        return tuple(Member("worker", rank, rank) for rank in range(job.workers))

    def environment(self, job: TrainingJob, member: Member, addresses: Addresses) -> dict[str, str]:
        """The variables by which `member` learns its own place and finds its peers; none by default."""
        return {}


class Single(Strategy):
    """One process on its own."""

    name = "single"

    def check(self, job: TrainingJob) -> None:
        super().check(job)
        if job.workers != 1:
            raise JobError(
                f"workers is {job.workers}; strategy 'single' has one worker: use another strategy, such as 'torch_ddp'"
            )


class Ring(Strategy):
    """The workshop's own ranks, as equals: each can send to each, and the algorithms choose the neighbours."""

    name = "ring"
    uses_comm = True

    def members(self, job: TrainingJob) -> tuple[Member, ...]:
        return _meeting_at_rank_0(job)

    def environment(self, job: TrainingJob, member: Member, addresses: Addresses) -> dict[str, str]:
        return _own_ranks(self.members(job), member, addresses)


class WorkshopParameterServer(Strategy):
    """The workshop's own parameter servers: the first ranks serve, the others work."""

    name = "workshop_parameter_server"
    uses_comm = True
    has_servers = True

    def members(self, job: TrainingJob) -> tuple[Member, ...]:
        count = job.parameter_servers
        servers = (Member("server", rank, rank, listens=rank == 0) for rank in range(count))
        workers = (Member("worker", index, count + index) for index in range(job.workers))
        return (*servers, *workers)

    def environment(self, job: TrainingJob, member: Member, addresses: Addresses) -> dict[str, str]:
        variables = _own_ranks(self.members(job), member, addresses)
        return variables | {"WORKSHOP_SERVERS": str(job.parameter_servers)}


# torchrun's ranks share its store by default; ranks that are started anew may then find the addresses of dead ones
# there, and hang (https://github.com/pytorch/pytorch/issues/135712).
TORCHRUN_RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class TorchDDP(Strategy):
    """PyTorch's process group: rank 0 keeps the store in which the others find each other.

    Source: PyTorch, "Environment variable initialization" in torch.distributed.
    """

    name = "torch_ddp"

    def members(self, job: TrainingJob) -> tuple[Member, ...]:
        return _meeting_at_rank_0(job)

    def environment(self, job: TrainingJob, member: Member, addresses: Addresses) -> dict[str, str]:
        host, port = addresses.split("worker-0")
        return {
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "RANK": str(member.rank),
            "WORLD_SIZE": str(job.workers),
            "LOCAL_RANK": str(member.rank),
            "LOCAL_WORLD_SIZE": str(job.workers),
            "GLOO_SOCKET_IFNAME": addresses.interface,
        }


class Horovod(Strategy):
    """Horovod with Gloo: the ranks meet at a key-value server that the launcher keeps.

    Source: Horovod 0.28.1, horovod/runner/gloo_run.py, `create_slot_env_vars`.
    """

    name = "horovod"

    def members(self, job: TrainingJob) -> tuple[Member, ...]:
        rendezvous = Member("rendezvous", 0, awaited=False, listens=True, leaves=False)
        return (rendezvous, *super().members(job))

    def environment(self, job: TrainingJob, member: Member, addresses: Addresses) -> dict[str, str]:
        if member.role == "rendezvous":
            return {}
        host, port = addresses.split("rendezvous-0")
        rank, size = str(member.rank), str(job.workers)
        return {
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": rank,
            "HOROVOD_LOCAL_SIZE": size,
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
            "HOROVOD_GLOO_IFACE": addresses.interface,
        }


class HorovodElastic(Strategy):
    """Horovod with Gloo, whose workers may come and go: a driver starts them, and tells each its rank.

    Source: Horovod 0.28.1, horovod/runner/elastic/driver.py.
    """

    name = "horovod_elastic"

    def members(self, job: TrainingJob) -> tuple[Member, ...]:
        return _started_by(Member("driver", 0, listens=True), job)


class MPI(Strategy):
    """Ranks that mpirun starts and connects, as the MPI standard has it."""

    name = "mpi"
    started_by_mpirun = True


class Spark(Strategy):
    """PyTorch's process group, in the tasks of a Spark stage: TorchDistributor starts the ranks, all or none.

    A script that imports pyspark is a Spark program: it runs as the driver, and the workers are threads or executors.
    Source: PySpark 3.5, pyspark/ml/torch/distributor.py.
    """

    name = "spark"

    def members(self, job: TrainingJob) -> tuple[Member, ...]:
        return _started_by(Member("driver", 0), job)

    def environment(self, job: TrainingJob, member: Member, addresses: Addresses) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": addresses.interface}


class MultiWorkerMirrored(Strategy):
    """TensorFlow's synchronous data parallelism: every worker holds all variables.

    Source: TensorFlow, "Multi-worker training with Keras".
    """

    name = "multi_worker_mirrored"

    def members(self, job: TrainingJob) -> tuple[Member, ...]:
        return tuple(Member("worker", rank, rank, listens=True) for rank in range(job.workers))

    def environment(self, job: TrainingJob, member: Member, addresses: Addresses) -> dict[str, str]:
        return _tf_config(self.members(job), member, addresses)


class ParameterServer(Strategy):
    """TensorFlow's parameter servers: the chief hands out steps, the workers compute them, servers keep variables.

    Source: TensorFlow, "Parameter server training with ParameterServerStrategy".
    """

    name = "parameter_server"
    has_servers = True

    def check(self, job: TrainingJob) -> None:
        super().check(job)
        if job.workers < 2:
            raise JobError(
                f"workers is {job.workers}; strategy 'parameter_server' needs at least 2 (a chief and "
                f"{job.parameter_servers} server(s) are added to them)"
            )

    def members(self, job: TrainingJob) -> tuple[Member, ...]:
        servers = (Member("ps", index, awaited=False, listens=True) for index in range(job.parameter_servers))
        workers = (
            Member("worker", index, index + 1, awaited=False, listens=True) for index in range(job.workers)
        )
        return (Member("chief", 0, 0, listens=True), *servers, *workers)

    def environment(self, job: TrainingJob, member: Member, addresses: Addresses) -> dict[str, str]:
        return _tf_config(self.members(job), member, addresses)


def _meeting_at_rank_0(job: TrainingJob) -> tuple[Member, ...]:
    return tuple(Member("worker", rank, rank, listens=rank == 0) for rank in range(job.workers))


def _started_by(driver: Member, job: TrainingJob) -> tuple[Member, ...]:
    ranks = range(job.workers)
    return (driver, *(Member("worker", rank, rank, awaited=False, started_by=driver.name) for rank in ranks))


def _own_ranks(members: Sequence[Member], member: Member, addresses: Addresses) -> dict[str, str]:
    host, port = addresses.split(members[0].name)
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "RANK": str(member.rank),
        "WORLD_SIZE": str(len(members)),
        "LOCAL_RANK": str(member.rank),
        "WORKSHOP_SECRET": addresses.secret,
    }


def _tf_config(members: Sequence[Member], member: Member, addresses: Addresses) -> dict[str, str]:
    cluster: dict[str, list[str]] = {}
    for other in members:
        cluster.setdefault(other.role, []).append(addresses.of[other.name])
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": member.role, "index": member.index}})
    }


STRATEGIES: dict[StrategyName, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Single(),
        Ring(),
        WorkshopParameterServer(),
        TorchDDP(),
        Horovod(),
        HorovodElastic(),
        MPI(),
        Spark(),
        MultiWorkerMirrored(),
        ParameterServer(),
    )
}


def strategy_of(job: TrainingJob) -> Strategy:
    """The strategy of `job`, once it has agreed to it. Raises JobError where it has not."""
    strategy = STRATEGIES[job.strategy]
    strategy.check(job)
    return strategy
