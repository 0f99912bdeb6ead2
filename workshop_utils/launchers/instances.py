"""What an instance of EC2's has: `instances.yaml`."""

from __future__ import annotations

from pathlib import Path

import yaml

INSTANCES: dict[str, tuple[int, float, int]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)


def gpus_of(instance_type: str) -> int | None:
    """The NVIDIA GPUs of one of SageMaker's instances; None where it is not known to have some."""
    return INSTANCES.get(instance_type, (0, 0, 0))[2] or None


def size_of(instance_type: str) -> tuple[int, float]:
    """Processors, and memory in GiB, of an instance of the type; 0 where they are not known."""
    processors, gib, _ = INSTANCES.get(instance_type, (0, 0, 0))
    return processors, gib
