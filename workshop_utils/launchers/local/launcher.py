"""Real processes on this machine: the launcher that executes what a strategy has planned."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.jobs.imports import meeting_doubt, mpi_doubt
from workshop_utils.launchers import output
from workshop_utils.launchers.local import warm
from workshop_utils.launchers.local.environment import (
    PROGRAMS,
    await_packages,
    check_request,
    deal_gpus,
    host_name,
    inherited_variables,
    keras_doubt,
    mpirun_program,
    scratch_folder,
    shared_variables,
)
from workshop_utils.launchers.local.run import Process, ProcessRun
from workshop_utils.launchers.source import shipped
from workshop_utils.network import INTERFACE, LOOPBACK_INTERFACE, Network, availability, wiring
from workshop_utils.network.devices import EmulatedDevice
from workshop_utils.network.ports import PortReservation
from workshop_utils.network.wiring import Cable, Switch
from workshop_utils.runs import interrupts_deferred
from workshop_utils.strategies import MPIRUN, SCRIPT, Addresses, ProcessSpec, Strategy, launched, strategy_of

# Of one run: many times what a machine has cores for, and known to be rendered in seconds.
MOST_PROCESSES = 1000


RunType = TypeVar("RunType", bound=ProcessRun)


@dataclass(frozen=True)
class LocalRequest:
    """What `launch` starts: the exact processes, with the variables that are added to this environment's.

    The run's own folder, `scratch`, does not exist before the start.
    """

    job: TrainingJob
    scratch: Path
    reservation: PortReservation
    processes: tuple[Process, ...]
    added: tuple[dict[str, str], ...]
    workers: tuple[str, ...]
    switch: Switch | None = None
    network: str | None = None  # what is emulated, and how
    device: str | None = None
    warning: str = ""  # what may not go as it is meant

    def __str__(self) -> str:
        told = {"network": self.network, "device": self.device, "warning": self.warning}
        head = "".join(f"# {name}: {text}\n\n" for name, text in told.items() if text)
        text = head + "\n\n".join(
            f"# {process.name}\n"
            + "".join(f"{name}={output.masked(name, shlex.quote(text))} \\\n" for name, text in added.items())
            + shlex.join(process.argv)
            for process, added in zip(self.processes, self.added, strict=True)
        )
        return text.replace(self.scratch.name, "workshop-...")

    __repr__ = __str__


class Local:
    """Launches jobs as processes of this machine.

    With a `network`, slow links join the processes (see `workshop_utils.network`); the run says how. With an
    `emulated_device`, such as "400ms", each rank's forward and backward passes take as long as on that device, and no
    core (see `network.devices`); `run.remark` says if this machine was too busy for that. With `warm`, ranks
    of scripts that use PyTorch, TensorFlow or NumPy fork from a server that has imported it already (see `warm`); other
    scripts start cold all the same. A forked script cannot change variables that its framework reads on import;
    TensorFlow was imported without oneDNN. Without the job's `outputs`, its model is gone when the run ends.

    GPUs are dealt out: each worker sees its own `resources.gpu` of them, and other processes see none. If
    CUDA_VISIBLE_DEVICES limits this process, only the GPUs that it lists are dealt out. Two runs at the same time do
    not know of each other and get the same GPUs, unless they are launched with different CUDA_VISIBLE_DEVICES.
    """

    def __init__(
        self,
        network: Network | None = None,
        warm: bool = False,
        emulated_device: str | EmulatedDevice | None = None,
    ) -> None:
        self.network = network
        self.device: EmulatedDevice | None = (
            EmulatedDevice.parse(emulated_device) if isinstance(emulated_device, str) else emulated_device
        )
        self.warm = warm

    def render(self, job: TrainingJob) -> LocalRequest:
        """The processes that `launch` starts, on ports that are free now. Starts nothing, and reserves nothing.

        Raises:
            JobError: if the job asks for what its strategy, or this machine, does not have.
        """
        request = self.reserve(job)
        request.reservation.release()
        return request

    def reserve(self, job: TrainingJob, imports: str | None = None) -> LocalRequest:
        """What `render` shows, on ports that are kept for it while it exists, so that it can be started.

        `imports` is what the ranks import where the job's script does not say; such a script switches on an emulated
        device itself. Raises as `render` does.
        """
        for name in ("workers", "parameter_servers"):
            if (count := getattr(job, name)) > MOST_PROCESSES:
                raise JobError(f"{name} is {count}; a local run may have at most {MOST_PROCESSES:,}")
        if job.image is not None:
            raise JobError(
                f"image is {job.image!r}; processes of this machine run in no container: leave it out, or name it in "
                "the place.yaml of the target that has one"
            )
        check_request(job)
        strategy, scratch = strategy_of(job), scratch_folder()
        specs = strategy.processes(job)
        names = [spec.name for spec in specs]
        # A process that starts others, such as mpirun, starts workers alone.
        trainers = {spec.name: len(spec.children) or int(spec.role == "worker") for spec in launched(specs)}
        gpus, shared = deal_gpus(job, trainers), shared_variables(job, scratch)
        if self.device is not None:
            if job.resources.gpu:
                raise JobError(
                    f"resources.gpu is {job.resources.gpu}; with an emulated device it must be 0 (--gpus 0)"
                )
            shared |= self.device.variables(job.script_path, imports, names)
        links = _Links(dict.fromkeys(names, "127.0.0.1"))
        if self.network is not None:
            links = _links(self.network, strategy, specs)
        listening = [spec.name for spec in specs if spec.listens]
        reservation, nodes = PortReservation(len(listening)), job.nodes or 1
        addresses = Addresses(
            of={
                name: f"{links.hosts[name]}:{port}"
                for name, port in zip(listening, reservation.ports, strict=True)
            },
            nodes=("localhost",) if nodes == 1 else tuple(f"node-{node}" for node in range(nodes)),
            interface=INTERFACE if links.cables else LOOPBACK_INTERFACE,
            secret=secrets.token_hex(16),
        )
        specs = strategy.connect(job, specs, addresses)
        if self.device is not None and imports is None:
            if job.module:
                raise JobError(
                    f"module is {job.module!r}; an emulated device is for scripts: name its file as script"
                )
            specs = [replace(spec, argv=_with_device(spec.argv)) for spec in specs]
        starting = launched(_filled(specs, job, scratch))
        added = tuple(
            {**gpus.get(spec.name, {}), **shared, **links.variables, **spec.environment} for spec in starting
        )
        common, folder = inherited_variables(), str(job.folder.absolute())
        host = "" if links.cables else host_name(job)
        processes = tuple(
            Process(
                spec.name,
                spec.command,
                common | variables,
                folder,
                spec.required,
                links.cables.get(spec.name),
                host,
            )
            for spec, variables in zip(starting, added, strict=True)
        )
        doubts = [] if imports else [keras_doubt(job), mpi_doubt(job)]
        doubts += [_unslowed(job, links, specs)] if self.network and not imports else []
        return LocalRequest(
            job,
            scratch,
            reservation,
            processes,
            added,
            workers=tuple(spec.name for spec in specs if spec.runs_script),
            switch=links.switch,
            network=links.description,
            device=None if self.device is None else str(self.device),
            warning="; ".join(filter(None, doubts)),
        )

    def launch(self, job: TrainingJob) -> ProcessRun:
        """Start the job.

        Raises:
            JobError: as `render` does; nothing has been started then.
        """
        await_packages(job)
        request = self.reserve(job)
        sources = {f"source/{name}": text for name, text in shipped(job).items()}
        return start(request, ProcessRun, sources, warm.framework_for(job) if self.warm else None)


def start(
    request: LocalRequest,
    make_run: Callable[[str, tuple[str, ...], PortReservation, str | None], RunType],
    files: Mapping[str, str],
    framework: str | None,
) -> RunType:
    """Start what a launcher has rendered, as `make_run` wants it, with `files` in the run's own folder.

    Ranks are forked from the warm server for `framework`; for None they start cold. Raises as `locked` does.
    """
    job = request.job
    run = make_run(job.name, request.workers, request.reservation, job.outputs)
    run.network, run.device, run.warning = request.network, request.device, request.warning
    starter = warm.starter(framework) if framework else None
    with contextlib.ExitStack() as stack:  # an interrupt stops it, since the caller does not know of it yet
        with interrupts_deferred():
            run._start(
                request.processes,
                job.timeout_seconds,
                request.scratch,
                {"model/.keep": "", **files},
                job,
                request.switch,
                starter,
            )
            stack.callback(run.stop)
        stack.pop_all()
    return run


@dataclass(frozen=True)
class _Links:
    """How the processes of a run reach each other: the host of each, and what makes the links slow."""

    hosts: Mapping[str, str]
    description: str | None = None
    switch: Switch | None = None
    cables: Mapping[str, Cable] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def _links(network: Network, strategy: Strategy, specs: Sequence[ProcessSpec]) -> _Links:
    """The links of an emulated network between `specs`. Raises JobError if they cannot have it."""
    names = [spec.name for spec in specs]
    network.check(names)
    emulation = network.emulation(strategy)
    if starter := next((spec.name for spec in specs if spec.children), None):
        raise JobError(
            f"network: {starter} starts the workers of strategy {strategy.name!r}, inside one namespace; leave "
            "the network out, or use another strategy, such as 'torch_ddp'"
        )
    if strategy.workers[1] == 1:
        raise JobError(
            f"network: strategy {strategy.name!r} has one process, and a link joins two; processes that its script "
            "starts share its place: let workers do their work, with a strategy such as 'torch_ddp', or leave it out"
        )
    description = network.describe(emulation)
    if emulation == "network namespaces":
        hosts = {name: network.address(index) for index, name in enumerate(names)}
        switch, cables = wiring.wire(network, names, as_user=availability() != "root")
        return _Links(hosts, description, switch, dict(zip(names, cables, strict=True)))
    # What `place` reads of links that the workshop's own message passing emulates itself.
    bandwidths = [network.bandwidth_of(name) for name in names]
    link = json.dumps({"bandwidths": bandwidths, "latency_seconds": network.latency_seconds})
    return _Links(dict.fromkeys(names, "127.0.0.1"), description, variables={"WORKSHOP_LINK": link})


def _unslowed(job: TrainingJob, links: _Links, specs: Sequence[ProcessSpec]) -> str:
    """Why the links of a run may not do what they are for, in a sentence; "" if nothing speaks against it."""
    if sum(spec.runs_script for spec in specs) == 1:
        return "this run has one worker, so it uses no link; processes that a worker starts share its place"
    # With a network each process has a host of its own.
    return meeting_doubt(job) if links.cables else ""


def _with_device(argv: Sequence[str]) -> tuple[str, ...]:
    """The command `argv` with the program that switches on the emulated device before the job's script."""
    if SCRIPT not in argv:
        return tuple(argv)
    at = argv.index(SCRIPT)
    return (*argv[:at], str(PROGRAMS / "job_script.py"), *argv[at:])


def _filled(specs: Sequence[ProcessSpec], job: TrainingJob, scratch: Path) -> list[ProcessSpec]:
    """`specs` with this machine's paths. Raises JobError if mpirun is needed and missing."""
    needs_mpirun = any(MPIRUN in spec.argv for spec in specs)
    words = {
        "python": sys.executable,
        "script": str(job.script_path.absolute()),
        "start": str(scratch / "source/workshop_utils/start.py"),
        "programs": str(PROGRAMS),
        "mpirun": mpirun_program(f"strategy is {job.strategy!r}") if needs_mpirun else "",
        "scratch": str(scratch),
    }
    return [spec.filled(**words) for spec in specs]
