"""How many GPUs an instance of EC2's has. Source: AWS, "Amazon EC2 accelerated computing"."""

from __future__ import annotations

import re

FAMILIES = re.compile(r"ml\.(p[3-6]|g4dn|gr?[56])(?!g\.)[\w-]*\.(\w+)")
GPUS = {
    "p": {"2xlarge": 1, "4xlarge": 1, "8xlarge": 4, "16xlarge": 8, "24xlarge": 8, "48xlarge": 8},
    "g": {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1}
    | {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
}


def gpus_of(instance_type: str) -> int | None:
    """The GPUs of one of SageMaker's instances; None where it is not known to have some."""
    family = FAMILIES.fullmatch(instance_type)
    return GPUS[family[1][0]].get(family[2]) if family else None
