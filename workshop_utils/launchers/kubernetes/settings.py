"""How and where jobs run on a cluster: namespace, image, kind. Nothing here talks to a cluster.

KubernetesSettings(namespace="team-a", registry="123456789012.dkr.ecr.us-west-2.amazonaws.com")
KubernetesSettings.load("place.yaml")
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import Field, model_validator

from workshop_utils.jobs import Description, JobError, StrategyName, TrainingJob
from workshop_utils.launchers.settings import TargetSettings
from workshop_utils.launchers.source import PACKAGE
from workshop_utils.strategies import strategy_of

Kind = Literal["TFJob", "PyTorchJob", "MPIJob", "TrainJob", "Job"]
Count = Annotated[int, Field(ge=1, strict=True)]
Registry = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.:/_-]*[a-z0-9]$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
# A label's key and value. Source: apimachinery, pkg/util/validation, `IsQualifiedName` and `IsValidLabelValue`.
_PART = r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_WORD = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL_KEY, LABEL_VALUE = rf"^({_WORD}(\.{_WORD})*/)?{_PART}$", rf"^({_PART})?$"
LabelKey = Annotated[str, Field(pattern=LABEL_KEY)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE)]
NO_REGISTRY = "REGISTRY/"  # stands for the one that nobody has named; there is no host of that name
EXAMPLE_ACCOUNT = "123456789012."  # of AWS's documentation, and of ours
# The digest of each image that jobs/images/build.sh has pushed from this checkout, by its full name.
PUSHED = PACKAGE.parent / "jobs" / "images" / "pushed.yaml"

# The kinds that can run a strategy; the first is the default.
KINDS: dict[StrategyName, tuple[Kind, ...]] = {
    "single": ("Job",),
    "torch_ddp": ("PyTorchJob", "TrainJob"),
    "multi_worker_mirrored": ("TFJob",),
    "parameter_server": ("TFJob",),
    "horovod": ("MPIJob",),
    "mpi": ("MPIJob",),
}
# Why no kind can run the others.
NO_SUBNET = (
    "no operator starts its ranks, and its message passing needs a private subnet, which pods do not have"
)
WITHOUT_KIND: dict[StrategyName, str] = {
    "ring": NO_SUBNET,
    "workshop_parameter_server": NO_SUBNET,
    "horovod_elastic": "its driver starts the workers itself, on its own machine",
}
ONE_PROCESS_A_POD = ("TFJob", "Job")  # these kinds have no program that would start several
JOB_RESOURCES = {"cpu", "memory", "nvidia.com/gpu"}  # what a job says itself, in `resources`
Amount = Annotated[int | str, Field(union_mode="left_to_right")]


class Elastic(Description):
    """Between how many pods a PyTorchJob may shrink and grow, and how often its workers may be restarted."""

    min_workers: Count = 1
    max_workers: Count = 4
    max_restarts: int = Field(default=3, ge=0, strict=True)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        least, most = self.min_workers, self.max_workers
        if least > most:
            raise ValueError(f"min_workers is {least}; it may be at most max_workers, {most}")
        return self

    @property
    def policy(self) -> dict[str, Any]:
        """The elasticPolicy of a PyTorchJob."""
        limits = {"minReplicas": self.min_workers, "maxReplicas": self.max_workers}
        return {"rdzvBackend": "c10d", **limits, "maxRestarts": self.max_restarts}


def nodes_of(job: TrainingJob) -> tuple[int, int]:
    """How many pods train, and how many processes run in each; by default one."""
    return job.nodes or job.workers, job.processes_per_node or 1


class KubernetesSettings(TargetSettings):
    """How and where jobs run on a cluster.

    Attributes:
        context: of the kubeconfig; by default the current one.
        namespace: where everything is made.
        registry: where jobs/images/build.sh has pushed the workshop's images.
        image: the full name of the image of every container where the job names none; by default one of jobs/images/
            from the `registry`, that for GPUs where the job asks for one.
        folder: where in the job's image its folder is, such as `/app`; by default the folder travels, which may have
            1 MiB when it is packed. What of this package the script may import travels in any case.
        data_claim: a PersistentVolumeClaim that holds the data; without it the data travels in a ConfigMap, which
            holds 1 MiB at most.
        node_selector: labels that a node must have.
        kind: the resource that is made: TFJob, PyTorchJob, MPIJob (v2beta1), TrainJob or Job; by default the first
            that the job's strategy allows. TFJob and PyTorchJob are Kubeflow's first API, in maintenance mode; TrainJob
            is today's.
        elastic: for PyTorchJob, how far it may shrink and grow; its script must resume from a checkpoint.
        storage_claim: a PersistentVolumeClaim for the model of jobs that name none in `outputs`; without either it is
            lost with its pod. Checkpoints are kept where a job names a claim for them: it would resume from them at its
            next launch, too.
        pod_resources: what each training pod gets besides, such as `vpc.amazonaws.com/efa: 4`, `hugepages-2Mi: 5120Mi`.
        environment: variables of every pod, such as NCCL's; the job's own come first.
        gang: `volcano` starts all pods of a job or none, so that two jobs never wait for each other's half. The time in
            its queue counts towards the timeout of a TrainJob, whose operator counts from its creation.
        queue: Volcano's queue.
    """

    EXAMPLE: ClassVar[str] = "namespace: default"

    context: str | None = None
    namespace: Name = "default"
    registry: Registry | None = None
    image: str | None = Field(default=None, min_length=1)
    folder: str | None = None
    data_claim: Name | None = None
    node_selector: dict[LabelKey, LabelValue] = Field(default={})
    kind: Kind | None = None
    elastic: Elastic | None = None
    storage_claim: Name | None = None
    pod_resources: dict[LabelKey, Amount] = Field(default={})
    environment: dict[str, str] = Field(default={})
    gang: Literal["volcano"] | None = None
    queue: Name | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if twice := sorted(JOB_RESOURCES & self.pod_resources.keys()):
            raise ValueError(f"pod_resources.{twice[0]} is the job's to say: give it in the job's resources")
        if self.folder is not None and not re.fullmatch(r"/[\w./-]+", self.folder):
            raise ValueError(
                f"folder is {self.folder!r}; it must be an absolute path in the image, such as /app"
            )
        if self.queue is not None and self.gang is None:
            raise ValueError(f"queue is {self.queue!r}; a queue is Volcano's: add gang: volcano")
        return self

    def kind_for(self, job: TrainingJob) -> Kind:
        """The kind of resource that runs `job`. Raises JobError where Kubernetes has none."""
        strategy_of(job)
        allowed = KINDS.get(job.strategy, ())
        if not allowed:
            why = WITHOUT_KIND.get(job.strategy, "no operator starts such jobs")
            advice = "run it locally, or use another strategy, such as 'torch_ddp'"
            raise JobError(f"strategy is {job.strategy!r}; Kubernetes cannot run it, since {why}: {advice}")
        if self.kind is not None and self.kind not in allowed:
            needed = f"strategy {job.strategy!r} needs {' or '.join(allowed)}"
            raise JobError(f"kind is {self.kind!r}; {needed}: leave kind out")
        kind = self.kind or allowed[0]
        nodes, processes = nodes_of(job)
        if processes > 1 and kind in ONE_PROCESS_A_POD:
            advice = "leave it out, and each worker gets a pod"
            raise JobError(f"processes_per_node is {processes}; a pod of a {kind} runs one process: {advice}")
        if self.elastic is not None and kind != "PyTorchJob":
            raise JobError(f"elastic is for PyTorchJob; a {kind} has no such policy: leave it out")
        if (limits := self.elastic) is not None and not limits.min_workers <= nodes <= limits.max_workers:
            ends = f"elastic.min_workers, {limits.min_workers}, and elastic.max_workers, {limits.max_workers}"
            name = "workers" if processes == 1 else "nodes"
            raise JobError(f"{name} is {nodes}; it must be between {ends}")
        return kind

    def with_defaults(self, job: TrainingJob) -> TrainingJob:
        """`job` with the claim and the variables of this place, where it has none of its own."""
        outputs = job.outputs or (self.storage_claim and f"claim:{self.storage_claim}")
        return job.replace(outputs=outputs, environment={**self.environment, **job.environment})

    def image_for(self, job: TrainingJob) -> str:
        """The image of the job's containers; the workshop's own for Horovod has every framework."""
        framework = "pytorch" if self.kind_for(job) in ("PyTorchJob", "TrainJob") else "horovod"
        name = f"workshop-{framework}:{'gpu' if job.resources.gpu else 'cpu'}"
        return job.image or self.image or workshop_image(name, self.registry)


def workshop_image(name: str, registry: str | None) -> str:
    """The full name of one of the workshop's images, with its digest if it was pushed from here."""
    full = f"{registry}/{name}" if registry else f"{NO_REGISTRY}{name}"
    digests = yaml.safe_load(PUSHED.read_text(encoding="utf-8")) if PUSHED.is_file() else {}
    return f"{full}@{digests[full]}" if full in digests else full


def require_registry(image: str) -> None:
    """Raise JobError for an image of which nobody has said where it is."""
    if image.startswith((NO_REGISTRY, EXAMPLE_ACCOUNT)):
        fault = "missing" if image.startswith(NO_REGISTRY) else "that of the examples"
        raise JobError(
            f"registry is {fault}; no cluster can pull {image.removeprefix(NO_REGISTRY)}: jobs/images/build.sh builds "
            "and pushes it; then name its registry in a place.yaml, or give image the full name of your own"
        )
