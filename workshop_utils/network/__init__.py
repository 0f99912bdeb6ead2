"""A network made slow on purpose, so that a laptop shows what a cluster feels.

    Local(network=Network(bandwidth="100Mbit")).launch(job)
    Local(network=Network(bandwidth="100Mbit", racks=2, spine="200Mbit", exceptions={"worker-1": "10Mbit"}))

Of two ways to emulate it one is chosen, and `run.network` says which:

- *Network namespaces.* Every process of the job has a network of its own, joined to the others by virtual cables both
  ends of which let only their bandwidth through (`wiring`). It acts in the kernel, below the frameworks, so Horovod,
  TensorFlow and PyTorch feel it without knowing. Processes that one of them starts itself (`mp.spawn`, data loaders)
  share its place, so what they send each other passes no link. It takes Linux, root or a kernel that lets users make
  namespaces, and for latency a kernel with netem. The namespaces have no names and no files: they are gone when the
  run is. What would pass by a network, Unix sockets and shared memory, is refused or switched off.
- *Stamped links* (`comm.stamped`). They take nothing, and only the workshop's own message passing feels them.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from workshop_utils.jobs import PROCESS_NAME, Description, Duration, JobError, readable
from workshop_utils.jobs.quantities import bytes_per_second_of, seconds_of
from workshop_utils.strategies import Strategy

Rate = Annotated[str, AfterValidator(readable(bytes_per_second_of))]

INTERFACE = "eth0"  # what each process sees as its network card
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
SUBNET = "10.77.0"  # unreachable from outside the run's namespaces
MOST_PROCESSES = 250  # addresses in the subnet, less the reserved ones

_FORM = "a rate such as 100Mbit, or settings such as bandwidth=100Mbit,latency=1ms,worker-1=10Mbit"

Availability = Literal["root", "user namespaces", "none"]
Emulation = Literal["network namespaces", "stamped links"]


class Network(Description):
    """Links of `bandwidth` in each direction, between the processes of a job.

    Attributes:
        bandwidth: of each process's link, for example `"100Mbit"`.
        latency: from a process to another one, for example `"1ms"`; none by default.
        racks: how many racks the processes are divided into, neighbours together. Each rack has a switch that is
            never full; without racks there is one for all.
        spine: what joins each rack with the others, in each direction, for all its processes.
        exceptions: bandwidths that differ, by the process's name: `{"worker-1": "10Mbit"}`.

    Raises:
        JobError: for what cannot be; the message names the field.
    """

    bandwidth: Rate
    latency: Duration | None = None
    racks: int = Field(default=1, ge=1, strict=True)
    spine: Rate | None = None
    exceptions: dict[str, Rate] = Field(default={})

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.racks > 1) != (self.spine is not None):
            raise ValueError(
                f"racks is {self.racks} and spine is {self.spine}; it takes both, such as racks=2 and spine=200Mbit"
            )
        for name in self.exceptions:
            if not PROCESS_NAME.fullmatch(name):
                raise ValueError(f"exceptions is for {name!r}; it must be for a process, such as 'worker-1'")
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """The network that a command line names: `100Mbit`, or `bandwidth=100Mbit,latency=1ms,worker-1=10Mbit`.

        Raises:
            JobError: for another form; the message says what is wrong with it.
        """
        return cls._parsed("network", text, _FORM, "exceptions")

    @property
    def bandwidth_bytes_per_second(self) -> float:
        """`bandwidth` in bytes per second."""
        return bytes_per_second_of(self.bandwidth)

    @property
    def latency_seconds(self) -> float:
        """`latency` in seconds."""
        return seconds_of(self.latency) if self.latency else 0.0

    def bandwidth_of(self, name: str) -> float:
        """Bytes per second of the link of the process called so."""
        return bytes_per_second_of(self.exceptions.get(name, self.bandwidth))

    def address(self, index: int) -> str:
        """The address of the process that was started as number `index`, in network namespaces."""
        return f"{SUBNET}.{index + 1}"

    def check(self, names: Sequence[str]) -> None:
        """Raise JobError if this network cannot join the processes called so."""
        if len(names) > MOST_PROCESSES:
            raise JobError(
                f"workers: an emulated network has room for {MOST_PROCESSES} processes, not {len(names)}"
            )
        if self.racks > len(names):
            raise JobError(f"network: racks is {self.racks}; the job has only {len(names)} processes")
        for name in self.exceptions:
            if name not in names:
                raise JobError(
                    f"network: there is no {name} in this job; its processes are {', '.join(names)}"
                )

    @property
    def in_namespaces(self) -> bool:
        """Whether this machine's kernel can emulate it."""
        return availability() != "none" and (self.latency is None or has_netem())

    @property
    def payload_share(self) -> float:
        """What is left of a link's rate for payload, as this machine emulates it.

        In namespaces Linux counts 1,514 bytes for 1,448 of payload (headers of Ethernet, IP and TCP); a stamped link
        counts payload alone.
        """
        return 0.956 if self.in_namespaces else 1.0

    @property
    def goodput(self) -> float:
        """Bytes of payload per second in each direction of a link, as this machine emulates it."""
        return self.payload_share * self.bandwidth_bytes_per_second

    def emulation(self, strategy: Strategy) -> Emulation:
        """How this machine emulates it for jobs of `strategy`.

        Raises:
            JobError: where it cannot; the message says what it takes.
        """
        if self.in_namespaces:
            return "network namespaces"
        if availability() == "none":
            lack = "this machine has no network namespaces"
            remedy = "use Linux with `ip` and `tc` (Debian: apt-get install iproute2), as root or with a kernel that "
            remedy += "lets users make them, or leave the network out"
        else:
            lack = f"latency is {self.latency!r}, and this machine's kernel has no netem"
            remedy = "leave the latency out"
        if not strategy.uses_comm:
            raise JobError(
                f"network: {lack}, so only the workshop's own message passing can be made slow (strategies 'ring' and "
                f"'workshop_parameter_server'), not strategy {strategy.name!r}; {remedy}"
            )
        if self.racks > 1:
            raise JobError(f"network: {lack}, and the stamped links that replace it have no racks; {remedy}")
        return "stamped links"

    def describe(self, emulation: Emulation) -> str:
        """In words, with how it is emulated, since that decides who feels it."""
        ways: dict[Emulation, str] = {
            "network namespaces": "in network namespaces: every framework feels it; processes that a worker starts "
            "share its place",
            "stamped links": "by stamped links: only the workshop's own message passing feels it",
        }
        return f"{self}; {ways[emulation]}"

    def __str__(self) -> str:
        text = f"{self.bandwidth} each way for each process"
        if self.exceptions:
            text += ", but " + ", ".join(f"{rate} for {whose}" for whose, rate in self.exceptions.items())
        if self.spine:
            text += f", in {self.racks} racks with {self.spine} each way between rack and spine"
        return f"{text}, {self.latency} of latency" if self.latency else text


@functools.cache
def availability() -> Availability:
    """Who may make the network namespaces here, found out by making one, which is gone at once."""
    if sys.platform != "linux" or not (shutil.which("ip") and shutil.which("tc") and shutil.which("unshare")):
        return "none"
    trial = " && ".join(
        (
            "ip link add name left type veth peer name right",
            "tc qdisc add dev left root tbf rate 100mbit burst 64k latency 50ms",
            "ip link set dev left gso_max_size 32000 gso_max_segs 22",
            "ip link add name middle type bridge",
        )
    )
    attempts: tuple[Availability, ...] = (
        ("root", "user namespaces") if os.geteuid() == 0 else ("user namespaces",)
    )
    return next((who for who in attempts if _works(trial, who)), "none")


@functools.cache
def has_netem() -> bool:
    """Whether the kernel can delay packets, found out as in `availability`."""
    who = availability()
    return who != "none" and _works("tc qdisc add dev lo root netem delay 1ms", who)


def _works(trial: str, who: Availability) -> bool:
    """Whether the shell command `trial` succeeds in a network namespace, made by root or by a user."""
    as_user = () if who == "root" else ("--user", "--map-root-user")
    command = ["unshare", *as_user, "--net", "sh", "-c", trial]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
