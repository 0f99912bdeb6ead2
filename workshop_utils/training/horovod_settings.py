"""How Horovod packs and paces its messages: its two most important settings, checked before a job starts.

Horovod reads them from variables, and takes what it cannot read for zero. Here they are written as people write
them, and what is wrong is said:

    from workshop_utils.training.horovod_settings import Tuning

    slow = job.replace(environment=Tuning(fusion_threshold="0", cycle_time="5ms").environment)

Source: Horovod 0.28.1, docs/tensor-fusion.rst; defaults from horovod/common/operations.cc.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from workshop_utils.jobs import Description
from workshop_utils.jobs.quantities import bytes_of, seconds_of

LONGEST_CYCLE_SECONDS = 1.0


def _size(text: str) -> str:
    bytes_of(text)
    return text


def _cycle(text: str) -> str:
    if not 0 < seconds_of(text) <= LONGEST_CYCLE_SECONDS:
        raise ValueError("it must be more than zero and at most 1 s, such as '5ms'; a bare number is seconds")
    return text


class Tuning(Description):
    """Horovod's fusion buffer and cycle.

    Once in `cycle_time` Horovod looks which gradients are ready on all ranks, and packs them into messages of up to
    `fusion_threshold` bytes; with a threshold of 0 each gradient is a message of its own.

    Raises:
        JobError: if one of them is not a size, or not a duration of at most a second.
    """

    fusion_threshold: Annotated[str, BeforeValidator(str), AfterValidator(_size)] = "128MiB"
    cycle_time: Annotated[str, BeforeValidator(str), AfterValidator(_cycle)] = "1ms"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a job's processes need: bytes, and milliseconds."""
        nbytes, milliseconds = bytes_of(self.fusion_threshold), seconds_of(self.cycle_time) * 1000
        return {"HOROVOD_FUSION_THRESHOLD": f"{nbytes}", "HOROVOD_CYCLE_TIME": f"{milliseconds:g}"}
