"""Container images for training: AWS's own by framework and processor, and whether one has Horovod in it.

The SageMaker Python SDK knows where AWS's images are. An image of one's own is named by the job's field `image`.
"""

from __future__ import annotations

import re

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import imports

TENSORFLOW = {"framework": "tensorflow", "version": "2.19", "py_version": "py312"}
TENSORFLOW_WITH_HOROVOD = {"framework": "tensorflow", "version": "2.12", "py_version": "py310"}
PYTORCH = {"framework": "pytorch", "version": "2.8", "py_version": "py312"}
# Horovod was in AWS's TensorFlow images up to 2.12 (Horovod 0.27.0), and in none of PyTorch's that still are built.
LAST_TENSORFLOW_WITH_HOROVOD = (2, 12)
_FOR_TRAINING = re.compile(r"(\d{12})\.dkr\.ecr\.([^.]+)\.[^/]+/(\w+)-training[a-z-]*:(\d+)\.(\d+)")


def uri(image: dict[str, str], region: str, instance_type: str) -> str:
    """The URI of AWS's training image for the processor of `instance_type`. Raises JobError where there is none."""
    from sagemaker.core import image_uris  # here, since the SDK takes seconds to be imported

    try:
        return str(
            image_uris.retrieve(region=region, instance_type=instance_type, image_scope="training", **image)
        )
    except ValueError as error:
        raise JobError(
            f"image is missing, and AWS has none for {instance_type} in region {region}: {error}"
        ) from None


def has_nvidia_gpu(instance_type: str) -> bool:
    """Whether instances of this type have NVIDIA GPUs; other accelerators have images of their own."""
    return re.match(r"ml\.(p|g)\d", instance_type) is not None


def image_for(job: TrainingJob, region: str, instance_type: str) -> str:
    """The job's own image, or AWS's for what its script imports.

    Raises:
        JobError: if no image of AWS has what the script imports, or the job's own is known to lack Horovod.
    """
    found = imports.imported(job.script_path)
    # What is taken from a module may itself be one: `from horovod import tensorflow`.
    modules = {*found, *(f"{module}.{name}" for module, names in found.items() for name in names)}
    packages = {module.split(".")[0] for module in modules}
    needs_horovod = "horovod" in packages or job.strategy == "horovod"
    if job.image is not None:
        if needs_horovod and lacks_horovod(job.image):
            raise JobError(
                f"image is {job.image!r}, which has no Horovod in it: AWS's last one is TensorFlow 2.12. "
                "Use that, or build jobs/images/ and name your own image"
            )
        return job.image
    # TensorFlow 2.12 has Keras 2; a script that imports Keras itself is written for Keras 3.
    if "horovod.tensorflow" in modules and "keras" not in modules:
        return uri(TENSORFLOW_WITH_HOROVOD, region, instance_type)
    if needs_horovod:
        raise JobError(
            "image is missing: no image of AWS has the Horovod that this script imports. Build jobs/images/ and name "
            f"yours, such as 123456789012.dkr.ecr.{region}.amazonaws.com/workshop-horovod:cpu"
        )
    # PyTorch's has mpi4py and NumPy in it, too.
    return uri(TENSORFLOW if {"tensorflow", "keras"} & packages else PYTORCH, region, instance_type)


def lacks_horovod(image: str) -> bool:
    """Whether `image` is one of AWS's without Horovod; of other people's images nothing is known."""
    match = _FOR_TRAINING.match(image)
    if match is None:
        return False
    registry, region, framework, *version = match.groups()
    is_of_aws = uri(PYTORCH, region, "ml.c5.xlarge").startswith(registry)
    return is_of_aws and (
        framework != "tensorflow" or tuple(map(int, version)) > LAST_TENSORFLOW_WITH_HOROVOD
    )
