"""What every place.yaml has in common, whichever target it configures; and where the workshop's images are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

import yaml
from pydantic import Field

from workshop_utils.jobs import Description, JobError, TrainingJob
from workshop_utils.launchers.source import PACKAGE

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


class TargetSettings(Description):
    """The settings of a target, in Python or in a YAML file; `EXAMPLE` is a line of one, for messages."""

    EXAMPLE: ClassVar[str]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The settings in a YAML file. Raises JobError where there is none, or a field is wrong."""
        file = Path(path)
        if not file.is_file():
            raise JobError(f"there is no file {file}; it must hold settings such as '{cls.EXAMPLE}'")
        return cls._read(file, cls.EXAMPLE)


class ClusterSettings(TargetSettings):
    """What every Kubernetes cluster is asked with.

    Attributes:
        context: of the kubeconfig; by default the current one.
        namespace: where everything is made.
        registry: where jobs/images/build.sh has pushed the workshop's images.
        image: the full name of the image of every container where the job names none; by default one of jobs/images/
            from the `registry`, that for GPUs where the job asks for one.
        data_claim: a PersistentVolumeClaim that holds the data; without it the data travels in a ConfigMap, which
            holds 1 MiB at most.
        node_selector: labels that a node must have.
    """

    context: str | None = None
    namespace: Name = "default"
    registry: Registry | None = None
    image: str | None = Field(default=None, min_length=1)
    data_claim: Name | None = None
    node_selector: dict[LabelKey, LabelValue] = Field(default={})

    def framework_of(self, job: TrainingJob) -> str:
        """Which of the images of jobs/images/ has what `job` needs; that for Horovod has every framework."""
        return "pytorch"

    def image_for(self, job: TrainingJob) -> str:
        """The image of the job's containers."""
        name = f"workshop-{self.framework_of(job)}:{'gpu' if job.resources.gpu else 'cpu'}"
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
