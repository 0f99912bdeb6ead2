"""Emulated instances: SageMaker without AWS. Each host's container is a process here that sees what a container has.

    with EmulatedSageMaker().launch(job.replace(processes_per_node=2)) as run:
        run.wait()
    with EmulatedSageMaker(spot=True).launch(job) as run:
        run.interrupt()  # the job goes on, on new instances, from its checkpoints
        run.wait()

A launch makes the request that SageMaker would get, and starts it here. Every host has folders of its own in place of
those below /opt/ml. The SDK's drivers, which travel with the request, run as they are but for the names of these
folders; what the toolkit does is done by `toolkit`. EXCEPTIONS, in `exceptions.yaml`, says how it differs from an
instance.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psutil
import yaml

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.local import environment
from workshop_utils.launchers.local.run import Process, ProcessRun
from workshop_utils.launchers.sagemaker import toolkit
from workshop_utils.launchers.sagemaker.settings import SageMakerSettings
from workshop_utils.launchers.sagemaker.submission import submission_of
from workshop_utils.launchers.template import relocated
from workshop_utils.network.ports import PortReservation
from workshop_utils.runs import LogLine, Run, RunState
from workshop_utils.training import data

if TYPE_CHECKING:
    from workshop_utils.launchers.sagemaker.request import Request

PROGRAM = Path(__file__).with_name("emulated_instance.py")
TORCHRUN_STORE = "algo-1:7777"  # where torchrun's agents meet, by the SDK's drivers


class EmulatedSageMaker(SageMakerSettings):
    """Launches jobs on emulated instances. Its fields are those of `SageMakerSettings`; a role is not needed."""

    # How emulated instances differ from real ones.
    EXCEPTIONS: ClassVar[dict[str, str]] = yaml.safe_load(
        Path(__file__).with_name("exceptions.yaml").read_text(encoding="utf-8")
    )

    role: str = "arn:aws:iam::000000000000:role/nobody"

    @property
    def region_name(self) -> str:
        """The region of the request; without a role there is no account, and any region will do."""
        return super().region_name if "role" in self.model_fields_set else self.region or "us-east-1"

    def render(self, job: TrainingJob) -> Request:
        """The request that SageMaker would get. Raises JobError as `SageMaker.render` does, or for what is not here.

        Folders of this machine, to which `launch` writes the model and the checkpoints, are no part of it.
        """
        environment.refuse_gpus(job, "emulated instances")
        environment.check_request(job)
        for name in ("outputs", "checkpoints"):
            job.storage(name, "folder")
        for source in job.channels.values():
            data.refuse_address(source)
        submission = submission_of(job.replace(outputs=None, checkpoints=None), self)
        from workshop_utils.launchers.sagemaker.request import render  # the SDK takes seconds to import

        return render(submission, job)

    def launch(self, job: TrainingJob) -> Run:
        """Start the job: an `EmulatedRun`, or with `spot` a `SpotRun`.

        Raises:
            JobError: if SageMaker's instances cannot run it so, or emulated ones have not what it needs.
        """
        request = self.render(job)
        environment.await_packages(job)
        return SpotRun(request) if self.spot else start(request)


class EmulatedRun(ProcessRun):
    """A run on emulated instances. Its workers have their hosts' names."""

    answered_by = "emulated instances on this machine: nothing reaches AWS, nothing costs money"
    error = "ExecuteUserScriptError"  # of the toolkit; the SDK's drivers end with a CalledProcessError

    def _timed_out(self) -> str:
        return f"MaxRuntimeExceeded: the job met its time limit. {self._hang.explained(self)}"

    def _blame(self, name: str, code: int) -> str:
        ranks = {line.worker for line in self.logs()}.difference(self.workers)  # of mpirun, which names them
        how = f"exit code: {code}" if code >= 0 else f"which {output.how(code)}"
        return (
            f"AlgorithmError: {self.error} on {name}, {how}. {output.explained(self, {name, *ranks}, code)}"
        )


class SpotRun(Run):
    """A run on emulated spot instances. One that is interrupted goes on, on new ones, from its checkpoints.

    `attempts` are the runs so far, one a start. Records and metrics carry the number of their `attempt`, from 0.
    """

    answered_by = EmulatedRun.answered_by

    def __init__(self, request: Request) -> None:
        self._request = request
        self._scratch = tempfile.TemporaryDirectory(
            prefix="workshop-checkpoints-", ignore_cleanup_errors=True
        )
        named = request.submission.job.storage("checkpoints", "folder")
        self._checkpoints = Path(named or self._scratch.name)
        self._interrupted: EmulatedRun | None = None
        self._stopping = False
        self._starting = threading.Lock()  # between a new start and a stop
        self.attempts = [start(request, self._checkpoints)]
        super().__init__(request.submission.name, request.submission.hosts)
        threading.Thread(target=self._see_through, name="workshop-run", daemon=True).start()

    def interrupt(self) -> None:
        """Take the instances away. No script hears of it: SageMaker's SIGTERM reaches the toolkit, which keeps it."""
        run = self._interrupted = self.attempts[-1]
        doomed = []
        for host in run.workers:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, as MPI's other hosts soon do
                process = psutil.Process(run.process_ids[host])
                doomed += [process, *process.children(recursive=True)]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def log_folder(self) -> Path | None:
        """That of the last attempt; each has one of its own."""
        return self.attempts[-1].log_folder

    def _request_stop(self) -> None:
        with self._starting:
            self._stopping = True
            self.attempts[-1].stop()

    def _see_through(self) -> None:
        """Follow one attempt after the other; on a thread of its own."""
        state, reason = RunState.FAILED, f"{self.name} could not be started again"
        try:
            while self._follow(run := self.attempts[-1]):
                pass
            is_stopped = self._stopping and run.state is RunState.FAILED
            state, reason = RunState.STOPPED if is_stopped else run.state, run.reason
        except (OSError, ValueError) as error:
            reason = f"{reason}: {error}"
        finally:
            self._scratch.cleanup()
            self._finish(state, reason)

    def _follow(self, run: EmulatedRun) -> bool:
        """Take in the log of `run` until it has ended, and start the next one if its instances were taken away.

        SageMaker restarts the job, not a host. A script is not told: what it finds in its checkpoints says so.
        """
        attempt, later = len(self.attempts) - 1, run.launched_at - self.launched_at
        for each in run.arrivals(follow=True):
            if isinstance(each, LogLine):
                each = replace(each, seconds=each.seconds + later)
            else:
                each = {**each, "attempt": attempt}
            with self._changed:
                self._arrived.append(each)
                self._records += [each] if isinstance(each, dict) else []
                self._changed.notify_all()
        with self._starting:
            if self._stopping or run is not self._interrupted or run.state is not RunState.FAILED:
                return False
            self.attempts.append(start(self._request, self._checkpoints))
        return True


def start(request: Request, checkpoints: Path | None = None) -> EmulatedRun:
    """Start the hosts of `request`. Checkpoints stay in the folder `checkpoints`, or else where the job says.

    Raises:
        JobError: if there is no mpirun for an MPI job, or the model and checkpoints are to stay elsewhere than here, or
            where another run has its own.
    """
    submission, job = request.submission, request.submission.job
    scratch = environment.scratch_folder()
    channels = {name: str(data.prepare(source)) for name, source in job.channels.items()}
    words = {"python": sys.executable, "script": submission.entry, "scratch": str(scratch)}
    if toolkit.SWITCHES.get(job.strategy) == toolkit.MPI:
        words["mpirun"] = environment.mpirun_program("hyperparameter sagemaker_mpi_enabled is true")
    outputs, kept = (job.storage(name, "folder") for name in ("outputs", "checkpoints"))
    roles = {"store": [TORCHRUN_STORE]} if submission.driver else toolkit.cluster(submission)
    listening = [address for addresses in roles.values() for address in addresses]
    reservation = PortReservation(len(listening))
    at = {name: f"127.0.0.1:{port}" for name, port in zip(listening, reservation.ports, strict=True)}
    cluster = {role: [at[address] for address in addresses] for role, addresses in roles.items()}
    files = {PROGRAM.name: PROGRAM.read_text(encoding="utf-8")}
    processes = []
    for node, host in enumerate(submission.hosts):
        own = scratch / host
        root = own / "opt" / "ml"
        code = root / ("input/data/code" if submission.driver else "code")
        config, variables = toolkit.container(request, host, str(root))
        files |= {f"{host}/opt/ml/input/config/{name}": text for name, text in config.items()}
        files[f"{host}/tmp/.keep"] = ""
        if submission.driver:
            files |= _drivers(request, host, str(root))
            command = _driver_command(submission.driver, root, at[TORCHRUN_STORE])
            variables = {}  # the driver's environment.py sets them
        else:
            spec = toolkit.script(submission, node, cluster).filled(**words)
            command, variables = spec.argv, {**variables, **spec.environment}
        layout = {
            "root": root,
            "code": code,
            "source": scratch / "source",
            "channels": json.dumps(channels),
            "model": Path(outputs or own / "model").absolute(),
            "checkpoints": Path(checkpoints or kept or own / "checkpoints").absolute(),
            "server": toolkit.tf_config(cluster, "ps", node) if "ps" in cluster else "",
        }
        inherited = environment.inherited_variables()
        paths = (str(code), job.environment.get("PYTHONPATH"), inherited.get("PYTHONPATH"))
        own_variables = {
            **inherited,
            **environment.NO_GPU,
            "OMP_NUM_THREADS": "1",  # the hosts share this machine's cores
            "TF_NUM_INTRAOP_THREADS": "1",
            "WORKSHOP_CHECKPOINTS": f"{root}/checkpoints",  # in the place of /opt/ml/checkpoints
            **{
                name: relocated(text, {"/opt/ml": str(root)}) for name, text in submission.environment.items()
            },
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}",  # torchrun is there
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": str(own / "tmp"),
            "TRAINING_JOB_NAME": submission.name,
            **variables,
        }
        program = (sys.executable, str(scratch / PROGRAM.name), "container")
        argv = (*program, json.dumps(layout, default=str), *command)
        processes.append(Process(host, argv, own_variables, tempfile.gettempdir()))
    run = EmulatedRun(submission.name, submission.hosts, reservation, outputs)
    if submission.driver:
        run.error = "CalledProcessError"
    archives = {"source": request.source}
    run._start(processes, submission.limit_seconds, scratch, files, job, archives=archives)
    return run


def _drivers(request: Request, host: str, root: str) -> dict[str, str]:
    """The SDK's drivers as they are uploaded, for a container whose root is `root`: text by path."""
    texts = {}
    for key, content in request.uploads.items():
        if key.endswith((".py", ".json")):
            name = key.partition("/sm_drivers/")[2]
            text = content.decode().replace("/opt/ml", root)
            texts[f"{host}/opt/ml/input/data/sm_drivers/{name}"] = text
    return texts


def _driver_command(driver: str, root: Path, store: str) -> tuple[str, ...]:
    """What the SDK's sm_train.sh does: set the variables of a container, then become the driver."""
    python, folder = shlex.quote(sys.executable), shlex.quote(str(root / "input"))
    address, _, port = store.rpartition(":")
    lines = (
        f"{python} {folder}/data/sm_drivers/scripts/environment.py > /dev/null",
        f"source {folder}/sm_training.env",
        f"export SM_MASTER_ADDR={address} SM_MASTER_PORT={port}",  # the exception "addresses"
        f"exec {python} {folder}/data/sm_drivers/distributed_drivers/{driver}",
    )
    return ("bash", "-e", "-c", "\n".join(lines))
