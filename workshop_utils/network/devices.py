"""Emulated devices: each rank of a run computes as if on a device that takes its time, and no core of this machine.

    Local(network=Network(bandwidth="50Mbit"), emulated_device="400ms").launch(job)
    Local(emulated_device=EmulatedDevice(seconds="400ms", slower={"worker-1": 3}))

So many ranks share a few cores, and what is measured is the devices and the links. It holds as long as the ranks'
real work is small beside the devices' time, which each run measures: see `host_remark`. What a rank does is in
`training.emulated_device`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field

from workshop_utils.jobs import Description, Duration, JobError
from workshop_utils.jobs.imports import PYTORCH, imported, packages
from workshop_utils.jobs.quantities import seconds_of

LEAST_SECONDS = 0.02  # a sleep ends up to 0.2 ms late, which is then 1 % at most
MOST_SECONDS = 3600
MOST_HOST_SHARE = 0.1  # of all cores
MOST_LATE_SHARE = 0.03  # of a device's time

_FORM = "a duration with its unit, such as 400ms, or settings such as seconds=400ms,worker-1=3"


def _takes_time(text: str) -> str:
    if text.strip().replace(".", "", 1).isdecimal():
        raise ValueError(f"it must have a unit, such as {text.strip()}ms")
    if not LEAST_SECONDS <= seconds_of(text) <= MOST_SECONDS:
        raise ValueError(
            f"it must be at least {1000 * LEAST_SECONDS:g}ms, since the host's clock is coarse, and at most an hour"
        )
    return text


class EmulatedDevice(Description):
    """What every rank computes on.

    Attributes:
        seconds: of one forward and backward pass of what a rank has of the model, such as `"400ms"`; each micro-batch
            is a pass.
        slower: how many times as long it takes the processes of these names: `{"worker-1": 3}`.

    Raises:
        JobError: for what cannot be; the message names the field.
    """

    seconds: Annotated[Duration, AfterValidator(_takes_time)]
    slower: dict[str, Annotated[float, Field(ge=0.1, le=100)]] = Field(default={})

    @classmethod
    def parse(cls, text: str) -> Self:
        """The device that a command line names: `400ms`, or `seconds=400ms,worker-1=3`.

        Raises:
            JobError: for another form; the message says what is wrong with it.
        """
        return cls._parsed("emulated_device", text, _FORM, "slower")

    def variables(self, script: Path, framework: str | None, names: Sequence[str]) -> dict[str, str]:
        """What a run's processes, called `names`, read of it (`training.emulated_device`).

        `framework` is what the ranks import where their `script` does not say.

        Raises:
            JobError: if the device cannot be emulated for them.
        """
        used = packages(imported(script)) | {framework}
        if "tensorflow" in used:
            raise JobError(
                "emulated_device: TensorFlow's passes cannot be made to last longer from outside; use a script with "
                "PyTorch, or leave the device out"
            )
        for name in self.slower:
            if name not in names:
                raise JobError(
                    f"emulated_device: there is no {name} in this job; its processes are {', '.join(names)}"
                )
        given = {**self.model_dump(), "seconds": seconds_of(self.seconds), "pytorch": bool(used & PYTORCH)}
        return {"WORKSHOP_EMULATED_DEVICE": json.dumps(given)}

    def __str__(self) -> str:
        others = (f", {name} {times:g} times as slow" for name, times in self.slower.items())
        return f"emulated devices, {self.seconds} a step{''.join(others)}"


def host_remark(devices: Sequence[Mapping[str, Any]], workers: Sequence[str], cores: int) -> str:
    """What is wrong with a run whose `devices` (`Run.devices`) were emulated on so many cores; "" if nothing is.

    That is so if one of the `workers` has not reported its device or not used it, if a device was late, or if the
    processes kept more than a tenth of the cores busy.
    """
    silent = [name for name in workers if name not in {each["worker"] for each in devices}]
    if silent:
        return (
            f"cannot tell whether this machine was too busy: {', '.join(silent)} reported nothing; a script calls "
            "place.here(), and ends by itself"
        )
    unused = {each["worker"] for each in devices if not each["passes"]}
    idle = [name for name in workers if name in unused and not name.startswith("server")]
    if idle:
        return (
            f"{', '.join(idle)} did not use the emulated device: a script must import PyTorch itself, or put what it "
            "computes into a block `with computing():` (of training.emulated_device)"
        )
    share = sum(each["host_share"] for each in devices) / cores
    late = max((each["late_share"] for each in devices), default=0.0)
    if share <= MOST_HOST_SHARE and late <= MOST_LATE_SHARE:
        return ""
    if share <= MOST_HOST_SHARE:
        return f"this machine was busy with other work: the emulated devices were up to {late:.0%} late; run it again"
    return (
        f"this measured the machine, too: beside their emulated devices, {len(devices)} processes kept {share:.1%} of "
        f"its {cores} cores busy, where {MOST_HOST_SHARE:.0%} is the most for a fair picture; take a device that is "
        f"{max(1.1, share / MOST_HOST_SHARE):.1f} times as slow (and links, too), fewer ranks, or a smaller model"
    )
