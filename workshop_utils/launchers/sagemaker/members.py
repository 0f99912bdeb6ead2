"""What each host starts with `mode: drivers`: the members of the job's strategy, and how they find each other.

`driver` reads it on the host. In its commands and values, three words stand for what only the host itself knows:
{python}, {drivers} (its own folder) and {interface} (the network interface).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workshop_utils.launchers.sagemaker import contract
from workshop_utils.launchers.sagemaker.request import Members, Plan
from workshop_utils.strategies import Addresses, Member, strategy_of

FIRST_PORT = 7000  # of the processes that listen; within a job's security group any will do


def process(
    name: str, command: list[str], environment: Mapping[str, str] | None = None, awaited: bool = True
) -> dict[str, Any]:
    """A process for the driver to start. It waits for those that are `awaited`, then ends the others."""
    return {"name": name, "command": command, "environment": dict(environment or {}), "awaited": awaited}


def script(plan: Plan) -> list[str]:
    """The command that starts the job's script on any host."""
    return ["{python}", plan.job.script, *contract.arguments(plan.job.arguments)]


def by_host(plan: Plan) -> dict[str, list[Member]]:
    """Which members of the job each host starts.

    Those that train go to the hosts in turn, `processes_per_host` to each; servers are spread over all hosts, and a
    rendezvous is on the first.
    """
    placed: dict[str, list[Member]] = {host: [] for host in plan.hosts}
    trained = served = 0
    for member in strategy_of(plan.job).members(plan.job):
        if member.role in ("ps", "server"):
            host, served = plan.hosts[served % len(plan.hosts)], served + 1
        elif member.role == "rendezvous":
            host = plan.hosts[0]
        else:
            host, trained = plan.hosts[trained // plan.settings.processes_per_host], trained + 1
        placed[host].append(member)
    return placed


def addresses(plan: Plan) -> dict[str, str]:
    """host:port of each member that listens: the hosts' names are known before there are any hosts."""
    where = {member.name: host for host, placed in by_host(plan).items() for member in placed}
    return {
        member.name: f"{where[member.name]}:{FIRST_PORT + number}"
        for number, member in enumerate(strategy_of(plan.job).members(plan.job))
        if member.listens
    }


def members(plan: Plan, at: Mapping[str, str], bind_to: str | None = None) -> Members:
    """What each host starts, where members listen `at` these addresses; a rendezvous may bind to another."""
    strategy = strategy_of(plan.job)
    meeting = Addresses(at, interface="{interface}", secret=plan.secret)
    started: dict[str, list[dict[str, Any]]] = {}
    for host, placed in by_host(plan).items():
        started[host] = []
        for member in placed:
            command, environment = script(plan), {}
            if member.role == "rendezvous":
                address, port = meeting.split(member.name)
                server = "{drivers}/horovod_rendezvous.py"
                command = ["{python}", "-I", "-S", server, bind_to or address, port]
            else:
                environment = strategy.environment(plan.job, member, meeting)
                environment |= _on_its_host(environment, member, placed, plan, host)
            # A host without anybody to wait for has servers and workers, which leave when their chief does.
            leaves = member.leaves and not any(other.awaited for other in placed)
            started[host].append(process(member.name, command, environment, member.awaited or leaves))
    return started


def _on_its_host(
    environment: Mapping[str, str], member: Member, placed: list[Member], plan: Plan, host: str
) -> dict[str, str]:
    """Of the variables in `environment`, those that depend on which members share a host: no strategy knows it."""
    ranks = [other for other in placed if other.rank is not None]
    local_rank = str(ranks.index(member) if member in ranks else 0)
    local = {
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "HOROVOD_LOCAL_RANK": local_rank,
        "HOROVOD_LOCAL_SIZE": str(len(ranks)),
        "HOROVOD_CROSS_RANK": str(plan.hosts.index(host)),
        "HOROVOD_CROSS_SIZE": str(len(plan.hosts)),
        "HOROVOD_HOSTNAME": host,
    }
    return {name: value for name, value in local.items() if name in environment}
