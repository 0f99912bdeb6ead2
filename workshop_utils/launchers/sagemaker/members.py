"""What each host starts with `mode: drivers`: the members of the job's strategy, and how they find each other.

`driver` reads it on the host. In its commands and values, three words stand for what only the host itself knows:
{python}, {drivers} (its own folder) and {interface} (the network interface).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workshop_utils.launchers.sagemaker import contract
from workshop_utils.launchers.sagemaker.request import Members, Plan
from workshop_utils.strategies import Addresses, strategy_of

FIRST_PORT = 7000  # of the processes that listen; within a job's security group any will do


def process(
    name: str, command: list[str], environment: Mapping[str, str] | None = None, awaited: bool = True
) -> dict[str, Any]:
    """A process for the driver to start. It waits for those that are `awaited`, then ends the others."""
    return {"name": name, "command": command, "environment": dict(environment or {}), "awaited": awaited}


def script(plan: Plan) -> list[str]:
    """The command that starts the job's script on any host."""
    return ["{python}", plan.job.script, *contract.arguments(plan.job.arguments)]


def addresses(plan: Plan) -> dict[str, str]:
    """host:port of each process that listens: the hosts' names are known before there are any hosts."""
    specs = strategy_of(plan.job).plan(plan.job, Addresses(nodes=plan.hosts))
    return {
        spec.name: f"{plan.hosts[spec.node]}:{FIRST_PORT + number}"
        for number, spec in enumerate(specs)
        if spec.listens
    }


def members(plan: Plan, at: Mapping[str, str], bind_to: str = "") -> Members:
    """What each host starts, where processes listen `at` these addresses; a rendezvous may bind to another."""
    meeting = Addresses(at, plan.hosts, interface="{interface}", secret=plan.secret, bind=bind_to)
    specs = strategy_of(plan.job).plan(plan.job, meeting)
    words = {"script": plan.job.script, "programs": "{drivers}"}
    specs = [spec.filled(**words) for spec in specs]
    started: dict[str, list[dict[str, Any]]] = {}
    for node, host in enumerate(plan.hosts):
        placed = [spec for spec in specs if spec.node == node]
        # A host without a process to wait for has servers and workers, which leave when their chief does.
        nobody = not any(spec.awaited for spec in placed)
        started[host] = [
            process(spec.name, list(spec.argv), spec.environment, spec.awaited or (nobody and spec.leaves))
            for spec in placed
        ]
    return started
