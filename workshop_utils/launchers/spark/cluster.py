"""Spark on this machine: a session for a notebook, and a stand-alone cluster of real processes.

    session = local_session(4)  # `local[4]`: driver and executor in one JVM

A cluster is one master, and workers that start executors:

    with StandaloneCluster(workers=2) as cluster:
        run = cluster.spark(restarts=1).launch(job)

It is Spark's own cluster manager, started as `sbin/start-master.sh` starts it, but bound to loopback, with a secret of
its own, and supervised: it ends with the process that started it. The pages that master and workers serve are on
loopback too.

Source: Spark 3.5, "Spark Standalone Mode".
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Self

import psutil

from workshop_utils.launchers.local.environment import inherited_variables, scratch_folder
from workshop_utils.launchers.local.run import Process, ProcessRun
from workshop_utils.launchers.spark import launcher
from workshop_utils.network.ports import PortReservation
from workshop_utils.runs import RunFailed, RunState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIFETIME_SECONDS = 24 * 3600.0  # of a cluster that nobody ends
START_SECONDS = 120.0  # two JVMs after another, on a busy machine
EXECUTORS = ("--port", "0", "--cores", "1", "--memory", "1g")  # of a worker
REGISTERED = re.compile(r"Registering worker \S+ with")


def local_session(threads: int = 4) -> SparkSession:
    """The session of this process, on `local[threads, 2]`, where a task may fail once. Stop it when done.

    Where one is active, it is returned as it is. What its JVM writes to its standard error is dropped, since a stopped
    barrier stage fills pages there; exceptions reach Python all the same.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:
        return SparkSession(SparkContext._active_spark_context)
    scratch = scratch_folder()
    for name in ("conf", "tmp"):
        (scratch / name).mkdir(parents=True)
    (scratch / "conf" / "log4j2.properties").write_text(launcher.LOGGING, encoding="utf-8")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    variables = launcher.spark_variables(scratch, launcher.LOOPBACK, sys.executable)
    os.environ.update({name: value for name, value in variables.items() if name != "TMPDIR"})
    master = f"local[{threads},2]"
    properties = launcher.common_properties(master, "notebook", launcher.LOOPBACK, "512Mi", scratch)
    conf = SparkConf().setAll([*properties.items(), ("spark.barrier.sync.timeout", "10")])
    return SparkSession(SparkContext(conf=conf, gateway=launch_gateway(conf, {"stderr": subprocess.DEVNULL})))


class StandaloneCluster(ProcessRun):
    """A master and `workers` workers, each with a core for an executor: a run that lasts until it is stopped.

    `process_ids` are those of `master` and `worker-N`.

    Raises:
        RunFailed: on entering its block, if it is not up in time, or one of its processes ends.
    """

    def __init__(self, workers: int = 2) -> None:
        names = tuple(f"worker-{index}" for index in range(workers))
        super().__init__("the Spark cluster", names, PortReservation(1))
        port, scratch, secret = self._reservation.ports[0], scratch_folder(), secrets.token_hex(32)
        self.master, self._secret_file = f"spark://{launcher.LOOPBACK}:{port}", scratch / "secret"
        environment = {
            **inherited_variables(launcher.OTHERS),
            **launcher.spark_variables(scratch, launcher.LOOPBACK, sys.executable),
            "SPARK_LOCAL_DIRS": f"{scratch}/tmp",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{launcher.JVM} -Djava.io.tmpdir={scratch}/tmp",
        }
        words: dict[str, tuple[str, ...]] = {"master": ("master.Master", "--port", str(port))}
        for name in names:
            words[name] = ("worker.Worker", self.master, *EXECUTORS, "--work-dir", str(scratch / name))
        common = ("--host", launcher.LOOPBACK, "--webui-port", "0")
        program, folder = str(launcher.spark_home() / "bin" / "spark-class"), tempfile.gettempdir()
        processes = [
            Process(
                name, (program, f"org.apache.spark.deploy.{kind}", *common, *options), environment, folder
            )
            for name, (kind, *options) in words.items()
        ]
        files = {
            # An executor that is killed again and again must not end the application before its stage gives up.
            "conf/spark-defaults.conf": "spark.authenticate true\nspark.deploy.maxExecutorRetries 10\n"
            f"spark.authenticate.secret {secret}\n",
            "conf/log4j2.properties": launcher.LOGGING,
            "secret": secret,
            "tmp/.keep": "",
        }
        self._start(processes, LIFETIME_SECONDS, scratch, files)

    def spark(self, **settings: Any) -> launcher.Spark:
        """A launcher of jobs on this cluster, with `settings`."""
        return launcher.Spark(master=self.master, secret_file=self._secret_file, **settings)

    def executors(self, worker: str) -> list[int]:
        """The process ids of the executors that `worker` ("worker-0") runs now."""
        running = []
        for process in psutil.Process(self.process_ids[worker]).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()):
                    running.append(process.pid)
        return running

    def __enter__(self) -> Self:
        try:
            with self._changed:
                has_started = lambda: self._is_up() or self.state is not RunState.RUNNING  # noqa: E731
                self._changed.wait_for(has_started, START_SECONDS)
            if not self._is_up():
                raise RunFailed(self.reason or f"{self.name} was not up after {START_SECONDS:.0f} s")
        except BaseException:
            self.stop()
            raise
        return self

    def _is_up(self) -> bool:
        registered = [line for line in self._lines if REGISTERED.search(line.text)]
        return self.state is RunState.RUNNING and len(registered) == len(self.workers)
