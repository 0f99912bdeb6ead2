"""Emulated instances: each host's container is a process here, with the toolkit's contract kept.

    run = Instances(processes_per_host=2).launch(job)     # no AWS at all
    Instances(network=Network(bandwidth="100Mbit", racks=2, spine="100Mbit")).launch(job)

Every host has folders of its own like those below /opt/ml, and the variables, files and arguments that `contract` has.
`contract.EXCEPTIONS` lists how it differs from an instance. With a network, each host is a network namespace in which
the names `algo-N` and the ports are SageMaker's own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.local.environment import (
    await_horovod,
    inherited_variables,
    reserve,
    scratch_folder,
)
from workshop_utils.launchers.local.group import Process
from workshop_utils.launchers.local.run import ProcessRun
from workshop_utils.launchers.sagemaker import contract, emulated_toolkit, members
from workshop_utils.launchers.sagemaker.request import Plan, plan
from workshop_utils.launchers.sagemaker.settings import Settings
from workshop_utils.launchers.source import shipped
from workshop_utils.network import INTERFACE, Network, availability, wiring
from workshop_utils.strategies import strategy_of
from workshop_utils.training import data

HERE = Path(__file__).parent
PROGRAMS = (
    HERE / "emulated_host.py",
    HERE / "driver.py",
    HERE / "parameter_server.py",
    HERE.parent / "local" / "horovod_rendezvous.py",
)
NOBODY = "arn:aws:iam::000000000000:role/nobody"  # emulated instances ask nobody for permission
# Runs a command with a file in the place of /etc/hosts, for itself and its children alone.
WITH_HOSTS_FILE = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')


class Instances:
    """Launches jobs on emulated instances. `settings` are those of `Settings`; a role is not needed.

    With a `network`, the hosts are joined by slow links; `output` is where a job's model stays.
    """

    def __init__(
        self, network: Network | None = None, output: str | Path | None = None, **settings: Any
    ) -> None:
        self.network = network
        self.output = Path(output).absolute() if output is not None else None
        self.settings = Settings(**{"role": NOBODY, "region": "us-east-1", **settings})

    def launch(self, job: TrainingJob) -> InstancesRun:
        """Start the job. Raises JobError where it cannot be laid out so, or the network cannot be emulated."""
        planned = plan(job, self.settings)
        if self.network is not None:
            self.network.check(planned.hosts)
            if availability() == "none":
                raise JobError(
                    "network: this machine has no network namespaces, so emulated instances cannot have slow links; "
                    "leave the network out"
                )
        folder = data.prepare(job.data)
        await_horovod(job)
        if self.output is not None:
            self.output.mkdir(parents=True, exist_ok=True)
        return InstancesRun(planned, folder, self.network, self.output)


class InstancesRun(ProcessRun):
    """A run on emulated instances; its workers are called as their hosts are."""

    answered_by = "emulated instances on this machine: nothing reaches AWS, nothing costs money"

    def __init__(self, plan: Plan, data_folder: Path, network: Network | None, output: Path | None) -> None:
        by_driver = plan.settings.mode == "drivers"
        at = members.addresses(plan) if by_driver else emulated_toolkit.addresses(plan)
        # In namespaces addresses are SageMaker's own; outside, each is a loopback port.
        with reserve(0 if network else len(at)) as reservation:
            super().__init__(plan.name, plan.hosts, reservation)
            if network is None:
                at = {name: f"127.0.0.1:{port}" for name, port in zip(at, reservation.ports, strict=True)}
            self.network = network.describe("network namespaces") if network else None
            scratch = scratch_folder()
            started = members.members(plan, at) if by_driver else emulated_toolkit.started(plan, at, scratch)
            files = {f"drivers/{program.name}": program.read_text(encoding="utf-8") for program in PROGRAMS}
            files["drivers/members.json"] = json.dumps(started)
            files |= {f"source/{name}": text for name, text in shipped(strategy_of(plan.job)).items()}
            code = "input/data/code" if by_driver else "code"
            contents = (output or "", data_folder, code, plan.job.folder.absolute(), scratch / "source")
            program: Sequence[str] = (sys.executable, str(scratch / "drivers" / "emulated_host.py"))
            switch, cables = None, [None] * len(plan.hosts)
            if network is not None:
                switch, cables = wiring.wire(network, plan.hosts, availability() != "root")  # type: ignore[assignment]
                program = (*WITH_HOSTS_FILE, str(scratch / "hosts"), *program)
                names = [f"{network.address(index)} {host}\n" for index, host in enumerate(plan.hosts)]
                files["hosts"] = "127.0.0.1 localhost\n" + "".join(names)
            processes = []
            for host, cable in zip(plan.hosts, cables, strict=True):
                root = scratch / host / "opt" / "ml"
                found, variables = contract.container(plan, host, str(root), INTERFACE if network else "lo")
                files |= {f"{host}/opt/ml/input/config/{name}": text for name, text in found.items()}
                argv = (*program, str(root), *map(str, contents))
                environment = _environment(plan, host, scratch) | variables
                processes.append(Process(host, argv, environment, tempfile.gettempdir(), network=cable))
            self._start(processes, plan.limit_seconds, scratch, files, switch)

    def _timed_out(self) -> str:
        return "MaxRuntimeExceeded: the job met its time limit"

    def _blame(self, name: str, code: int) -> str:
        said = [line.text for line in self.logs() if line.worker == name or name not in self.workers]
        how = f"exit code: {code}" if code >= 0 else f"which {output.how(code)}"
        return f"AlgorithmError: ExecuteUserScriptError on {name}, {how}. {output.last_lines(said)}"


def _environment(plan: Plan, host: str, scratch: Path) -> dict[str, str]:
    """What the process that plays the container of `host` finds beside the contract's variables."""
    return {
        **inherited_variables(),
        "OMP_NUM_THREADS": "1",  # the hosts share this machine's cores
        "TF_NUM_INTRAOP_THREADS": "1",
        **plan.environment,
        "TMPDIR": str(scratch),
        "WORKSHOP_EMULATED": "1",
        # In the place of /opt/ml/checkpoints.
        "WORKSHOP_CHECKPOINTS": str(scratch / host / "opt" / "ml" / "checkpoints"),
    }
