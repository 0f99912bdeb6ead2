"""Which instances a job takes, and who runs on which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workshop_utils.jobs import JobError, StrategyName, TrainingJob
from workshop_utils.launchers.sagemaker.settings import Settings
from workshop_utils.strategies import Member, strategy_of

# What the toolkit inside AWS's images can start. The others are the workshop's own: own drivers start them.
TOOLKIT_STRATEGIES: tuple[StrategyName, ...] = (
    "single",
    "horovod",
    "mpi",
    "parameter_server",
    "multi_worker_mirrored",
    "torch_ddp",
)
MANY_A_HOST: tuple[StrategyName, ...] = ("horovod", "mpi", "torch_ddp")  # to the toolkit


@dataclass(frozen=True)
class Layout:
    """The hosts of a job in SageMaker's order, and how many processes of the script each runs."""

    hosts: tuple[str, ...]
    processes_per_host: int


def host_names(count: int) -> tuple[str, ...]:
    """`algo-1` to `algo-COUNT` as SageMaker lists them: sorted as text, so `algo-10` stands before `algo-2`."""
    return tuple(sorted(f"algo-{number}" for number in range(1, count + 1)))


def layout(job: TrainingJob, settings: Settings) -> Layout:
    """The hosts that `job` takes.

    Raises:
        JobError: if the job cannot be laid out so; the message says what would be right.
    """
    strategy = strategy_of(job)
    per_host = settings.processes_per_host
    if settings.mode == "toolkit":
        if job.strategy not in TOOLKIT_STRATEGIES:
            raise JobError(
                f"strategy is {job.strategy!r}; the toolkit in SageMaker's images does not know it: set mode: drivers"
            )
        if per_host > 1 and job.strategy not in MANY_A_HOST:
            raise JobError(
                f"processes_per_host is {per_host}; with strategy {job.strategy!r} the toolkit starts one on each host"
            )
    if job.strategy == "parameter_server":
        return Layout(host_names(_parameter_server_hosts(job, settings)), 1)
    if strategy.started_by_mpirun and settings.mode != "toolkit":
        raise JobError(
            "strategy is 'mpi'; mpirun reaches the other hosts through the toolkit: set mode: toolkit"
        )
    if settings.mode != "toolkit" and any(member.started_by for member in strategy.members(job)):
        raise JobError(
            f"strategy is {job.strategy!r}; its driver starts workers on one machine alone: run it locally"
        )
    if job.workers % per_host:
        raise JobError(
            f"workers is {job.workers} and processes_per_host {per_host}; the first must be a multiple of the second"
        )
    return Layout(host_names(job.workers // per_host), per_host)


def _parameter_server_hosts(job: TrainingJob, settings: Settings) -> int:
    """One host for the chief, who does not train, and one for each worker; servers run beside them."""
    if settings.processes_per_host > 1:
        raise JobError("processes_per_host must be 1 with strategy 'parameter_server'")
    hosts = job.workers + 1
    if settings.mode == "toolkit" and job.parameter_servers not in (1, hosts):
        raise JobError(
            f"parameter_servers is {job.parameter_servers}; the toolkit runs one on each of the {hosts} hosts: leave "
            "it out, or set mode: drivers"
        )
    return hosts


def members_by_host(job: TrainingJob, plan: Layout) -> dict[str, list[Member]]:
    """Which members of `job` each host starts, for own drivers.

    Those that train go to the hosts in turn, `processes_per_host` to each; servers are spread over all hosts, and a
    rendezvous is on the first.
    """
    placed: dict[str, list[Member]] = {host: [] for host in plan.hosts}
    trained = served = 0
    for member in strategy_of(job).members(job):
        if member.role in ("ps", "server"):
            host, served = plan.hosts[served % len(plan.hosts)], served + 1
        elif member.role == "rendezvous":
            host = plan.hosts[0]
        else:
            host, trained = plan.hosts[trained // plan.processes_per_host], trained + 1
        placed[host].append(member)
    return placed


def order_of(hosts: Sequence[str]) -> list[int]:
    """The numbers in `algo-N`, in the order of `hosts`; for a lesson that shows how text is sorted."""
    return [int(host.removeprefix("algo-")) for host in hosts]
