"""The settings: which Spark cluster, and how a job runs there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from workshop_utils.jobs import JobError, Size, TrainingJob
from workshop_utils.launchers.settings import TargetSettings
from workshop_utils.quantities import bytes_of

MASTER = re.compile(r"(local(\[(\d+|\*)\])?|spark://[^\s/:]+:\d+(,[^\s/:]+:\d+)*|k8s://\S+)$")
LEAST_MEMORY = "450Mi"  # below it Spark's memory manager refuses to begin
OWN_FIELDS = {"spark.master": "master", "spark.authenticate.secret": "secret_file"}
LOOPBACK = "127.0.0.1"


class SparkSettings(TargetSettings):
    """Which Spark cluster runs a job, and how.

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
            raise ValueError(
                f"master is {self.master!r}; it must be local[N], spark://HOST:PORT or k8s://https://HOST:PORT"
            )
        if bytes_of(self.memory) < bytes_of(LEAST_MEMORY):
            raise ValueError(f"memory is {self.memory!r}; Spark needs at least {LEAST_MEMORY}")
        for name in self.conf:
            if not name.startswith("spark."):
                raise ValueError(
                    f"conf is {self.conf}; {name!r} is no property of Spark; theirs begin with 'spark.'"
                )
            if field := OWN_FIELDS.get(name):
                raise ValueError(f"conf is {self.conf}; {name} has a field of its own: {field}")
        if self.secret_file is not None and not self.secret_file.is_file():
            raise ValueError(f"secret_file is {str(self.secret_file)!r}; there is no such file")
        if self.on_kubernetes and self.driver_host == LOOPBACK:
            raise ValueError(
                "driver_host is missing; pods must reach the driver: name this machine's address in their network"
            )
        return self

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
            raise JobError(
                f"master is {master!r}; {job.name} has {job.workers} workers, which a barrier stage starts all at "
                f"once: make it local[{job.workers}], or leave it out"
            )
        return master
