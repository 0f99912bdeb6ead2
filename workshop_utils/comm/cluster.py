"""What a simulated message passes on its way: links, and the cluster that they make up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from workshop_utils.quantities import bytes_per_second_of, seconds_of


@dataclass(frozen=True)
class Link:
    """A link, the same in both directions: Hockney's α and 1/β (1994), and LogP's o (Culler et al. 1993).

    Attributes:
        latency_seconds: from the first byte's leaving to its arrival.
        bandwidth_bytes_per_second: the rate at which bytes follow each other.
        overhead_seconds: what a message costs its sender before the first byte leaves.

    Raises:
        ValueError: for a number that cannot be; the message names the field.
    """

    latency_seconds: float = 0.0
    bandwidth_bytes_per_second: float = math.inf
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "overhead_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0, and finite")
        if not self.bandwidth_bytes_per_second > 0:
            raise ValueError(
                f"bandwidth_bytes_per_second is {self.bandwidth_bytes_per_second}; it must be more than 0"
            )

    @classmethod
    def of(cls, bandwidth: str, latency: str = "0s") -> Self:
        """The link that people write as `Link.of("100Mbit", "1ms")`. Raises ValueError for other forms."""
        return cls(seconds_of(latency), bytes_per_second_of(bandwidth))


@dataclass(frozen=True)
class Cluster:
    """Machines with a NIC each, in racks before a spine; consecutive ranks share a machine, and machines a rack.

    Attributes:
        link: the NIC of each machine.
        ranks_per_machine: how many ranks share it.
        inside: between ranks of one machine, which do not use the NIC; each rank has such a link of its own.
        machines_per_rack: None has all machines in one rack.
        spine: from each rack to the others, shared by the rack; its latency comes on top of the NIC's.
        exceptions: the NICs of machines that differ, by the machine's number. Of two NICs the longer latency counts.

    Raises:
        ValueError: for a number that cannot be; the message names the field.
    """

    link: Link = Link()
    ranks_per_machine: int = 1
    inside: Link = Link()
    machines_per_rack: int | None = None
    spine: Link = Link()
    exceptions: Mapping[int, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ranks_per_machine", "machines_per_rack"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    def nic(self, machine: int) -> Link:
        """The link of `machine`."""
        return self.exceptions.get(machine, self.link)

    @property
    def is_plain(self) -> bool:
        """Whether all ranks have equal links of their own, and nothing shared between them."""
        return self.ranks_per_machine == 1 and self.machines_per_rack is None and not self.exceptions
