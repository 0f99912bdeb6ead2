"""Real processes on this machine, one for each member of the job."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import endings
from workshop_utils.launchers.local import hang, mpirun, warm
from workshop_utils.launchers.local.group import Event, Process
from workshop_utils.launchers.local.process_run import (
    ProcessRun,
    await_horovod,
    inherited_variables,
    reserve,
    scratch_folder,
)
from workshop_utils.launchers.source import shipped
from workshop_utils.network import INTERFACE, Emulation, Network, availability, wiring
from workshop_utils.network.ports import PortReservation
from workshop_utils.network.wiring import Cable, Switch
from workshop_utils.strategies import Addresses, Member, Strategy, strategy_of
from workshop_utils.training import data

if TYPE_CHECKING:
    from workshop_utils.launchers.spark import Spark

RENDEZVOUS = Path(__file__).with_name("horovod_rendezvous.py")
# Of one run: many times what a machine has cores for, and known to be rendered in seconds.
MOST_PROCESSES = 1000
ELASTIC = Path(__file__).with_name("horovod_elastic.py")
# What that driver writes before each line of a worker.
ELASTIC_TAG = re.compile(r"\[(worker-\d+)\]<(stdout|stderr)>: (.*)")


@dataclass(frozen=True)
class LocalRequest:
    """What `launch` would start: the exact processes, with the variables that are added to this environment's."""

    processes: tuple[Process, ...]
    added: tuple[dict[str, str], ...]
    switch: Switch | None = None
    network: str | None = None  # what is emulated, and how
    emulation: Emulation | None = None
    files: Mapping[str, str] = field(default_factory=dict)  # of the run's folder, by path

    def __str__(self) -> str:
        network = f"# network: {self.network}\n\n" if self.network else ""
        return network + "\n\n".join(
            f"# {process.name}\n"
            + "".join(f"{name}={_shown(name, value)} \\\n" for name, value in added.items())
            + shlex.join(process.argv)
            for process, added in zip(self.processes, self.added, strict=True)
        )

    __repr__ = __str__


def _shown(name: str, value: str) -> str:
    return "****" if "SECRET" in name else shlex.quote(value)


class Local:
    """Launches jobs as processes of this machine.

    With a `network`, the processes are joined by slow links (see `workshop_utils.network`); the run says how. With
    `warm`, ranks of scripts that use PyTorch, TensorFlow or NumPy fork from a server that has imported it already (see
    `processes.warm`); other scripts start cold all the same. A forked script cannot change variables that its framework
    reads on import; TensorFlow was imported without oneDNN. `output` is the folder in which a job's model stays;
    without it, models are gone when the run ends.
    """

    def __init__(
        self, network: Network | None = None, warm: bool = False, output: str | Path | None = None
    ) -> None:
        self.network = network
        self.warm = warm
        self.output = Path(output).absolute() if output is not None else None

    def render(self, job: TrainingJob) -> LocalRequest:
        """The processes that `launch` would start, with ports that were free just now. Starts nothing.

        Raises:
            JobError: if the job asks for what its strategy, or this machine, does not have.
        """
        if job.strategy == "spark":
            return self._spark(job).render(job)
        with PortReservation(_listeners(job)) as reservation:
            return self._request(job, reservation.ports, Path(tempfile.gettempdir()) / "workshop-...")

    def launch(self, job: TrainingJob) -> LocalRun:
        """Start the job.

        Raises:
            JobError: as `render` does; nothing has been started then.
        """
        if job.strategy == "spark":
            return self._spark(job).launch(job)
        await_horovod(job)
        with reserve(_listeners(job)) as reservation:
            if self.output is not None:
                self.output.mkdir(parents=True, exist_ok=True)
            scratch = scratch_folder()
            request = self._request(job, reservation.ports, scratch)
            return LocalRun(job, request, scratch, reservation, self._warm_start(job))

    def _spark(self, job: TrainingJob) -> Spark:
        """The launcher of Spark jobs."""
        from workshop_utils.launchers.spark import Spark  # here, since it stands on this module

        self._check_network(strategy_of(job).members(job), strategy_of(job))
        return Spark(output=self.output)

    def _check_network(self, members: Sequence[Member], strategy: Strategy) -> None:
        """Raise JobError if the workers of this strategy cannot have links of their own."""
        if self.network is not None and any(member.started_by for member in members):
            raise JobError(
                f"network: the workers of strategy {strategy.name!r} are started by its driver, inside one namespace; "
                "leave the network out, or use another strategy"
            )

    def _warm_start(self, job: TrainingJob) -> Callable[[int, int], None] | None:
        framework = warm.framework_of(job.script_path) if self.warm else None
        if framework is None or strategy_of(job).started_by_mpirun or not warm.can_be_forked(job.environment):
            return None
        if job.resources.cpu >= 2:  # the server's libraries were told to use one thread
            return None
        server = warm.server_for(framework)
        return server.start if server.may_fork else None

    def _request(self, job: TrainingJob, ports: list[int], scratch: Path) -> LocalRequest:
        strategy = strategy_of(job)
        members = strategy.members(job)
        listening = [member.name for member in members if member.listens]
        # mpirun is no member of the job, and yet a host of its own in the network.
        names = [*([mpirun.NAME] if strategy.started_by_mpirun else []), *(member.name for member in members)]
        self._check_network(members, strategy)
        emulation: Emulation | None = None
        if self.network is not None:
            self.network.check(names)
            emulation = self.network.emulation(strategy)
        in_namespaces = emulation == "network namespaces"
        hosts = {
            name: self.network.address(index) if self.network and in_namespaces else "127.0.0.1"
            for index, name in enumerate(names)
        }
        addresses = Addresses(
            {name: f"{hosts[name]}:{port}" for name, port in zip(listening, ports, strict=True)},
            interface=INTERFACE if in_namespaces else "lo",
            secret=secrets.token_hex(16),
        )
        shared = shared_variables(job, scratch, self.output)
        if self.network and emulation == "stamped links":  # as `place.rendezvous` reads it
            bandwidths = [self.network.bandwidth_of(member.name) for member in members]
            link = {"bandwidths": bandwidths, "latency_seconds": self.network.latency_seconds}
            shared["WORKSHOP_LINK"] = json.dumps(link)
        inherited = inherited_variables()
        apart = {member.name: hosts[member.name] for member in members} if in_namespaces else {}
        commands = _commands(job, strategy, addresses, scratch, apart)
        added = tuple({**shared, **command.variables} for command in commands.values())
        switch: Switch | None = None
        cables: Sequence[Cable | None] = [None] * len(commands)
        if self.network and in_namespaces:
            switch, cables = wiring.wire(self.network, names, as_user=availability() != "root")
        processes = tuple(
            Process(
                name,
                command.argv,
                {**inherited, **variables},
                str(job.folder.absolute()),
                awaited=command.awaited,
                network=cable,
                leaves=command.leaves,
            )
            for (name, command), variables, cable in zip(commands.items(), added, cables, strict=True)
        )
        said = self.network.describe(emulation) if self.network and emulation else None
        return LocalRequest(processes, added, switch, said, emulation)


def shared_variables(job: TrainingJob, scratch: Path, output: Path | None) -> dict[str, str]:
    """What every process of the job is told: where it finds its modules and data, and leaves its model."""
    threads = str(max(1, int(job.resources.cpu)))
    return {
        # The script finds `workshop_utils.place` here and nothing else of this package, as on other platforms.
        "PYTHONPATH": os.pathsep.join(
            [str(scratch / "source"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),  # what a killed framework leaves there goes with the run
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,  # not INTEROP: with one, a parameter server's steps deadlock
        "WORKSHOP_DATA": str(data.prepare(job.data)),
        "WORKSHOP_MODEL": str(output or scratch / "model"),
        **job.environment,
    }


def _listeners(job: TrainingJob) -> int:
    for name in ("workers", "parameter_servers"):
        if (count := getattr(job, name)) > MOST_PROCESSES:
            raise JobError(f"{name} is {count}; a local run may have at most {MOST_PROCESSES:,}")
    return sum(member.listens for member in strategy_of(job).members(job))


class _Command(NamedTuple):
    argv: tuple[str, ...]
    variables: dict[str, str]
    awaited: bool
    leaves: bool = True


def _commands(
    job: TrainingJob, strategy: Strategy, addresses: Addresses, scratch: Path, apart: Mapping[str, str]
) -> dict[str, _Command]:
    """The processes to start, by name; `apart` are the addresses of workers with hosts of their own."""
    if strategy.started_by_mpirun:
        found = mpirun.commands(job, _script(job), scratch, apart, addresses.secret)
        return {
            name: _Command(argv, variables, awaited=name == mpirun.NAME)
            for name, (argv, variables) in found.items()
        }
    return {
        member.name: _Command(
            _command(job, member, addresses),
            strategy.environment(job, member, addresses),
            member.awaited,
            member.awaited or member.leaves,
        )
        for member in strategy.members(job)
        if member.started_by is None
    }


def _command(job: TrainingJob, member: Member, addresses: Addresses) -> tuple[str, ...]:
    if member.role == "rendezvous":
        return (sys.executable, "-I", "-S", str(RENDEZVOUS), *addresses.split(member.name))
    if member.role == "driver":
        place = (*addresses.split(member.name), addresses.interface, str(job.workers))
        return (sys.executable, "-I", str(ELASTIC), "drive", *place, *_script(job))
    return (sys.executable, *_script(job))


def _script(job: TrainingJob) -> tuple[str, ...]:
    return (str(job.script_path.absolute()), *job.command_line_arguments)


class LocalRun(ProcessRun):
    """A run of local processes.

    `process_ids` are those of its members, by name. `network` says what network is emulated, and how, and `emulation`
    only how; both are None where there is none.
    """

    def __init__(
        self,
        job: TrainingJob,
        request: LocalRequest,
        scratch: Path,
        reservation: PortReservation,
        start_warm: Callable[[int, int], None] | None,
    ) -> None:
        strategy = strategy_of(job)
        members = [member for member in strategy.members(job) if member.role not in ("rendezvous", "driver")]
        super().__init__(job.name, tuple(member.name for member in members), reservation)
        self.warm = start_warm is not None
        self.network, self.emulation = request.network, request.emulation
        self.process_ids: dict[str, int] = {}
        self._job, self._strategy = job, strategy
        model = Path(request.added[0]["WORKSHOP_MODEL"])
        files = {
            **{f"source/{name}": text for name, text in shipped(strategy).items()},
            **request.files,
            **({"model/.keep": ""} if model.is_relative_to(scratch) else {}),
            **(mpirun.files() if strategy.started_by_mpirun and request.switch else {}),
        }
        self._start(request.processes, job.timeout_seconds, scratch, files, request.switch, start_warm)

    def _on_event(self, event: Event) -> None:
        if event["event"] == "started":
            self.process_ids[event["name"]] = event["pid"]
        super()._on_event(event)

    def _take_line(self, name: str, text: str, stream: str) -> None:
        if name == "driver-0" and (tagged := ELASTIC_TAG.match(text)):
            name, stream, text = tagged[1], tagged[2], tagged[3]
        if self._strategy.started_by_mpirun:
            super()._take_line(name, text, stream)
        else:
            self._receive_line(name, text, stream)

    def _timed_out(self) -> str:
        return hang.timed_out(self, self._job.timeout, self._process_states)

    def _blame(self, name: str, code: int | None, reason: str | None) -> str:
        if code is None:
            return super()._blame(name, code, reason)
        lines = list(self.logs())
        if name == mpirun.NAME:
            said = "\n".join(line.text for line in lines if line.worker == mpirun.NAME)
            blamed = mpirun.BLAME.search(said)
            if blamed:
                name = f"worker-{blamed[1] or blamed[2]}"
            if killed := mpirun.KILLED.search(said):
                code = -int(killed[1])
        said = mpirun.NOTICE.sub("", "".join(f"{line.text}\n" for line in lines if line.worker == name))
        others = "; the others were stopped" if len(self.workers) > 1 else ""
        rank = next((start["rank"] for start in self.starts if start["worker"] == name), None)
        who = f"{name} (rank {rank})" if rank is not None else name
        return (
            f"{self.name} failed: {who} {endings.how(code)}{others}. {endings.last_lines(said.splitlines())}"
        )
