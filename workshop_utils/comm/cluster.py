"""What a message in virtual time passes on its way: links, their queues, and the cluster that they make up.

This is all the physics that the simulations have in common. A link has a queue in each direction, which carries one
message after the other, in the order in which their first bytes come:

    head    = max(start, uplink free)                                  the first byte leaves
    left    = head + size/bandwidth                                    the last one has left: uplink free
    arrival = max(head + latency, downlink free) + size/bandwidth      the last one has come: downlink free

Both links carry a message at once (cut-through); their bandwidths are equal. Stamped links, where these may differ,
let the slower one decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from workshop_utils.quantities import bytes_per_second_of, seconds_of


@dataclass(frozen=True)
class Link:
    """A link, the same in both directions: Hockney's α and 1/β (1994).

    Attributes:
        latency_seconds: from the first byte's leaving to its arrival.
        bandwidth_bytes_per_second: the rate at which bytes follow each other.

    Raises:
        ValueError: for a number that cannot be; the message names the field.
    """

    latency_seconds: float = 0.0
    bandwidth_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency_seconds < math.inf:
            raise ValueError(f"latency_seconds is {self.latency_seconds}; it must be at least 0, and finite")
        if not self.bandwidth_bytes_per_second > 0:
            raise ValueError(
                f"bandwidth_bytes_per_second is {self.bandwidth_bytes_per_second}; it must be more than 0"
            )

    @classmethod
    def of(cls, bandwidth: str, latency: str = "0s") -> Self:
        """The link that people write as `Link.of("100Mbit", "1ms")`. Raises ValueError for other forms."""
        return cls(seconds_of(latency), bytes_per_second_of(bandwidth))


class Queue:
    """One direction of a link; `free` is when it has carried all that it was given so far."""

    __slots__ = ("_seconds_per_byte", "free")

    def __init__(self, bandwidth_bytes_per_second: float) -> None:
        self.free = 0.0
        self._seconds_per_byte = 1 / bandwidth_bytes_per_second

    def carry(self, ready: float, nbytes: int) -> float:
        """Carry a message whose first byte is there when it is `ready`; returns when its last byte is through."""
        head = ready if ready > self.free else self.free
        self.free = head + nbytes * self._seconds_per_byte
        return self.free


@dataclass(frozen=True)
class Cluster:
    """Machines with a NIC each; consecutive ranks share a machine.

    Attributes:
        link: the NIC of each machine.
        ranks_per_machine: how many ranks share it.
        inside: between ranks of one machine, which do not use the NIC; each rank has such a link of its own.

    Raises:
        ValueError: for a number that cannot be; the message names the field.
    """

    link: Link = Link()
    ranks_per_machine: int = 1
    inside: Link = Link()

    def __post_init__(self) -> None:
        if self.ranks_per_machine < 1:
            raise ValueError(f"ranks_per_machine is {self.ranks_per_machine}; it must be at least 1")
