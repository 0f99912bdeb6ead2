"""Container images for training: AWS's own by framework and processor.

The SageMaker Python SDK knows where AWS's images are. An image of one's own is named by the job's field `image`.
"""

from __future__ import annotations

import re

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.processes import imports

TENSORFLOW = {"framework": "tensorflow", "version": "2.19", "py_version": "py312"}
# The last of AWS's TensorFlow images with Horovod in it, 0.27.0; of PyTorch's, none that is still built has it.
TENSORFLOW_WITH_HOROVOD = {"framework": "tensorflow", "version": "2.12", "py_version": "py310"}
PYTORCH = {"framework": "pytorch", "version": "2.8", "py_version": "py312"}


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
        JobError: if no image of AWS has what the script imports.
    """
    if job.image is not None:
        return job.image
    found = imports.imported(job.script_path)
    # What is taken from a module may itself be one: `from horovod import tensorflow`.
    modules = {*found, *(f"{module}.{name}" for module, names in found.items() for name in names)}
    packages = {module.split(".")[0] for module in modules}
    # TensorFlow 2.12 has Keras 2; a script that imports Keras itself is written for Keras 3.
    if "horovod.tensorflow" in modules and "keras" not in modules:
        return uri(TENSORFLOW_WITH_HOROVOD, region, instance_type)
    if "horovod" in packages or job.strategy == "horovod":
        raise JobError(
            "image is missing: no image of AWS has the Horovod that this script imports. Build jobs/images/ and name "
            f"yours, such as 123456789012.dkr.ecr.{region}.amazonaws.com/workshop-horovod:cpu"
        )
    # PyTorch's has mpi4py and NumPy in it, too.
    return uri(TENSORFLOW if {"tensorflow", "keras"} & packages else PYTORCH, region, instance_type)
