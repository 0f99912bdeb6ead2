"""What the toolkit of an emulated instance starts in classic script mode.

Addresses are SageMaker's own (`algo-1:2222`), each with what stands for it here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workshop_utils.launchers.local.environment import mpirun_program
from workshop_utils.launchers.sagemaker import contract
from workshop_utils.launchers.sagemaker.members import process, script
from workshop_utils.launchers.sagemaker.request import Members, Plan
from workshop_utils.strategies import MPI_FOLDERS, MPI_ON_ONE_MACHINE, mpi_options


def addresses(plan: Plan) -> dict[str, str]:
    """Every host:port at which a process of the job listens, standing for itself."""
    clusters = {
        "parameter_server": contract.parameter_server_cluster(plan.hosts),
        "multi_worker_mirrored": {"worker": [f"{host}:{contract.MIRRORED_PORT}" for host in plan.hosts]},
        "torch_ddp": {"store": [f"{plan.hosts[0]}:{contract.TORCH_PORT}"]},
    }
    cluster = clusters.get(plan.job.strategy, {})
    return {address: address for listening in cluster.values() for address in listening}


def started(plan: Plan, at: Mapping[str, str], scratch: Path) -> Members:
    """The processes that each host's toolkit starts. Of MPI's ranks, mpirun on the first host starts all."""
    if plan.job.strategy in ("mpi", "horovod"):
        return {**{host: [] for host in plan.hosts}, plan.hosts[0]: [_mpirun(plan, scratch)]}
    return {host: _on(host, plan, at) for host in plan.hosts}


def _on(host: str, plan: Plan, at: Mapping[str, str]) -> list[dict[str, Any]]:
    if plan.job.strategy == "parameter_server":
        server = _config(contract.parameter_server_config(plan.hosts, host, server=True), at)
        worker = _config(contract.parameter_server_config(plan.hosts, host), at)
        command = ["{python}", "{drivers}/parameter_server.py", server]
        # A server beside the script on every host. All but the first wait until the first has gone.
        return [
            process("server", command, awaited=host != plan.hosts[0]),
            process("script", script(plan), {"TF_CONFIG": worker}),
        ]
    if plan.job.strategy == "multi_worker_mirrored":
        config = _config(contract.mirrored_config(plan.hosts, host), at)
        return [process("script", script(plan), {"TF_CONFIG": config})]
    if plan.job.strategy == "torch_ddp":
        meeting = at[f"{plan.hosts[0]}:{contract.TORCH_PORT}"]
        words = contract.torchrun(plan.hosts, host, plan.settings.processes_per_host, meeting)
        command = ["{python}", "-m", "torch.distributed.run", *words, *script(plan)[1:]]
        interface = {"GLOO_SOCKET_IFNAME": "{interface}", "NCCL_SOCKET_IFNAME": "{interface}"}
        return [process("torchrun", command, interface)]
    return [process("script", script(plan))]


def _mpirun(plan: Plan, scratch: Path) -> dict[str, Any]:
    command = [
        mpirun_program("hyperparameter sagemaker_mpi_enabled is true"),
        *("--allow-run-as-root", "--tag-output", "-np", str(plan.job.workers)),  # as the toolkit has them
        *("--oversubscribe", "--bind-to", "none", *mpi_options(MPI_ON_ONE_MACHINE)),
        *("{python}", "-m", "mpi4py", *script(plan)[1:]),
    ]
    return process("mpirun", command, dict.fromkeys(MPI_FOLDERS, str(scratch)))


def _config(described: Mapping[str, Any], at: Mapping[str, str]) -> str:
    """TF_CONFIG with the addresses that stand for SageMaker's here."""
    text = json.dumps(described)
    for address, here in at.items():
        text = text.replace(f'"{address}"', f'"{here}"')
    return text
