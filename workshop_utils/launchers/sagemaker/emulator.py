"""Emulated instances: SageMaker without AWS. Each host's container is a process here that sees what a container has.

    with EmulatedSageMaker().launch(job.replace(processes_per_node=2)) as run:
        run.wait()
    with EmulatedSageMaker(spot=True).launch(job) as run:
        run.interrupt()  # the job goes on, on new instances, from its checkpoints
        run.wait()
    EmulatedSageMaker(network=Network(bandwidth="100Mbit", racks=2, spine="100Mbit")).launch(job)

Every host has folders of its own in place of those below /opt/ml, and the variables, files and arguments that `toolkit`
lists. EXCEPTIONS says how it differs from an instance. With a network, each host is a network namespace, in which the
names `algo-N` and the ports are SageMaker's own.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import psutil

from workshop_utils.jobs import JobError, TrainingJob, storage_kind
from workshop_utils.launchers import output
from workshop_utils.launchers.local import environment
from workshop_utils.launchers.local.run import Process, ProcessRun
from workshop_utils.launchers.restarting import RestartedRun, Restarting
from workshop_utils.launchers.sagemaker import check, price, request, toolkit
from workshop_utils.launchers.sagemaker.request import Request, Submission, submission_of
from workshop_utils.launchers.sagemaker.settings import SageMakerSettings
from workshop_utils.launchers.source import shipped
from workshop_utils.network import INTERFACE, LOOPBACK_INTERFACE, Network, availability, wiring
from workshop_utils.network.wiring import Cable, Switch
from workshop_utils.runs import Run
from workshop_utils.training import data

PROGRAMS = (*request.DRIVERS, Path(__file__).with_name("emulated_instance.py"))


class EmulatedSageMaker(SageMakerSettings):
    """Launches jobs on emulated instances. Its fields are those of `SageMakerSettings`; a role is not needed.

    With a role, a launch first makes and checks the request that SageMaker would get. With a `network`, slow links
    join the hosts.
    """

    # How emulated instances differ from real ones.
    EXCEPTIONS: ClassVar[dict[str, str]] = {
        "root": "folders lie below a root of the run's own, in place of /opt/ml",
        "addresses": "without `network`, each host:port is a loopback port of its own",
        "interface": "without `network`, hosts meet through lo, not eth0",
        "processors": "the processors are this machine's, and all hosts share them",
        "accelerators": "there are none, whatever the instance type",
        "parameter servers": "a program of the workshop's starts them as the toolkit does; it looks for the "
        "master every half second, not every ten",
        "mpi": "all MPI ranks are started by the first host's mpirun, without sshd",
        "threads": "one for arithmetic in each process, unless the job says more; a server has 16 for what waits",
        "patience": "all hosts start within a second; on SageMaker minutes may lie between them, and the toolkit waits",
        "spot": "all hosts end without warning when `interrupt` says so; new ones come at once; `max_wait` is "
        "not watched; and checkpoints are kept in a folder of this run",
        "end": "where a host fails, SIGTERM ends the others, and reaches scripts; on SageMaker it comes later,"
        " and the toolkit keeps it",
        "python": "Python and its packages are this environment's",
        "drivers": "the driver is started directly, without the SDK's sm_train.sh",
        "left out": "variables about groups of instances, and about libraries that only AWS's images have",
    }

    role: str = "arn:aws:iam::000000000000:role/nobody"
    network: Network | None = None

    @property
    def region_name(self) -> str:
        """The region of the request; without a role there is no account, and any region will do."""
        return super().region_name if "role" in self.model_fields_set else self.region or "us-east-1"

    def render(self, job: TrainingJob) -> Request:
        """The request that SageMaker would get. Raises JobError as `SageMaker.render` does.

        Folders of this machine, to which `launch` writes the model and the checkpoints, are no part of it.
        """
        storage = {"outputs": job.outputs, "checkpoints": job.checkpoints}
        folders = [name for name, value in storage.items() if value and storage_kind(value) == "folder"]
        submission = submission_of(job.replace(**dict.fromkeys(folders)), self)
        from workshop_utils.launchers.sagemaker import trainer  # the SDK takes seconds to import

        return trainer.render(submission)

    def preflight(self, job: TrainingJob) -> str:
        """What the job would cost at most on SageMaker. Raises JobError as `launch` does."""
        return price.preflight(submission_of(job, self), is_free=True)

    def launch(self, job: TrainingJob) -> Run:
        """Start the job: an `EmulatedRun`, or with `spot` a `SpotRun`.

        Raises:
            JobError: if SageMaker's instances cannot run it so, or the network cannot be emulated.
        """
        environment.refuse_gpus(job, "emulated instances")
        if "role" in self.model_fields_set:
            self.render(job)
        check.instance_type(self.instance_type)
        submission = submission_of(job, self)
        if self.network is not None:
            self.network.check(submission.hosts)
            if availability() == "none":
                no_links = "so emulated instances cannot have slow links; leave the network out"
                raise JobError(f"network: this machine has no network namespaces, {no_links}")
        if self.spot:
            return SpotRun(job, Restarting(self.model_copy(update={"spot": False}), restarts=0))
        environment.await_horovod(job)
        return _start(submission, data.prepare(job.data) if job.data else None, self.network)


class EmulatedRun(ProcessRun):
    """A run on emulated instances. Its workers have their hosts' names."""

    answered_by = "emulated instances on this machine: nothing reaches AWS, nothing costs money"
    was_interrupted = False

    def interrupt(self) -> None:
        """Take the instances away. No script hears of it: SageMaker's SIGTERM reaches the toolkit, which keeps it."""
        self.was_interrupted = True
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            containers = [psutil.Process(self.process_ids[host]) for host in self.workers]
            below = [process for each in containers for process in each.children(recursive=True)]
            for process in (*containers, *below):
                process.kill()

    def _timed_out(self) -> str:
        return "MaxRuntimeExceeded: the job met its time limit"

    def _blame(self, name: str, code: int) -> str:
        texts = [line.text for line in self.logs() if line.worker == name or name not in self.workers]
        how = f"exit code: {code}" if code >= 0 else f"which {output.how(code)}"
        return f"AlgorithmError: ExecuteUserScriptError on {name}, {how}. {output.last_lines(texts)}"


class SpotRun(RestartedRun):
    """A run on emulated spot instances. One that is interrupted goes on, on new ones, from its checkpoints."""

    answered_by = EmulatedRun.answered_by

    def interrupt(self) -> None:
        """Take an instance away. All hosts start again: SageMaker restarts the job, not a host."""
        run = self.attempts[-1]
        assert isinstance(run, EmulatedRun)
        run.interrupt()

    def _start(self) -> Run:
        # A script is not told that it was restarted: what it finds in its checkpoints says so.
        self.attempts.append(self._launcher.launcher.launch(self._job.replace(checkpoints=str(self._folder))))
        return self.attempts[-1]

    def _should_restart(self, run: Run) -> bool:
        return isinstance(run, EmulatedRun) and run.was_interrupted


def _start(submission: Submission, data_folder: Path | None, network: Network | None) -> EmulatedRun:
    job, hosts, by_toolkit = submission.job, submission.hosts, submission.settings.mode == "toolkit"
    scratch = environment.scratch_folder()
    words = {"scratch": str(scratch)}
    if by_toolkit and toolkit.SWITCHES[job.strategy] == toolkit.MPI:
        words["mpirun"] = environment.mpirun_program("hyperparameter sagemaker_mpi_enabled is true")
    at = request.addresses(submission)
    # In namespaces addresses are SageMaker's own; outside, each is a loopback port.
    with environment.reserve(0 if network else len(at)) as reservation:
        if network is None:
            at = {name: f"127.0.0.1:{port}" for name, port in zip(at, reservation.ports, strict=True)}
        files = {f"drivers/{program.name}": program.read_text(encoding="utf-8") for program in PROGRAMS}
        files["drivers/members.json"] = json.dumps(request.members(submission, at, **words))
        files |= {f"source/{name}": text for name, text in shipped(job).items()}
        program = [sys.executable, str(scratch / "drivers" / "emulated_instance.py"), "container"]
        switch: Switch | None = None
        cables: Sequence[Cable | None] = [None] * len(hosts)
        if network is not None:
            switch, cables = wiring.wire(network, hosts, as_user=availability() != "root")
            program = ["unshare", "--mount", *program]
            names = [f"{network.address(index)} {host}\n" for index, host in enumerate(hosts)]
            files["hosts"] = "127.0.0.1 localhost\n" + "".join(names)
        processes = []
        for host, cable in zip(hosts, cables, strict=True):
            own = scratch / host
            root = own / "opt" / "ml"
            interface = INTERFACE if network else LOOPBACK_INTERFACE
            config, variables = toolkit.container(submission, host, str(root), interface)
            files |= {f"{host}/opt/ml/input/config/{name}": text for name, text in config.items()}
            layout = {
                "root": root,
                "code": root / ("code" if by_toolkit else "input/data/code"),
                "source": job.folder.absolute(),
                "modules": scratch / "source",
                "data": data_folder or own / "data",
                "model": Path(job.storage("outputs", "folder") or own / "model").absolute(),
                "checkpoints": Path(job.storage("checkpoints", "folder") or own / "checkpoints").absolute(),
                "hosts": scratch / "hosts" if network else "",
            }
            own_variables = {
                **environment.inherited_variables(),
                **environment.NO_GPU,
                "OMP_NUM_THREADS": "1",  # the hosts share this machine's cores
                "TF_NUM_INTRAOP_THREADS": "1",
                "WORKSHOP_CHECKPOINTS": f"{root}/checkpoints",  # in the place of /opt/ml/checkpoints
                **submission.environment,
                "TMPDIR": str(scratch),
                "WORKSHOP_EMULATED": "1",
                **variables,
            }
            argv = (*program, json.dumps(layout, default=str))
            processes.append(Process(host, argv, own_variables, tempfile.gettempdir(), network=cable))
        run = EmulatedRun(submission.name, hosts, reservation)
        run.network = network.describe("network namespaces") if network else None
        run._start(processes, submission.limit_seconds, scratch, files, switch)
        return run
