"""What a learner says of the place: namespace, image, kind. Nothing here talks to a cluster.

Settings(namespace="team-a", image="ghcr.io/me/workshop-pytorch:cpu")
Settings.load("place.yaml")
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from workshop_utils.jobs import Description, Duration, JobError, StrategyName, TrainingJob
from workshop_utils.launchers.settings import PlaceSettings
from workshop_utils.quantities import seconds_of
from workshop_utils.strategies import strategy_of

Kind = Literal["TFJob", "PyTorchJob", "MPIJob", "TrainJob", "Job"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Count = Annotated[int, Field(ge=1, strict=True)]

# The kinds that can carry out a strategy; the first is the default.
KINDS: dict[StrategyName, tuple[Kind, ...]] = {
    "single": ("Job",),
    "torch_ddp": ("PyTorchJob", "TrainJob"),
    "multi_worker_mirrored": ("TFJob",),
    "parameter_server": ("TFJob",),
    "horovod": ("MPIJob",),
    "mpi": ("MPIJob",),
}
# Why there is none for the others.
WITHOUT_KIND: dict[StrategyName, str] = {
    "ring": "its message passing listens on one machine alone",
    "workshop_parameter_server": "its message passing listens on one machine alone",
    "spark_program": "Spark makes its pods itself (--on spark with master: k8s://...)",
    "horovod_elastic": "its driver starts the workers itself, on its own machine",
}
# As jobs/images/ calls them. That for Horovod holds every framework.
DEFAULT_IMAGES = {"PyTorchJob": "workshop-pytorch:cpu", "TrainJob": "workshop-pytorch:cpu"}
EVERY_FRAMEWORK = "workshop-horovod:cpu"


class Elastic(Description):
    """How far a PyTorchJob may shrink and grow, and how often its workers may be started anew."""

    min_workers: Count = 1
    max_workers: Count = 4
    max_restarts: int = Field(default=3, ge=0, strict=True)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers is {self.min_workers}; it may be at most max_workers, {self.max_workers}"
            )
        return self


class Settings(PlaceSettings):
    """How and where jobs run on a cluster.

    Attributes:
        namespace: where everything is made.
        image: of every container where the job names none; by default one of jobs/images/, by the kind.
        kind: the resource that is made: TFJob, PyTorchJob, MPIJob (v2beta1), TrainJob or Job; by default the first
            that the job's strategy allows.
        elastic: for PyTorchJob, how far it may shrink and grow; its script must be able to go on from a checkpoint.
        data_claim: a PersistentVolumeClaim that holds the data; without it the data travels in a ConfigMap, which
            holds 1 MiB at most.
        node_selector: labels that a node must have.
        keep: how long the finished job is kept where nobody deletes it.
        context: of the kubeconfig; by default the current one.
    """

    EXAMPLE: ClassVar[str] = "namespace: default"

    namespace: Name = "default"
    image: str | None = Field(default=None, min_length=1)
    kind: Kind | None = None
    elastic: Elastic | None = None
    data_claim: Name | None = None
    node_selector: dict[str, str] = Field(default={})
    keep: Duration = "1h"
    context: str | None = None

    def kind_for(self, job: TrainingJob) -> Kind:
        """The kind of resource that carries out `job`. Raises JobError where Kubernetes has none."""
        strategy_of(job)
        allowed = KINDS.get(job.strategy, ())
        if not allowed:
            raise JobError(
                f"strategy is {job.strategy!r}; Kubernetes cannot run it, since {WITHOUT_KIND[job.strategy]}: "
                "run it locally, or use another strategy, such as 'torch_ddp'"
            )
        if self.kind is not None and self.kind not in allowed:
            raise JobError(
                f"kind is {self.kind!r}; strategy {job.strategy!r} needs {' or '.join(allowed)}: leave kind out"
            )
        kind = self.kind or allowed[0]
        if self.elastic is not None and kind != "PyTorchJob":
            raise JobError(f"elastic is for PyTorchJob; a {kind} has no such policy: leave it out")
        if self.elastic is not None and not (
            self.elastic.min_workers <= job.workers <= self.elastic.max_workers
        ):
            raise JobError(
                f"workers is {job.workers}; it must be between elastic.min_workers, {self.elastic.min_workers}, "
                f"and elastic.max_workers, {self.elastic.max_workers}"
            )
        return kind

    def image_for(self, job: TrainingJob) -> str:
        """The image of the job's containers."""
        return job.image or self.image or DEFAULT_IMAGES.get(self.kind_for(job), EVERY_FRAMEWORK)

    @property
    def keep_seconds(self) -> int:
        """`keep` in whole seconds."""
        return round(seconds_of(self.keep))
