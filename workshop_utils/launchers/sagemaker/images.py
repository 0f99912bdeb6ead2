"""Container images for training: AWS's own by framework and processor, and whether one has Horovod in it.

The table holds what `sagemaker.core.image_uris.retrieve` of SDK 3.27 (November 2026) answers; a test compares them
where that SDK is installed. An image of one's own is named by the job's field `image`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.processes import imports

# The account that holds AWS's deep learning containers, by region, where it is not the usual one.
USUAL_REGISTRY = "763104351884"
REGISTRIES = {
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-northeast-3": "364406365360",
    "ap-southeast-3": "907027046896",
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "eu-central-2": "380420809688",
    "eu-south-1": "692866216735",
    "eu-south-2": "503227376785",
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
    "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353",
}

# Horovod was in AWS's TensorFlow images up to 2.12 (Horovod 0.27.0), and in none of PyTorch's that still are built.
LAST_TENSORFLOW_WITH_HOROVOD = (2, 12)
_ACCELERATED = re.compile(r"ml\.(p|g)\d")  # NVIDIA; the other accelerators have images of their own
_AWS_IMAGE = re.compile(
    r"(?P<registry>\d{12})\.dkr\.ecr\.[^/]+/(?P<name>[a-z-]+):(?P<major>\d+)\.(?P<minor>\d+)"
)


@dataclass(frozen=True)
class Framework:
    """One of AWS's image families in one version."""

    name: str
    version: str
    python: str


TENSORFLOW = Framework("tensorflow", "2.19", "py312")
TENSORFLOW_WITH_HOROVOD = Framework("tensorflow", "2.12", "py310")
PYTORCH = Framework("pytorch", "2.8", "py312")


def uri(framework: Framework, region: str, instance_type: str) -> str:
    """The URI of AWS's training image of `framework` for the processor of `instance_type`."""
    registry = REGISTRIES.get(region, USUAL_REGISTRY)
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    processor = "gpu" if has_nvidia_gpu(instance_type) else "cpu"
    name = f"{framework.name}-training:{framework.version}-{processor}-{framework.python}"
    return f"{registry}.dkr.ecr.{region}.{domain}/{name}"


def has_nvidia_gpu(instance_type: str) -> bool:
    """Whether instances of this type have NVIDIA GPUs."""
    return _ACCELERATED.match(instance_type) is not None


def image_for(job: TrainingJob, region: str, instance_type: str) -> str:
    """The job's own image, or AWS's for what its script imports.

    Raises:
        JobError: if no image of AWS has what the script imports, or the job's own is known to lack Horovod.
    """
    imported = imported_modules(job.script_path)
    horovod = {name for name in imported if name.split(".")[0] == "horovod"}
    if job.image is not None:
        if (horovod or job.strategy == "horovod") and lacks_horovod(job.image):
            raise JobError(
                f"image is {job.image!r}, which has no Horovod in it: AWS's last one is TensorFlow 2.12. "
                "Use that, or build jobs/images/ and name your own image"
            )
        return job.image
    # TensorFlow 2.12 has Keras 2; a script that imports Keras itself is written for Keras 3.
    if "horovod.tensorflow" in horovod and "keras" not in imported:
        return uri(TENSORFLOW_WITH_HOROVOD, region, instance_type)
    if horovod or job.strategy == "horovod":
        raise JobError(
            "image is missing: no image of AWS has the Horovod that this script imports. Build jobs/images/ and name "
            f"yours, such as 123456789012.dkr.ecr.{region}.amazonaws.com/workshop-horovod:cpu"
        )
    if {"tensorflow", "keras"} & {name.split(".")[0] for name in imported}:
        return uri(TENSORFLOW, region, instance_type)
    return uri(PYTORCH, region, instance_type)  # with mpi4py and NumPy in it, too


def lacks_horovod(image: str) -> bool:
    """Whether `image` is one of AWS's without Horovod; of other people's images nothing is known."""
    match = _AWS_IMAGE.match(image)
    if match is None or match["registry"] not in {USUAL_REGISTRY, *REGISTRIES.values()}:
        return False
    version = int(match["major"]), int(match["minor"])
    return match["name"] != "tensorflow-training" or version > LAST_TENSORFLOW_WITH_HOROVOD


def imported_modules(script: Path) -> set[str]:
    """The modules that `script` imports anywhere, with their packages' names in front; none if it cannot be parsed."""
    found = imports.imported(script)
    # What is taken from a module may itself be one: `from horovod import tensorflow`.
    return {*found, *(f"{module}.{name}" for module, names in found.items() for name in names)}
