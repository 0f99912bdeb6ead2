"""What an instance of EC2's has. Source: AWS, "Amazon EC2 accelerated computing" and "Instance type specifications"."""

from __future__ import annotations

import re

FAMILIES = re.compile(r"ml\.(p[3-6]|g4dn|gr?[56])(?!g\.)[\w-]*\.(\w+)")
GPUS = {
    "p": {"2xlarge": 1, "4xlarge": 1, "8xlarge": 4, "16xlarge": 8, "24xlarge": 8, "48xlarge": 8},
    "g": {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1}
    | {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
}
# The families whose instances have four processors for each "x" of their size, by the GiB of memory for a processor.
FAMILIES_BY_GIB = {
    2.0: ("c5", "c6i", "c7i", "c7i-flex", "c8i", "c8i-flex"),
    4.0: ("m4", "m5", "m6i", "m7i", "m7i-flex", "m8i", "m8i-flex", "t3", "g4dn", "g5", "g6", "trn1", "trn1n"),
    7.625: ("p3",),
    8.0: ("r5", "r5d", "r6i", "r7i", "r8i", "r8i-flex", "g6e", "p3dn"),
    12.0: ("p4d", "p4de"),
}
GIB_PER_CPU = {family: gib for gib, families in FAMILIES_BY_GIB.items() for family in families}


def gpus_of(instance_type: str) -> int | None:
    """The GPUs of one of SageMaker's instances; None where it is not known to have some."""
    family = FAMILIES.fullmatch(instance_type)
    return GPUS[family[1][0]].get(family[2]) if family else None


def size_of(instance_type: str) -> tuple[int, float]:
    """Processors, and memory in GiB, of an instance of the type; 0 where they are not known."""
    family, _, size = instance_type.removeprefix("ml.").partition(".")
    many = re.fullmatch(r"(\d*)xlarge", size)
    if family not in GIB_PER_CPU or not (many or size == "large"):
        return 0, 0
    cpus = 4 * int(many[1] or 1) if many else 2
    return cpus, cpus * GIB_PER_CPU[family]
