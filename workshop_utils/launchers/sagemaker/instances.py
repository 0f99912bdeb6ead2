"""A local stand-in for N instances: each host's container is a process here, with the toolkit's contract kept.

    run = Instances(processes_per_host=2).launch(job)     # no AWS at all
    Instances(network=Network(bandwidth="100Mbit", racks=2, spine="100Mbit")).launch(job)

Every host has folders of its own like those below /opt/ml, the variables, files and arguments that `contract` says,
and runs the same container program. Where it differs from an instance is listed in `contract.EXCEPTIONS`. With a
network, each host is a network namespace in which the names `algo-N` and the ports are SageMaker's own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop_utils import data, wiring
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import endings, mpirun
from workshop_utils.launchers.process_run import (
    ProcessRun,
    await_horovod,
    inherited_variables,
    reserve,
    scratch_folder,
)
from workshop_utils.launchers.sagemaker import contract
from workshop_utils.launchers.sagemaker import request as requests
from workshop_utils.launchers.sagemaker.hosts import host_names
from workshop_utils.launchers.sagemaker.settings import Settings
from workshop_utils.launchers.sagemaker.source import driver_files
from workshop_utils.launchers.source import shipped
from workshop_utils.network import INTERFACE, Network, availability
from workshop_utils.processes.group import Process, Switch
from workshop_utils.strategies import strategy_of

NOBODY = "arn:aws:iam::000000000000:role/nobody"  # the stand-in asks nobody for permission
# Runs a command with a file in the place of /etc/hosts, for itself and its children alone.
WITH_HOSTS_FILE = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')


@dataclass(frozen=True)
class Assignment:
    """What the instances are to carry out.

    Attributes:
        body: a CreateTrainingJob request.
        members: what own drivers start, by host; None for the classic mode.
        source: a folder, or a sourcedir.tar.gz, that becomes /opt/ml/code.
        channels: a folder by channel.
        modules: further files of the source, text by path.
        checkpoints: a folder that outlives the run, for what the job must not lose.
    """

    body: Mapping[str, Any]
    members: Mapping[str, Any] | None
    source: Path
    channels: Mapping[str, Path]
    modules: Mapping[str, str] = field(default_factory=dict)
    checkpoints: Path | None = None

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts, in SageMaker's order."""
        return list(host_names(self.body["ResourceConfig"]["InstanceCount"]))


class Instances:
    """Launches jobs on local stand-ins for instances. `settings` are those of `Settings`; a role is not needed.

    With a `network`, the hosts are joined by slow links; `output` is where a job's model stays.
    """

    def __init__(
        self, network: Network | None = None, output: str | Path | None = None, **settings: Any
    ) -> None:
        self.network = network
        self.output = Path(output).absolute() if output is not None else None
        self.settings = Settings(**{"role": NOBODY, "region": "us-east-1", **settings})

    def render(self, job: TrainingJob) -> requests.Request:
        """The request that the instances would carry out. Raises JobError as `request.build` does."""
        # What an image holds does not matter here: Python and its packages are this environment's.
        return requests.build(job.replace(image=job.image or "stand-in"), self.settings)

    def launch(self, job: TrainingJob) -> InstancesRun:
        """Start the job. Raises JobError as `render` does, and where the network cannot be emulated."""
        request = self.render(job)
        assignment = Assignment(
            request.body,
            request.members,
            job.folder.absolute(),
            {requests.DATA: data.prepare(job.data)},
            shipped(strategy_of(job)),
        )
        await_horovod(job)
        return self.carry_out(assignment)

    def carry_out(self, assignment: Assignment) -> InstancesRun:
        """Start what a request asks for."""
        if self.output is not None:
            self.output.mkdir(parents=True, exist_ok=True)
        return InstancesRun(assignment, self.network, self.output)


class InstancesRun(ProcessRun):
    """A run on stand-in instances; its workers are called as their hosts are."""

    def __init__(self, assignment: Assignment, network: Network | None, output: Path | None) -> None:
        body, hosts = assignment.body, assignment.hosts
        name: str = body["TrainingJobName"]
        emulated = _check_network(network, hosts)
        meeting = _addresses(assignment) if network is None else []  # in namespaces they are SageMaker's own
        with reserve(len(meeting)) as reservation:
            super().__init__(name, tuple(hosts), reservation)
            self.network = emulated
            scratch = scratch_folder()
            addresses = {
                place: f"127.0.0.1:{port}" for place, port in zip(meeting, reservation.ports, strict=True)
            }
            files = {f"drivers/{driver}": text for driver, text in driver_files().items()}
            for host in hosts:
                files |= _files_of(
                    host, assignment, addresses, INTERFACE if network else "lo", scratch, output
                )
            if network is not None:
                lines = [f"{network.address(index)} {host}\n" for index, host in enumerate(hosts)]
                files["hosts"] = "127.0.0.1 localhost\n" + "".join(lines)
            processes, switch = _processes(hosts, assignment, network, scratch)
            limit = body["StoppingCondition"]["MaxRuntimeInSeconds"]
            self._start(processes, limit, scratch, files, switch)

    def _timed_out(self) -> str:
        return "MaxRuntimeExceeded: the job met its time limit"

    def _blame(self, name: str, code: int | None, reason: str | None) -> str:
        if reason is not None or code is None:
            why = endings.unwatched(self.name) if reason is None else reason
            return f"InternalServerError: {why}"
        said = [line.text for line in self.logs() if line.worker == name or name not in self.workers]
        how = f"exit code: {code}" if code >= 0 else f"which {endings.how(code)}"
        return f"AlgorithmError: ExecuteUserScriptError on {name}, {how}. {endings.last_lines(said)}"


def _check_network(network: Network | None, hosts: list[str]) -> str | None:
    """What is emulated, in words. Raises JobError where it cannot be: hosts are told apart by namespaces alone."""
    if network is None:
        return None
    network.check(hosts)
    if availability() == "none":
        raise JobError(
            "network: this machine has no network namespaces, so stand-in instances cannot have slow links; leave the "
            "network out"
        )
    return network.describe("network namespaces")


def _addresses(assignment: Assignment) -> list[str]:
    """Every host:port at which a process of the job listens, as SageMaker has them."""
    hosts = assignment.hosts
    if assignment.members is not None:
        return [
            member["address"]
            for listed in assignment.members.values()
            for member in listed
            if member["address"]
        ]
    _, toolkit = contract.split(dict(assignment.body.get("HyperParameters", {})))
    if toolkit.get("sagemaker_parameter_server_enabled"):
        cluster = contract.parameter_server_cluster(hosts)
        return [address for listed in cluster.values() for address in listed]
    if toolkit.get("sagemaker_multi_worker_mirrored_strategy_enabled"):
        return [f"{host}:{contract.MIRRORED_PORT}" for host in hosts]
    if toolkit.get("sagemaker_torch_distributed_enabled"):
        return [f"{hosts[0]}:{contract.TORCH_PORT}"]
    return []


def _files_of(
    host: str,
    assignment: Assignment,
    addresses: Mapping[str, str],
    interface: str,
    scratch: Path,
    output: Path | None,
) -> dict[str, str]:
    """The files that the host's container finds before it starts, text by path below the scratch folder."""
    body, hosts = assignment.body, assignment.hosts
    kind = body["ResourceConfig"]["InstanceType"]
    modes = {channel["ChannelName"]: channel.get("InputMode", "File") for channel in body["InputDataConfig"]}
    channels = {name: mode for name, mode in modes.items() if name in assignment.channels}
    configuration = {
        "resourceconfig.json": contract.resource_config(hosts, host, kind, interface),
        "inputdataconfig.json": contract.input_data_config(channels),
        "hyperparameters.json": dict(body.get("HyperParameters", {})),
    }
    stand_in: dict[str, Any] = {
        "addresses": dict(addresses),
        "channels": {name: str(path) for name, path in assignment.channels.items()},
        "source": str(assignment.source),
        "mpirun": _mpirun(body, scratch),
    }
    if output is not None:
        stand_in["model"] = str(output)
    root = f"{host}/opt/ml"
    files = {f"{root}/input/config/{name}": json.dumps(content) for name, content in configuration.items()}
    files[f"{root}/stand_in.json"] = json.dumps(stand_in)
    if assignment.members is not None:
        files[f"{root}/members.json"] = json.dumps(assignment.members)
    return {**files, **{f"{root}/code/{name}": text for name, text in assignment.modules.items()}}


def _mpirun(body: Mapping[str, Any], scratch: Path) -> list[str]:
    """The command that starts all MPI ranks of the job on this one machine; empty where there is no MPI in it."""
    _, toolkit = contract.split(dict(body.get("HyperParameters", {})))
    if not toolkit.get("sagemaker_mpi_enabled"):
        return []
    ranks = int(toolkit["sagemaker_mpi_num_of_processes_per_host"]) * body["ResourceConfig"]["InstanceCount"]
    return [
        "env",
        *(f"{name}={value}" for name, value in mpirun.scratch_variables(scratch).items()),
        mpirun.program("hyperparameter sagemaker_mpi_enabled is true"),
        *("--allow-run-as-root", "--tag-output", "-np", str(ranks)),  # as the toolkit has them
        *(*mpirun.SHARING, *mpirun.as_options(mpirun.YIELDING | mpirun.WITHOUT_RDMA)),
    ]


def _processes(
    hosts: list[str], assignment: Assignment, network: Network | None, scratch: Path
) -> tuple[list[Process], Switch | None]:
    body = assignment.body
    switch, cables = None, [None] * len(hosts)
    program: tuple[str, ...] = (sys.executable, str(scratch / "drivers" / requests.ENTRY_POINT))
    if network is not None:
        switch, cables = wiring.wire(network, hosts, availability() != "root")  # type: ignore[assignment]
        program = (*WITH_HOSTS_FILE, str(scratch / "hosts"), *program)
    processes = [
        Process(
            host,
            program,
            {
                **inherited_variables(),
                "OMP_NUM_THREADS": "1",  # the hosts share this machine's cores
                "TF_NUM_INTRAOP_THREADS": "1",
                **body.get("Environment", {}),
                "TRAINING_JOB_NAME": body["TrainingJobName"],
                "TMPDIR": str(scratch),
                "SAGEMAKER_BASE_DIR": str(scratch / host / "opt" / "ml"),
                # In the place of /opt/ml/checkpoints, which is not below the root.
                "WORKSHOP_CHECKPOINTS": str(
                    assignment.checkpoints or scratch / host / "opt" / "ml" / "checkpoints"
                ),
            },
            str(Path(tempfile.gettempdir())),
            network=cable,
        )
        for host, cable in zip(hosts, cables, strict=True)
    ]
    return processes, switch
