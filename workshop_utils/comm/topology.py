"""Links, their queues, and who shares them: the physics of every simulated or emulated message.

A link has a queue in each direction, which carries one message after the other, in the order in which their first
bytes arrive:

    head    = max(start, uplink free)                                  the first byte leaves
    left    = head + size/bandwidth                                    the last one has left: uplink free
    arrival = max(head + latency, downlink free) + size/bandwidth      the last one has come: downlink free

Both links carry a message at once (cut-through); their bandwidths are equal. On stamped links, where bandwidths may
differ, the slower link decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

# A number, or an array of them; results have the shape of all arguments broadcast together.
Numbers = float | npt.NDArray[Any]


def check_numbers(name: str, value: Numbers, least: float, above: bool = False) -> None:
    """Raise ValueError unless all are finite and at least `least`, or `above` it and maybe infinite; never NaN."""
    given = np.asarray(value)
    allowed = given > least if above else (given >= least) & np.isfinite(given)
    if not allowed.all():
        right = f"more than {least:g}" if above else f"at least {least:g}, and finite"
        raise ValueError(f"{name} is {value}; it must be {right}")


@dataclass(frozen=True)
class Link:
    """A link, the same in both directions: Hockney's α and 1/β (1994). Closed forms take arrays of links, too.

    Attributes:
        latency_seconds: α, from the first byte's leaving to its arrival, or all that a message without bytes costs.
        bandwidth_bytes_per_second: the rate at which bytes follow each other.

    Raises:
        ValueError: if a number is out of range; the message names the field.
    """

    latency_seconds: Any = 0.0
    bandwidth_bytes_per_second: Any = math.inf

    def __post_init__(self) -> None:
        check_numbers("latency_seconds", self.latency_seconds, 0)
        check_numbers("bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, 0, above=True)

    @classmethod
    def of(cls, bandwidth: str, latency: str = "0s") -> Self:
        """A link as people write it: `Link.of("100Mbit", "1ms")`. Raises ValueError for other forms."""
        # Imported here, since it does not travel with jobs.
        from workshop_utils.jobs.quantities import bytes_per_second_of, seconds_of

        return cls(seconds_of(latency), bytes_per_second_of(bandwidth))

    def seconds(self, nbytes: Any) -> Any:
        """Of one message: α + n/B."""
        return self.latency_seconds + nbytes / self.bandwidth_bytes_per_second


class Queue:
    """One direction of a link; `free` is when it will have carried everything so far."""

    __slots__ = ("_seconds_per_byte", "free")

    def __init__(self, bandwidth_bytes_per_second: float) -> None:
        self.free = 0.0
        self._seconds_per_byte = 1 / bandwidth_bytes_per_second

    def carry(self, ready: float, nbytes: int) -> float:
        """Carry a message whose first byte is there at `ready`; returns when its last byte is through."""
        self.free = max(ready, self.free) + nbytes * self._seconds_per_byte
        return self.free


@dataclass(frozen=True)
class Topology:
    """Machines with a NIC each; consecutive ranks share a machine.

    Attributes:
        link: the NIC of each machine.
        ranks_per_machine: how many ranks share it.
        inside: between ranks of one machine, which do not use the NIC; each rank has its own such link.

    Raises:
        ValueError: if a number is out of range; the message names the field.
    """

    link: Link = Link()
    ranks_per_machine: int = 1
    inside: Link = Link()

    def __post_init__(self) -> None:
        check_numbers("ranks_per_machine", self.ranks_per_machine, 1)
