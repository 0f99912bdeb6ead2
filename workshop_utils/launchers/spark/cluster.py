"""A stand-alone cluster of real processes on this machine: one master, and workers that start executors.

    with StandaloneCluster(workers=2) as cluster:
        run = Spark(cluster.settings(restarts=1)).launch(job)

It is Spark's own cluster manager, started as `sbin/start-master.sh` starts it, but bound to loopback, with a secret
that it alone has, and supervised: it ends with the process that started it. The pages that master and workers serve
are on loopback too.

Source: Spark 3.5, "Spark Standalone Mode".
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import tempfile
import threading
from collections import deque
from typing import Any, Self

import psutil

from workshop_utils.launchers import output
from workshop_utils.launchers.local.environment import inherited_variables, scratch_folder
from workshop_utils.launchers.local.group import Event, Process, ProcessGroup
from workshop_utils.launchers.spark.launcher import JVM, LOGGING, OTHERS, spark_home, spark_variables
from workshop_utils.launchers.spark.settings import LOOPBACK, Settings
from workshop_utils.network.ports import PortReservation

LIFETIME_SECONDS = 24 * 3600.0  # of a cluster that nobody ends
START_SECONDS = 120.0  # two JVMs after another, on a busy machine
ENDING_SECONDS = 30.0
EXECUTORS = ("--port", "0", "--cores", "1", "--memory", "1g")  # of a worker
REGISTERED = re.compile(r"Registering worker \S+ with")
DEPLOY_LOGGING = """\
logger.deploy.name = org.apache.spark.deploy
logger.deploy.level = info
"""


class ClusterFailed(RuntimeError):
    """The cluster did not start; the message has its last lines."""


class StandaloneCluster:
    """A master and `workers` workers, each with a core for an executor. A context manager: leaving ends it all.

    `process_ids` are those of `master` and `worker-N`; `lines` what they said last.

    Raises:
        ClusterFailed: if it is not up in time, or one of its processes ends.
    """

    def __init__(self, workers: int = 2) -> None:
        self._secret, self._scratch = secrets.token_hex(32), scratch_folder()
        self.process_ids: dict[str, int] = {}
        self.lines: deque[str] = deque(maxlen=500)
        self._registered, self._wanted, self._ended = 0, workers, False
        self._changed = threading.Condition()
        self._reservation = PortReservation(1)
        port = self._reservation.ports[0]
        self.master = f"spark://{LOOPBACK}:{port}"
        started: dict[str, tuple[str, ...]] = {"master": ("master.Master", "--port", str(port))}
        for index in range(workers):
            folder = str(self._scratch / f"worker-{index}")
            started[f"worker-{index}"] = ("worker.Worker", self.master, *EXECUTORS, "--work-dir", folder)
        program, environment = str(spark_home() / "bin" / "spark-class"), self._environment()
        common = ("--host", LOOPBACK, "--webui-port", "0")
        processes = [
            Process(
                name,
                (program, f"org.apache.spark.deploy.{kind}", *common, *options),
                environment,
                tempfile.gettempdir(),
            )
            for name, (kind, *options) in started.items()
        ]
        properties = {
            "spark.authenticate": "true",
            "spark.authenticate.secret": self._secret,
            # An executor that is killed again and again must not end the application before its stage gives up.
            "spark.deploy.maxExecutorRetries": "10",
        }
        files = {
            "conf/spark-defaults.conf": "".join(f"{name} {value}\n" for name, value in properties.items()),
            "conf/log4j2.properties": LOGGING + DEPLOY_LOGGING,
            "secret": self._secret,
            "tmp/.keep": "",
        }
        self._group = ProcessGroup(processes, self._on_event, LIFETIME_SECONDS, self._scratch, files)

    def settings(self, **changes: Any) -> Settings:
        """What a launcher must know to run jobs here, with `changes`."""
        return Settings(master=self.master, secret_file=self._scratch / "secret", **changes)

    def executors(self, worker: str) -> list[int]:
        """The process ids of the executors that `worker` ("worker-0") runs now."""
        found = []
        for process in psutil.Process(self.process_ids[worker]).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()):
                    found.append(process.pid)
        return found

    def stop(self) -> None:
        """End every process of it; returns when nothing is left."""
        self._group.stop()
        with self._changed:
            self._changed.wait_for(lambda: self._ended, timeout=ENDING_SECONDS)
        self._reservation.release()

    def __enter__(self) -> Self:
        try:
            with self._changed:
                up = self._changed.wait_for(
                    lambda: self._ended or self._registered == self._wanted, timeout=START_SECONDS
                )
            if not up or self._ended:
                how = "has ended" if self._ended else f"was not up after {START_SECONDS:.0f} s"
                raise ClusterFailed(f"the Spark cluster {how}. {output.last_lines(list(self.lines))}")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _environment(self) -> dict[str, str]:
        own = {
            "SPARK_LOCAL_DIRS": f"{self._scratch}/tmp",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{JVM} -Djava.io.tmpdir={self._scratch}/tmp",
        }
        return inherited_variables(OTHERS) | spark_variables(self._scratch, LOOPBACK, sys.executable) | own

    def _on_event(self, event: Event) -> None:
        with self._changed:
            if event["event"] == "line":
                self.lines.append(f"[{event['name']}] {event['text']}")
                self._registered += bool(event["name"] == "master" and REGISTERED.search(event["text"]))
            elif event["event"] == "started":
                self.process_ids[event["name"]] = event["pid"]
            elif event["event"] == "ended":
                self._ended = True
            self._changed.notify_all()
