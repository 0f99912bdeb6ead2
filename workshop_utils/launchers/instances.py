"""What an instance of EC2's has. Source: AWS, "Amazon EC2 accelerated computing" and "Instance type specifications"."""

from __future__ import annotations

import re

FAMILIES = re.compile(r"ml\.(p[3-6]|g4dn|gr?[56])(?!g\.)[\w-]*\.(\w+)")
GPUS = {
    "p": {"2xlarge": 1, "4xlarge": 1, "8xlarge": 4, "16xlarge": 8, "24xlarge": 8, "48xlarge": 8},
    "g": {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1}
    | {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
}
# GiB of memory for each processor, by the family or its first letter.
GIB_PER_CPU = {"c": 2.0, "c4": 1.875, "m": 4.0, "t": 4.0, "r": 8.0, "g": 4.0, "g6e": 8.0, "gr6": 8.0}
GIB_PER_CPU |= {"p3": 7.625, "p3dn": 8.0, "p4d": 12.0, "p4de": 12.0}


def gpus_of(instance_type: str) -> int | None:
    """The GPUs of one of SageMaker's instances; None where it is not known to have some."""
    family = FAMILIES.fullmatch(instance_type)
    return GPUS[family[1][0]].get(family[2]) if family else None


def size_of(instance_type: str) -> tuple[int, float]:
    """Processors, and memory in GiB, that an instance of the type has at least; 0 where that is not known."""
    family, _, size = instance_type.removeprefix("ml.").partition(".")
    many = re.fullmatch(r"(\d*)xlarge", size)
    cpus = 4 * int(many[1] or 1) if many else 2 * (size == "large")
    return cpus, cpus * GIB_PER_CPU.get(family, GIB_PER_CPU.get(family[0], 0))
